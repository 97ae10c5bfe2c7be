"""Tool calls and thoughts: what templates say of them, and how answers are read."""

from __future__ import annotations

import json
from dataclasses import replace

import openai
import pytest

from edgekv.serve import grammars
from edgekv.serve.events import Written
from edgekv.serve.options import ServeOptions
from edgekv.serve.reply import Reply, Text, Thought
from edgekv.serve.sampling import Sampler, Sampling
from edgekv.serve.text import Stops, held
from edgekv.serve.tools import HERMES, LLAMA3, MISTRAL, NAMED, Call, Tool, format_of
from tests.engine import load
from tests.serving import serving

NAMES = frozenset({"get_weather", "add"})


def read(text: str, form=HERMES, size: int = 3, **more):
    """(thoughts, text, calls) of an answer that comes in pieces of `size` characters."""
    reply, parts = Reply(form, NAMES, **more), []
    for i in range(0, len(text), size):
        parts += reply.feed(Written(text[i : i + size]))
    parts += reply.end()
    return (
        "".join(part.text for part in parts if isinstance(part, Thought)),
        "".join(part.text for part in parts if isinstance(part, Text)),
        [(part.name, json.loads(part.arguments)) for part in parts if isinstance(part, Call)],
    )


PARIS = ("get_weather", {"city": "Paris"})
HERMES_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ADD = '<tool_call>{"name": "add", "arguments": {"a": [1, 2], "b": "</x>"}}</tool_call>'


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize(
    "form, text, expected",
    [
        (HERMES, "It is warm.", ("It is warm.", [])),
        (HERMES, " 1 < 2 <tool", (" 1 < 2 <tool", [])),
        (HERMES, HERMES_CALL, ("", [PARIS])),
        (HERMES, f"I look.\n{HERMES_CALL}\n", ("I look.", [PARIS])),
        (HERMES, f"{HERMES_CALL}\n{ADD}", ("", [PARIS, ("add", {"a": [1, 2], "b": "</x>"})])),
        (HERMES, HERMES_CALL.removesuffix("</tool_call>"), ("", [PARIS])),
        (HERMES, "<tool_call>nothing</tool_call>", ("<tool_call>nothing</tool_call>", [])),
        (HERMES, '<tool_call>{"name": 3}', ('<tool_call>{"name": 3}', [])),
        (HERMES, '{"name": "get_weather", "arguments": {"city": "Paris"}}', ("", [PARIS])),
        (HERMES, '{ "name": "Ada", "age": 3}', ('{ "name": "Ada", "age": 3}', [])),
        (HERMES, '{"age": 3}', ('{"age": 3}', [])),
        (HERMES, '{"name"', ('{"name"', [])),
        (MISTRAL, '{"name": "add", "arguments": {}}', ('{"name": "add", "arguments": {}}', [])),
        (MISTRAL, '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]',
         ("", [PARIS])),
        (MISTRAL, 'Yes. [TOOL_CALLS] [{"name": "add", "arguments": {}}, {"name": "add", '
         '"arguments": {"a": 1}}]', ("Yes.", [("add", {}), ("add", {"a": 1})])),
        (MISTRAL, "an [array]", ("an [array]", [])),
        (NAMED, '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}', ("", [PARIS])),
        (NAMED, '[TOOL_CALLS]add[ARGS]{}[TOOL_CALLS]add[ARGS]{"a": 1}',
         ("", [("add", {}), ("add", {"a": 1})])),
        (LLAMA3, '{"name": "get_weather", "parameters": {"city": "Paris"}}', ("", [PARIS])),
        (LLAMA3, ' <|python_tag|>{"name": "add", "parameters": {}}', ("", [("add", {})])),
        (LLAMA3, '{"name": "add", "parameters": {}}; {"name": "add", "parameters": {"a": 1}}',
         ("", [("add", {}), ("add", {"a": 1})])),
        (LLAMA3, '{"type": "function", "name": "add", "parameters": {}}', ("", [("add", {})])),
        (LLAMA3, '{"name": "Ada", "born": 1815}', ('{"name": "Ada", "born": 1815}', [])),
        (LLAMA3, "a <|python_tag|> b", ("a <|python_tag|> b", [])),
        (LLAMA3, "The answer is {4}.", ("The answer is {4}.", [])),
    ],
)  # fmt: skip
def test_calls_are_read_in_each_format(form, text, expected, size):
    assert read(text, form, size)[1:] == expected


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize(
    "text, opens, expected",
    [
        ("<think>\nHm.\n</think>\n\nYes.", False, ("Hm.\n", "Yes.", [])),
        ("Hm.</think>Yes.", True, ("Hm.", "Yes.", [])),
        ("<think></think>Yes.", False, ("", "Yes.", [])),
        ("<think>Hm", False, ("Hm", "", [])),
        ("Yes <think>", False, ("", "Yes <think>", [])),
        (f"<think>{HERMES_CALL}</think>No.", False, (HERMES_CALL, "No.", [])),
        (f"<think>a</think>\n{HERMES_CALL}", False, ("a", "", [PARIS])),
    ],
)
def test_thoughts_stand_apart(text, opens, expected, size):
    assert read(text, size=size, opens_thought=opens) == expected


def test_thoughts_stay_in_the_text_where_that_is_wanted():
    text = "<think>Hm.</think>\n\nYes."
    assert read(text, None, splits_thoughts=False) == ("", text, [])


@pytest.mark.parametrize(
    "template, form",
    [
        ("{{ messages }}", HERMES),
        ("... <tool_call> ... tools", HERMES),
        ("[TOOL_CALLS] tools", MISTRAL),
        ("[TOOL_CALLS] [ARGS] tools", NAMED),
        ('<|start_header_id|> tools {"name": x, "parameters": y}', LLAMA3),
    ],
)
def test_the_template_says_the_format(template, form):
    assert format_of(template) is form


def test_a_stop_may_come_in_pieces_and_characters_too():
    stops = Stops(["END", "é!"])
    assert [stops.feed(x) for x in (b"a E", b"N", b"Q\xc3", b"\xa9")] == ["a ", "", "ENQ", ""]
    assert stops.feed(b"? E") == "é? "
    assert stops.feed(b"ND more") == "" and stops.found == "END"
    assert Stops([]).feed(b"\xc3", final=True) == "\ufffd"
    assert held("abc<to", ["<tool>"]) == 3


# ---- over HTTP

TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>"
    "{# answers hold <tool_call> #}{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}:"
    "{{ call.function.arguments | tojson }}</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{{ '<think>' if think }}{% endif %}"
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "x",
            "parameters": {
                "type": "object",
                "properties": {"unit": {"$ref": "#/$defs/unit"}, "n": {"type": "boolean"}},
                "required": ["unit", "n"],
                "$defs": {"unit": {"enum": units}},
            },
        },
    }
    for name, units in (("get_weather", ["C", "F"]), ("add", ["one"]))
]
ASK = [{"role": "user", "content": "abc"}]


def client_of(tiny, template, **more):
    return serving(tiny("llama-gqa"), replace(ServeOptions(chat_template=template), **more))


@pytest.fixture(scope="module")
def client(tiny):
    with client_of(tiny, TEMPLATE) as (url, _):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            yield client


def checked(call):
    assert call.type == "function" and call.id
    arguments = json.loads(call.function.arguments)
    units = {"get_weather": ("C", "F"), "add": ("one",)}[call.function.name]
    assert arguments["unit"] in units and isinstance(arguments["n"], bool)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_model_that_has_to_call_a_tool_does(client, choice):
    done = client.chat.completions.create(
        messages=ASK, model="x", tools=TOOLS, tool_choice=choice, seed=3, temperature=2
    )
    assert done.choices[0].finish_reason == "tool_calls"
    assert done.choices[0].message.content is None
    (call,) = done.choices[0].message.tool_calls
    checked(call)
    if isinstance(choice, dict):
        assert call.function.name == "add"


def test_a_streamed_call_is_whole_in_the_end(client):
    chunks = client.chat.completions.create(
        messages=ASK, model="x", tools=TOOLS, tool_choice="required", stream=True, seed=5
    )
    deltas = [chunk.choices[0] for chunk in chunks]
    calls = [call for one in deltas for call in one.delta.tool_calls or ()]
    assert [call.index for call in calls] == [0]
    checked(calls[0])
    assert deltas[-1].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages }} [TOOL_CALLS] tools",
        "{{ messages }} [TOOL_CALLS] [ARGS] tools",
        '{{ messages }} <|start_header_id|> tools "parameters"',
        "{{ messages }}",
    ],
)
def test_every_format_is_written_as_it_is_read(tiny, template):
    with client_of(tiny, template) as (url, _):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        done = client.chat.completions.create(
            messages=ASK, model="x", tools=TOOLS, tool_choice="required", seed=3
        )
        client.close()
    checked(done.choices[0].message.tool_calls[0])


@pytest.mark.parametrize("form", [HERMES, MISTRAL, NAMED, LLAMA3])
def test_every_grammar_of_calls_can_be_read(tiny, form):
    tools = [Tool(t["function"]["name"], "", t["function"]["parameters"]) for t in TOOLS]
    with load(tiny("llama-gqa")) as llm:
        sampler = Sampler(llm, Sampling(), [])
        for parallel in (False, True):
            for opens_thought in (False, True):
                sampler.constrain(grammars.of_calls(form, tools, parallel, opens_thought))
        sampler.constrain(grammars.of_body(form, tools))
        sampler.constrain(grammars.of_schema({"type": ["string", "null"]}, True))
        sampler.close()


def test_definitions_of_the_same_name_in_two_places_are_told_apart():
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/x/string"}, "b": {"$ref": "#/$defs/y/string"}},
        "$defs": {"x": {"string": {"const": 1}}, "y": {"string": {"const": 2}}},
    }
    text = grammars.of_schema(schema, False)
    assert '::= "1"' in text and '::= "2"' in text


def test_tools_and_their_results_are_in_the_prompt(client):
    messages = [
        *ASK,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "add", "arguments": '{"unit": "one"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "4"},
    ]
    reply = client.post("/../apply-template", body={"messages": messages}, cast_to=object)
    assert reply["prompt"] == (
        '<user>abc<assistant><tool_call>add:{"unit": "one"}</tool_call><tool>4<assistant>'
    )
    reply = client.post(
        "/../apply-template", body={"messages": ASK, "tools": TOOLS}, cast_to=object
    )
    assert reply["prompt"].startswith('<tools>{"type": "function", "function": {"name": "get_wea')


def test_a_template_without_tools_is_told_of_them(tiny):
    with client_of(tiny, "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}") as (
        url,
        _,
    ):
        client = openai.OpenAI(base_url=f"{url}", api_key="none", max_retries=0)
        body = {"messages": ASK, "tools": TOOLS}
        prompt = client.post("/apply-template", body=body, cast_to=object)["prompt"]
        client.close()
    assert prompt.startswith("<system>You may call functions") and "get_weather" in prompt
    assert prompt.endswith("<user>abc")


def test_a_thought_that_the_prompt_opens_stands_apart(client):
    done = client.chat.completions.create(
        messages=ASK,
        model="x",
        seed=1,
        temperature=0,
        max_tokens=8,
        extra_body={"chat_template_kwargs": {"think": True}, "ignore_eos": True},
    )
    assert done.choices[0].message.content == ""
    assert done.choices[0].message.reasoning_content


def test_a_tool_that_is_not_there_cannot_be_chosen(client):
    choice = {"type": "function", "function": {"name": "nothing"}}
    with pytest.raises(openai.BadRequestError, match="nothing"):
        client.chat.completions.create(messages=ASK, model="x", tools=TOOLS, tool_choice=choice)


def test_messages_that_the_template_refuses_are_a_400(tiny):
    with client_of(tiny, "{{ raise_exception('roles must alternate') }}") as (url, _):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.BadRequestError, match="roles must alternate"):
            client.chat.completions.create(messages=ASK, model="x")
        client.close()
