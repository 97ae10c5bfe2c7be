"""What models write, read back: llama.cpp's formats, whole and in pieces."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from edgekv.chat.reply import CallArguments, CallBegun, Reply, Text, Thought
from edgekv.chat.stops import Stops, held
from edgekv.chat.template import Chat, ChatTemplate, Syntax
from edgekv.chat.tools import Choice, Tool, as_value
from tests.chats import ASK, upstream_template
from tests.engine import load

TOOLS = (
    Tool("get_weather", "x", {"type": "object", "properties": {"city": {"type": "string"}}}),
    Tool("add", "x", {"type": "object", "properties": {"a": {"type": "integer"}}}),
)
PARIS, ONE = ("get_weather", {"city": "Paris"}), ("add", {"a": 1})
HERMES = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
HERMES_ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
XML = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n"
    "</tool_call>"
)
XML_ADD = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
KIMI = (
    "<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    '{"city": "Paris"}<|tool_call_end|>'
)
KIMI_ADD = '<|tool_call_begin|>functions.add:1<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'
GLM = "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>"
GEMMA = '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>'
DSML = (
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city"'
    ' string="true">Paris</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
)
FAMILIES = {
    "Qwen-Qwen2.5-7B-Instruct": [
        (HERMES, ("", "", [PARIS])),
        (f"I look.\n{HERMES}\n{HERMES_ADD}", ("", "I look.", [PARIS, ONE])),
        ("1 < 2 <tool", ("", "1 < 2 <tool", [])),
        (
            HERMES.replace("Paris", "a </tool_call> b"),
            ("", "", [("get_weather", {"city": "a </tool_call> b"})]),
        ),
        ('```json\n{"name": "add", "arguments": {"a": 1}}\n```', ("", "", [ONE])),
        ('{"name": "add", "arguments": {"a": 1}}', ("", "", [ONE])),
        ('{"name": "Ada", "age": 3}', ("", '{"name": "Ada", "age": 3}', [])),
    ],
    "Qwen-Qwen3-0.6B": [(f"<think>\nHm.\n</think>\n\n{HERMES}", ("Hm.", "", [PARIS]))],
    "Qwen3-Coder": [
        (XML, ("", "", [PARIS])),
        (f"I look.\n{XML}\n{XML_ADD}", ("", "I look.", [PARIS, ONE])),
    ],
    "Qwen3.5-4B": [
        (f"Hm.\n</think>\n\n{XML}", ("Hm.", "", [PARIS])),
        ("Hm.\n</think>\n\nYes.", ("Hm.", "Yes.", [])),
    ],
    "mistralai-Mistral-Nemo-Instruct-2407": [
        (
            '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}, "id":'
            ' "abcdefghi"}, {"name": "add", "arguments": {"a": 1}, "id": "abcdefghj"}]',
            ("", "", [PARIS, ONE]),
        )
    ],
    "mistralai-Ministral-3-14B-Reasoning-2512": [
        (
            '[THINK]Hm.[/THINK][TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}',
            ("Hm.", "", [PARIS]),
        ),
        (
            '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]add[ARGS]{"a": 1}',
            ("", "", [PARIS, ONE]),
        ),
    ],
    "meta-llama-Llama-3.1-8B-Instruct": [
        ('{"name": "get_weather", "parameters": {"city": "Paris"}}', ("", "", [PARIS])),
        (
            '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name":'
            ' "add", "parameters": {"a": 1}}',
            ("", "", [PARIS, ONE]),
        ),
    ],
    "openai-gpt-oss-120b": [
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary"
            ' to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}',
            ("Hm.", "", [PARIS]),
        ),
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"
            "Yes.",
            ("Hm.", "Yes.", []),
        ),
    ],
    "deepseek-ai-DeepSeek-V3.2": [(f"Hm.</think>{DSML}", ("Hm.", "", [PARIS]))],
    "llama-cpp-deepseek-r1": [
        (
            "Hm.\n</think>\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
            'get_weather\n```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            ("Hm.", "", [PARIS]),
        )
    ],
    "deepseek-ai-DeepSeek-V3.1": [(f"Hm.</think>\n\n{HERMES}", ("Hm.", "", [PARIS]))],
    "Kimi-K2-Instruct": [
        (
            f"Hi.<|tool_calls_section_begin|>{KIMI}{KIMI_ADD}<|tool_calls_section_end|>",
            ("", "Hi.", [PARIS, ONE]),
        )
    ],
    "GLM-4.6": [(f"<think>Hm.</think>\n{GLM}", ("Hm.", "", [PARIS]))],
    "google-gemma-4-31B-it": [
        (f"{GEMMA}<|tool_call>call:add{{a:1}}<tool_call|>", ("", "", [PARIS, ONE])),
        (f"<|channel>thought\nHm.<channel|>{GEMMA}", ("Hm.", "", [PARIS])),
    ],
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": [
        (
            "<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>[\n"
            '    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Paris"}}'
            "\n]<|END_ACTION|>",
            ("Hm.", "", [PARIS]),
        ),
        ("<|START_RESPONSE|>Yes.<|END_RESPONSE|>", ("", "Yes.", [])),
    ],
    "LFM2-8B-A1B": [
        (
            'Hi.<|tool_call_start|>[get_weather(city="Paris"), add(a=1)]<|tool_call_end|>',
            ("", "Hi.", [PARIS, ONE]),
        )
    ],
    "HuggingFaceTB-SmolLM3-3B": [(f"<think>\nHm.\n</think>\n\n{HERMES}", ("Hm.", "", [PARIS]))],
    "ibm-granite-granite-3.3-2B-Instruct": [
        (
            '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]',
            ("", "", [PARIS]),
        )
    ],
    "google-gemma-2-2b-it": [(f"Yes.\n{HERMES}", ("", "Yes.", [PARIS]))],
}
"""llama.cpp's templates, and for each what a model writes and what it says."""
TEXTS = [(name, text, said) for name, cases in FAMILIES.items() for text, said in cases]
BROKEN = [
    "<tool_call>nothing</tool_call>",
    '<tool_call>{"name": 3}',
    HERMES.replace('"}}', '"}'),
    f"{HERMES} and more {HERMES_ADD}",
    HERMES.replace("get_weather", "no_tool"),
    '{"name": "add", "arguments": 1e400}',
    '<tool_call>\n{"name": "add", "arguments": {"a": NaN}}\n</tool_call>',
    "<think>Hm" + HERMES,
    "[" * 3000,
    "</think></tool_call><|im_end|>",
    "",
]
"""Answers without any format."""


@pytest.fixture(scope="module")
def syntax_of(tiny):
    """syntax_of(template, begun): how an answer with TOOLS, which begins with `begun`, is read."""
    found: dict[str, Syntax] = {}
    with load(tiny("llama-gqa")) as llm:

        def of(name: str, begun: str = "") -> Syntax:
            if name + begun not in found:
                template = ChatTemplate(llm, upstream_template(name))
                messages = [*ASK, {"role": "assistant", "content": begun}] if begun else ASK
                prompt = template.prompt(Chat(messages, Choice(TOOLS, parallel=True)))
                found[name + begun] = prompt.syntax
            return found[name + begun]

        yield of


def added_up(deltas):
    """(thought, text, calls) of deltas, as a client adds them up."""
    thought = "".join(x.text for x in deltas if isinstance(x, Thought))
    text = "".join(x.text for x in deltas if isinstance(x, Text))
    names = {x.index: x.name for x in deltas if isinstance(x, CallBegun)}
    arguments = {
        index: "".join(x.text for x in deltas if isinstance(x, CallArguments) and x.index == index)
        for index in names
    }
    return thought, text, [(names[i], arguments[i]) for i in sorted(names)]


def read(syntax, *pieces):
    reply = Reply(syntax)
    deltas = [delta for piece in pieces for delta in reply.feed(piece)] + reply.end()
    said = added_up(deltas)
    message = reply.message
    assert said == (
        message.thought,
        message.text,
        [(call.name, call.arguments) for call in message.calls],
    )
    return said


@pytest.mark.parametrize("name, text, said", TEXTS)
def test_what_a_model_writes_is_read_back(syntax_of, name, text, said):
    thought, plain, calls = read(syntax_of(name), text)
    assert (thought, plain, [(tool, json.loads(x)) for tool, x in calls]) == said


@pytest.mark.parametrize("name, text", [(name, text) for name, text, _ in TEXTS])
def test_however_an_answer_is_cut_the_deltas_add_up(syntax_of, name, text):
    syntax, dice = syntax_of(name), random.Random(text)
    whole = read(syntax, text)
    assert read(syntax, *text) == whole
    for _ in range(60):
        ends = sorted(dice.choices(range(len(text) + 1), k=dice.randint(1, 12)))
        cuts = [0, *ends, len(text)]
        assert read(syntax, *(text[a:b] for a, b in zip(cuts, cuts[1:]))) == whole


@pytest.mark.parametrize("text", BROKEN)
@pytest.mark.parametrize("name", list(FAMILIES))
def test_an_answer_without_the_format_is_no_error_and_loses_no_text(syntax_of, name, text):
    syntax, dice = syntax_of(name), random.Random(text)
    whole = read(syntax, text)
    for _ in range(4):
        ends = sorted(dice.choices(range(len(text) + 1), k=4))
        cuts = [0, *ends, len(text)]
        assert read(syntax, *(text[a:b] for a, b in zip(cuts, cuts[1:]))) == whole
    if not whole[2]:
        for word in ("nothing", "no_tool", "more"):
            assert (word in text) <= (word in whole[0] + whole[1])


def test_the_beginning_of_an_answer_does_not_wait_for_its_end(syntax_of):
    reply = Reply(syntax_of("Qwen-Qwen2.5-7B-Instruct"))
    assert reply.feed("It is warm") == [Text("It is warm")]
    assert reply.feed(" today.\n<tool_call>\n") == [Text(" today.")]
    begun, *more = reply.feed('{"name": "add", "arguments": {"a": 1')
    assert isinstance(begun, CallBegun) and begun.name == "add" and begun.id
    assert more and all(isinstance(delta, CallArguments) for delta in more)


def test_a_second_call_is_none_of_an_answer_with_one(syntax_of):
    syntax = replace(syntax_of("Qwen-Qwen2.5-7B-Instruct"), is_one_call=True)
    for cut in range(len(HERMES_ADD)):
        reply = Reply(syntax)
        deltas = reply.feed(f"I look.\n{HERMES}\n")
        assert not reply.is_over
        deltas += reply.feed(HERMES_ADD[:cut]) + reply.end()
        thought, text, calls = added_up(deltas)
        assert (thought, text.rstrip()) == ("", "I look.") and len(calls) == 1
    assert reply.is_over and len(reply.message.calls) == 1


@pytest.mark.parametrize(
    ("name", "begun", "text", "said"),
    [
        ("Qwen-Qwen2.5-7B-Instruct", "It is", " warm today.", ("", " warm today.", [])),
        ("Qwen-Qwen2.5-7B-Instruct", "It is ", "warm", ("", "warm", [])),
        ("Qwen-Qwen2.5-7B-Instruct", "I look.", f"\n{HERMES}", ("", "", [PARIS])),
        ("Qwen-Qwen2.5-7B-Instruct", "It", " is <tool_call> no", ("", " is <tool_call> no", [])),
        ("Qwen-Qwen3-0.6B", "It is", " warm", ("", " warm", [])),
        ("Qwen3.5-4B", "It is", " warm", ("", " warm", [])),
    ],
)
def test_what_the_prompt_has_of_an_answer_is_not_said_again(syntax_of, name, begun, text, said):
    syntax = syntax_of(name, begun)
    for pieces in ((text,), text):
        thought, plain, calls = read(syntax, *pieces)
        assert (thought, plain, [(tool, json.loads(x)) for tool, x in calls]) == said


def test_without_a_parser_an_answer_is_its_text():
    assert read(Syntax(), "<think>a</think>", "<tool_call>") == (
        "",
        "<think>a</think><tool_call>",
        [],
    )


@pytest.mark.parametrize(
    "text", ['{"a": 1e400}', '{"a": NaN}', '{"a": -Infinity}', '{"a": "b', "["]
)
def test_arguments_are_always_json(text):
    assert json.loads(json.dumps(as_value(text), allow_nan=False)) is not None


def test_a_stop_may_come_in_pieces_and_characters_too():
    stops = Stops(["END", "é!"])
    assert [stops.feed(x) for x in (b"a E", b"N", b"Q\xc3", b"\xa9")] == ["a ", "", "ENQ", ""]
    assert stops.feed(b"? E") == "é? "
    assert stops.feed(b"ND more") == "" and stops.found == "END"
    assert Stops([]).feed(b"\xc3", final=True) == "\ufffd"
    assert held("abc<to", ["<tool>"]) == 3
