"""llama.cpp's own chats behind the C API: templates, parsers, grammars and samplers."""

from __future__ import annotations

import time
from ctypes import c_bool

import numpy as np
import pytest

from edgekv.errors import BadInput, Cancelled, EdgeKVError
from edgekv.native import chat
from tests.engine import load

HERMES = """{%- if tools %}<|im_start|>system
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
<tool_call>
{"name": <name>, "arguments": <args>}
</tool_call><|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
QUESTION = [{"role": "user", "content": "Is it raining in Paris?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def test_a_template_makes_a_prompt_a_grammar_and_a_parser():
    said = chat.Template(None, HERMES).apply({"messages": QUESTION, "tools": [WEATHER]})
    assert said["prompt"].endswith(
        "<|im_start|>user\nIs it raining in Paris?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert said["grammar_lazy"] and "weather" in said["grammar"]
    call = '{"name": "weather", "arguments": {"city": "Paris"}}'
    text = f"Let me see.\n<tool_call>\n{call}\n</tool_call>"
    message = chat.Parser(said["parser"]).parse(text, is_partial=False)
    assert message["content"].strip() == "Let me see."
    assert [(x["name"], x["arguments"]) for x in message["tool_calls"]] == [
        ("weather", '{"city": "Paris"}')
    ]


@pytest.mark.parametrize("text", ["{% for", "{{ 1 +", "{% endfor %}"])
def test_a_broken_template_is_refused(text):
    with pytest.raises(BadInput):
        chat.Template(None, text)


HOSTILE = {
    "a macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a list without end": "{{ range(1000000000000) | length }}",
    "a text that doubles": "{% set n = namespace(x='a') %}{% for i in range(60) %}"
    "{% set n.x = n.x ~ n.x %}{% endfor %}",
    "a text that grows": "{% set n = namespace(x='a') %}{% for i in range(60) %}"
    "{% set n.x = n.x | replace('a', 'a' * 1000) %}{% endfor %}",
    "a long text": "{{ 'a' * 100000000000 }}",
    "itself": "{% set n = namespace() %}{% set n.a = n %}{{ n | tojson }}",
    "brackets": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "lists": "{{ " + "[" * 20_000 + "]" * 20_000 + " }}",
    "conditions": "{% if true %}" * 20_000 + "a" + "{% endif %}" * 20_000,
    "a long sum": "{{ 1" + "+1" * 50_000 + " }}",
    "filters": "{{ 'a'" + "|trim" * 50_000 + " }}",
    "members": "{{ x" + ".a" * 50_000 + " }}",
    "negations": "{{ " + "not " * 50_000 + "x }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_refused_and_ends(name):
    with pytest.raises(BadInput):
        chat.Template(None, HOSTILE[name]).apply({"messages": QUESTION})


def test_a_template_without_an_end_is_given_up():
    thousand = "{% for a in range(1000) %}"
    endless = thousand * 4 + "{% endfor %}" * 4
    begin = time.monotonic()
    with pytest.raises(BadInput):
        chat.Template(None, endless).apply({"messages": QUESTION, "plain": True})
    assert time.monotonic() - begin < 60


@pytest.mark.parametrize("request_", [{}, {"messages": 1}, {"messages": [{"role": 1}]}])
def test_a_request_that_is_none_is_refused(request_):
    with pytest.raises(BadInput):
        chat.Template(None, HERMES).apply(request_)


def test_a_schema_becomes_a_grammar_that_can_be_read():
    grammar = chat.grammar_of({"type": "object", "properties": {"a": {"enum": ['"', "\\", "é"]}}})
    chat.check_grammar(None, grammar)
    assert grammar.startswith("a") and "root ::=" in grammar


@pytest.mark.parametrize("grammar", ["root ::= foo", "root ::= (", 'x ::= "a"'])
def test_a_grammar_that_cannot_be_read_is_refused(grammar):
    with pytest.raises(BadInput):
        chat.check_grammar(None, grammar)


@pytest.fixture(scope="module")
def llm(tiny):
    with load(tiny("llama-gqa")) as llm:
        yield llm


def logits_for(llm, *tokens: int) -> np.ndarray:
    """Logits by which the first token is the likeliest, then the second, and so on."""
    logits = np.zeros(llm.n_vocab(), np.float32)
    for i, token in enumerate(tokens):
        logits[token] = 30 - i
    return logits


def test_a_sampler_takes_the_likeliest_token_that_a_grammar_lets_through(llm):
    a, b = (llm.tokenize(text, add_bos=False)[0] for text in (b"a", b"b"))
    settings = {"temperature": 0, "grammar": 'root ::= "b"'}
    sampler = chat.SamplerHandle(llm._model.model, settings)
    assert sampler.draw(logits_for(llm, a, b)) == b
    assert sampler.draw(logits_for(llm, a, b)) == llm.token_eos()


def test_a_bias_does_not_keep_the_end_away_where_a_grammar_wants_it(llm):
    b = llm.tokenize(b"b", add_bos=False)[0]
    settings = {
        "temperature": 0,
        "grammar": 'root ::= "b"',
        "logit_bias": {str(token): False for token in range(llm.n_vocab()) if token != b},
    }
    sampler = chat.SamplerHandle(llm._model.model, settings)
    assert sampler.draw(logits_for(llm, b)) == b
    assert sampler.draw(logits_for(llm, b)) == llm.token_eos()


def test_a_sampler_says_when_nothing_is_let_through(llm):
    never = {str(token): False for token in range(llm.n_vocab())}
    settings = {"temperature": 0, "grammar": 'root ::= "b"', "logit_bias": never}
    with pytest.raises(EdgeKVError, match="lets no token through"):
        chat.SamplerHandle(llm._model.model, settings).draw(logits_for(llm, 5))


SLOW = 'root ::= (a | b | "x"){1,200}\na ::= [a-z]{0,200}\nb ::= [a-m]{0,200}'


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_grammar_that_takes_too_long_gives_up_and_sooner_where_it_is_stopped(llm, is_stopped):
    a, stop = llm.tokenize(b"a", add_bos=False)[0], c_bool()
    with pytest.raises(EdgeKVError) as raised:
        sampler = chat.SamplerHandle(llm._model.model, {"temperature": 0, "grammar": SLOW}, stop)
        stop.value = is_stopped
        for _ in range(100):
            sampler.draw(logits_for(llm, a))
    assert isinstance(raised.value, Cancelled) == is_stopped
    assert is_stopped or "takes too long" in str(raised.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"logit_bias": {"99999999": 1.0}},
        {"grammar": "root ::= foo"},
        {"grammar": 'root ::= "a"', "grammar_lazy": True, "grammar_triggers": [{"type": 9}]},
        {"repeat_penalty": 0},
        {"mirostat": 7},
        {"top_k": "many"},
    ],
)
def test_settings_that_cannot_be_used_are_refused(llm, settings):
    with pytest.raises(BadInput):
        chat.SamplerHandle(llm._model.model, settings)
