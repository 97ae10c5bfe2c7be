"""Tool calls and thoughts over HTTP."""

from __future__ import annotations

import json
from dataclasses import replace

import openai
import pytest

from edgekv.serve.options import ServeOptions
from tests.chats import ASK, TEMPLATE, THINKS, TOOLS, upstream_template
from tests.serving import serving

ONE = {"parallel_tool_calls": False}


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
        messages=ASK, model="x", tools=TOOLS, tool_choice=choice, seed=3, **ONE
    )
    assert done.choices[0].finish_reason == "tool_calls"
    assert done.choices[0].message.content is None
    (call,) = done.choices[0].message.tool_calls
    checked(call)
    if isinstance(choice, dict):
        assert call.function.name == "add"


def test_a_streamed_call_is_whole_in_the_end(client):
    chunks = client.chat.completions.create(
        messages=ASK, model="x", tools=TOOLS, tool_choice="required", stream=True, seed=5, **ONE
    )
    deltas = [chunk.choices[0] for chunk in chunks]
    first, *more = [call for one in deltas for call in one.delta.tool_calls or ()]
    assert more and not any(call.index for call in (first, *more))
    first.function.arguments += "".join(call.function.arguments for call in more)
    checked(first)
    assert deltas[-1].finish_reason == "tool_calls"


@pytest.fixture(scope="module")
def hermes(tiny):
    with client_of(tiny, upstream_template("Qwen-Qwen2.5-7B-Instruct")) as (url, _):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            yield client


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
@pytest.mark.parametrize("seed", [1, 2])
def test_one_call_is_one_call_in_a_format_that_allows_several(hermes, choice, seed):
    asked = dict(messages=ASK, model="x", tools=TOOLS, tool_choice=choice, seed=seed, **ONE)
    asked["extra_body"] = {"ignore_eos": True}  # a model that would never end
    (choice,) = hermes.chat.completions.create(**asked).choices
    (call,) = choice.message.tool_calls
    checked(call)
    assert choice.finish_reason == "tool_calls" and not choice.message.content
    chunks = [chunk.choices[0] for chunk in hermes.chat.completions.create(**asked, stream=True)]
    first, *more = [call for one in chunks for call in one.delta.tool_calls or ()]
    arguments = first.function.arguments + "".join(one.function.arguments for one in more)
    assert arguments == call.function.arguments and chunks[-1].finish_reason == "tool_calls"
    assert len(more) > 1  # arguments come as they are written
    assert not any(one.delta.content for one in chunks)


@pytest.mark.parametrize(
    "template",
    [
        "",
        "Qwen-Qwen2.5-7B-Instruct",
        "mistralai-Mistral-Nemo-Instruct-2407",
        "meta-llama-Llama-3.1-8B-Instruct",
        "openai-gpt-oss-120b",
    ],
)
def test_every_format_is_written_as_it_is_read(tiny, template):
    text = upstream_template(template) if template else "{{ messages[0].content }}"
    with client_of(tiny, text) as (url, _):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        done = client.chat.completions.create(
            messages=ASK, model="x", tools=TOOLS, tool_choice="required", seed=3, **ONE
        )
        client.close()
    checked(done.choices[0].message.tool_calls[0])


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
        '<|user|>abc<|end|><|assistant|><tool_call>\n{"name": "add", "arguments": {"unit":'
        ' "one"}}\n</tool_call><|end|><|tool|>4<|end|><|assistant|>'
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


def test_a_thought_that_the_prompt_opens_stands_apart(tiny):
    with client_of(tiny, THINKS) as (url, _):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        done = client.chat.completions.create(
            messages=ASK,
            model="x",
            seed=1,
            temperature=0,
            max_tokens=8,
            extra_body={"chat_template_kwargs": {"think": True}, "ignore_eos": True},
        )
        client.close()
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
