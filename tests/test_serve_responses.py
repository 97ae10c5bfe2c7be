"""The server's /v1/responses through OpenAI's own client."""

from __future__ import annotations

import json

import openai
import pytest

from edgekv.serve.options import ServeOptions
from tests.chats import TEMPLATE, THINKS
from tests.serving import serving

GREEDY = {"model": "tiny", "temperature": 0, "max_output_tokens": 8}
TOOL = {
    "type": "function",
    "name": "add",
    "parameters": {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
    },
}


@pytest.fixture(scope="module")
def client(tiny):
    options = ServeOptions(alias="tiny", chat_template=TEMPLATE)
    with serving(tiny("llama-gqa"), options) as (url, _):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            yield client


def test_a_text_is_answered_as_a_chat_is(client):
    more = {"extra_body": {"ignore_eos": True}}
    done = client.responses.create(input="abc", instructions="def", **more, **GREEDY)
    chat = client.chat.completions.create(
        messages=[{"role": "system", "content": "def"}, {"role": "user", "content": "abc"}],
        model="tiny",
        temperature=0,
        max_tokens=8,
        **more,
    )
    assert done.output_text == chat.choices[0].message.content
    assert done.status == "incomplete"
    assert done.incomplete_details.reason == "max_output_tokens"
    assert done.usage.output_tokens == 8


def test_a_stream_says_the_same(client):
    whole = client.responses.create(input="abc", **GREEDY)
    with client.responses.stream(input="abc", **GREEDY) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    assert kinds[-1] == "response.incomplete"
    assert events[-1].response.output_text == whole.output_text
    assert [event.sequence_number for event in events] == sorted(
        {event.sequence_number for event in events}
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_function_is_called(client, stream):
    more = {"input": "abc", "tools": [TOOL], "tool_choice": "required", "model": "tiny"}
    more["parallel_tool_calls"] = False
    if stream:
        with client.responses.stream(**more) as coming:
            done = coming.get_final_response()
    else:
        done = client.responses.create(**more)
    (item,) = done.output
    assert item.type == "function_call" and item.name == "add" and item.call_id
    assert isinstance(json.loads(item.arguments)["ok"], bool)
    assert done.status == "completed"


def test_a_call_and_its_output_are_read(client):
    conversation = [
        {"role": "user", "content": [{"type": "input_text", "text": "abc"}]},
        {"type": "function_call", "call_id": "1", "name": "add", "arguments": '{"ok": true}'},
        {"type": "function_call_output", "call_id": "1", "output": "4"},
    ]
    done = client.responses.create(input=conversation, **GREEDY)
    chat = client.chat.completions.create(
        messages=[
            {"role": "user", "content": "abc"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {"function": {"name": "add", "arguments": '{"ok": true}'}, "id": "1"}
                ],
            },
            {"role": "tool", "content": "4", "tool_call_id": "1"},
        ],
        model="tiny",
        temperature=0,
        max_tokens=8,
    )
    assert done.output_text == chat.choices[0].message.content
    assert done.usage.input_tokens == chat.usage.prompt_tokens


def test_an_answer_fits_its_schema(client):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    form = {"type": "json_schema", "name": "x", "schema": schema}
    done = client.responses.create(input="abc", model="tiny", text={"format": form})
    assert json.loads(done.output_text)["a"] in (1, 2)


def test_a_thought_is_an_item_of_its_own(tiny):
    body = {"chat_template_kwargs": {"think": True}, "ignore_eos": True}
    with serving(tiny("llama-gqa"), ServeOptions(alias="tiny", chat_template=THINKS)) as (url, _):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        done = client.responses.create(input="abc", extra_body=body, **GREEDY)
        client.close()
    assert [item.type for item in done.output] == ["reasoning"]
    assert done.output[0].content[0].text


@pytest.mark.parametrize(
    "more, word",
    [
        ({"previous_response_id": "resp_1"}, "stores no responses"),
        ({"tools": [{"type": "function"}]}, "no function"),
        ({"input": []}, "empty"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image"),
    ],
)
def test_what_this_server_has_not_is_refused(client, more, word):
    with pytest.raises(openai.BadRequestError, match=word):
        client.responses.create(**{"input": "abc", **GREEDY, **more})
