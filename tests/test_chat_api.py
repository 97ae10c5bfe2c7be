"""`Llama.create_chat_completion` and grammars in Python: as the server has them, and never the end
of the process.
"""

from __future__ import annotations

import json
import random

import pytest

from edgekv import BadInput, EdgeKVError
from edgekv.llama_cpp import LlamaGrammar
from tests.chats import ASK, TOOLS
from tests.engine import load

SCHEMA = {"type": "object", "properties": {"a": {"enum": ['"', "\\", "\n", "é", "😀"]}}}
SCHEMA["required"] = ["a"]


@pytest.fixture(scope="module", params=[1.0, 0.5])
def llm(tiny, request):
    with load(tiny("llama-gqa"), kv_ratio=request.param) as llm:
        yield llm


def test_a_schema_is_held_to_with_the_values_that_it_names(llm):
    for seed in range(5):
        done = llm.create_chat_completion(
            ASK,
            seed=seed,
            temperature=2,
            max_tokens=60,
            response_format={"type": "json_schema", "json_schema": {"schema": SCHEMA}},
        )
        said = json.loads(done["choices"][0]["message"]["content"])
        assert said["a"] in SCHEMA["properties"]["a"]["enum"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_that_has_to_be_called_is(llm, stream):
    choice = {"type": "function", "function": {"name": "get_weather"}}
    more = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 200, "seed": 3}
    done = llm.create_chat_completion(ASK, stream=stream, **more)
    if not stream:
        assert done["choices"][0]["finish_reason"] == "tool_calls"
        (call,) = done["choices"][0]["message"]["tool_calls"]
        name, arguments = call["function"]["name"], call["function"]["arguments"]
    else:
        choices = [chunk["choices"][0] for chunk in done]
        assert choices[0]["delta"] == {"role": "assistant"}
        assert choices[-1]["finish_reason"] == "tool_calls"
        calls = [x for one in choices for x in one["delta"].get("tool_calls", ())]
        name = calls[0]["function"]["name"]
        arguments = "".join(x["function"]["arguments"] for x in calls)
    assert name == "get_weather" and json.loads(arguments)["unit"] in ("C", "F")


def test_the_stream_and_the_whole_say_the_same(llm):
    more = {"temperature": 0, "max_tokens": 12}
    whole = llm.create_chat_completion(ASK, **more)["choices"][0]
    pieces = [x["choices"][0] for x in llm.create_chat_completion(ASK, stream=True, **more)]
    text = "".join(x["delta"].get("content") or "" for x in pieces)
    assert text == whole["message"]["content"]
    assert pieces[-1]["finish_reason"] == whole["finish_reason"]


def test_functions_are_tools_by_their_older_name(llm):
    functions = [tool["function"] for tool in TOOLS]
    done = llm.create_chat_completion(
        ASK, functions=functions, function_call={"name": "add"}, max_tokens=200, seed=1
    )
    assert done["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "add"


@pytest.mark.parametrize(
    "grammar",
    ["root ::= foo", "root ::= " + "(" * 60_000, "", "\0", 'root ::= "a'],
)
def test_a_grammar_that_cannot_be_read_is_one_line(llm, grammar):
    made = LlamaGrammar.from_string(grammar)
    for ask in (
        lambda: llm.create_completion("abc", grammar=made, max_tokens=3),
        lambda: llm.create_chat_completion(ASK, grammar=made, max_tokens=3),
    ):
        if not grammar:
            ask()  # none
            continue
        with pytest.raises(BadInput) as caught:
            ask()
        assert "\n" not in str(caught.value)
    assert llm.create_completion("abc", max_tokens=2)["choices"][0]


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= (a | b | "x"){1,200}\na ::= [a-z]{0,200}\nb ::= [a-m]{0,200}',
        "root ::= ((((([a-z]?){0,9}){0,9}){0,9}){0,9}){0,9}",
    ],
)
def test_a_grammar_that_takes_minutes_is_given_up(llm, grammar):
    made = LlamaGrammar.from_string(grammar)
    with pytest.raises(BadInput, match="takes too long"):
        llm.create_completion("abc", grammar=made, max_tokens=100)
    assert llm.create_completion("abc", max_tokens=2)["choices"][0]


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": []},
        {"type": "string", "maxLength": 2000},
        {"type": "string", "pattern": "^\\d{3}$"},
        {"enum": ['a"b']},
        {"type": "nonsense"},
        {"$ref": "#/$defs/none"},
    ],
)
def test_a_schema_is_held_to_or_refused(llm, schema):
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    tool = {
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}}}
    }
    for more in ({"response_format": form}, {"tools": [tool], "tool_choice": "required"}):
        try:
            llm.create_chat_completion(ASK, max_tokens=8, **more)
        except BadInput as error:
            assert "\n" not in str(error)


def nonsense(dice: random.Random, depth: int = 0):
    """JSON of words that schemas and tools have, in places where they may mean nothing."""
    words = ["type", "object", "enum", "pattern", "^(a?){9}$", "$ref", "#", "properties", "allOf"]
    words += [
        "not",
        "items",
        "maxItems",
        "minimum",
        "required",
        "name",
        "function",
        "\\d[",
        '"',
        "\x01",
    ]
    kind = dice.randrange(4 if depth < 5 else 2)
    if kind == 0:
        return dice.choice([*words, 1e400, -1, 0, 2000, None, True, "x" * 300])
    if kind == 1:
        return dice.choice(words)
    if kind == 2:
        return [nonsense(dice, depth + 1) for _ in range(dice.randrange(4))]
    return {dice.choice(words): nonsense(dice, depth + 1) for _ in range(dice.randrange(5))}


def gbnf(dice: random.Random) -> str:
    pieces = ["root", "::=", "a", '"x"', "[a-z]", "(", ")", "|", "*", "+", "?", "{3}", "{1,", "\n"]
    pieces += ["[^\\x00]", "\\", '"', "[", "]", "b ::= ", ".", "{99999}", "😀", "<1>", "#"]
    return "root ::= " + " ".join(dice.choices(pieces, k=dice.randrange(12)))


@pytest.mark.parametrize("n", [150, pytest.param(3_000, marks=pytest.mark.slow)])
def test_no_input_ends_the_process(tiny, n):
    dice = random.Random(n)
    with load(tiny("llama-gqa"), n_ctx=512) as llm:
        for _ in range(n):
            ways = {
                "response_format": nonsense(dice),
                "tools": [{"function": {"name": "f", "parameters": nonsense(dice)}}],
                "grammar": LlamaGrammar.from_string(gbnf(dice)),
            }
            name = dice.choice(list(ways))
            forced = {"tool_choice": "required"} if name == "tools" and dice.random() < 0.5 else {}
            if name == "response_format" and dice.random() < 0.7:
                ways[name] = {"type": "json_schema", "json_schema": {"schema": nonsense(dice)}}
            try:
                llm.create_chat_completion(ASK, max_tokens=2, **{name: ways[name]}, **forced)
            except EdgeKVError as error:
                assert "\n" not in str(error)


def test_a_chat_handler_gets_messages_as_they_are(tiny):
    seen = []

    def handler(*, llama, messages, **_):
        seen.append(messages)
        return {"choices": []}

    parts = [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": "what?"}]
    for ratio in (1.0, 0.5):
        with load(tiny("llama-gqa"), chat_handler=handler, kv_ratio=ratio) as llm:
            llm.create_chat_completion([{"role": "user", "content": parts}])
    assert seen == [[{"role": "user", "content": parts}]] * 2


def test_variables_of_a_template_that_is_not_asked_are_refused(tiny):
    llm = load(tiny("llama-gqa"), chat_format="chatml")
    with pytest.raises(BadInput, match="chat_template_kwargs"):
        llm.create_chat_completion(ASK, chat_template_kwargs={"enable_thinking": False})


def test_a_byte_that_is_no_utf_8_does_not_take_all_metadata_away(tiny, tmp_path):
    data = tiny("llama-gqa").read_bytes()
    name = b"general.architecture"
    at = data.index(b"llama", data.index(name) + len(name))
    odd = b"tokenizer.ggml.model"
    begin = data.index(b"llama", data.index(odd) + len(odd))
    assert at != begin
    template = data.index(b"{%")
    damaged = bytearray(data)
    damaged[data.index(b"}", template) - 1] = 0xFF
    (tmp_path / "model.gguf").write_bytes(damaged)
    with load(tmp_path / "model.gguf") as llm:
        assert llm.metadata["general.architecture"] == "llama"
