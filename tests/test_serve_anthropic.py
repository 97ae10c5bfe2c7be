"""The server through Anthropic's own client."""

from __future__ import annotations

import json

import anthropic
import pytest

from edgekv.serve.options import ServeOptions
from tests.chats import TEMPLATE, THINKS
from tests.serving import post, serving

ASK = [{"role": "user", "content": "abc def"}]
GREEDY = {"model": "tiny", "max_tokens": 8, "extra_body": {"temperature": 0}}
TOOL = {
    "name": "add",
    "description": "x",
    "input_schema": {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
    },
}


@pytest.fixture(scope="module")
def url(tiny):
    options = ServeOptions(alias="tiny", chat_template=TEMPLATE, api_keys=("key",))
    with serving(tiny("llama-gqa"), options) as (url, _):
        yield url


@pytest.fixture(scope="module")
def client(url):
    with anthropic.Anthropic(base_url=url, api_key="key", max_retries=0) as client:
        yield client


def test_a_message_is_answered(client):
    done = client.messages.create(messages=ASK, **GREEDY)
    assert done.role == "assistant" and done.model == "tiny" and done.content[0].text
    assert done.stop_reason == "max_tokens" and done.usage.output_tokens == 8
    assert done.usage.input_tokens > 0
    again = client.messages.create(messages=ASK, **GREEDY).usage
    assert again.cache_read_input_tokens > 0
    assert (
        again.input_tokens + again.cache_read_input_tokens
        == done.usage.input_tokens + done.usage.cache_read_input_tokens
    )


def test_a_streamed_message_says_the_same(client):
    whole = client.messages.create(messages=ASK, **GREEDY)
    with client.messages.stream(messages=ASK, **GREEDY) as stream:
        text = "".join(stream.text_stream)
        done = stream.get_final_message()
    assert text == whole.content[0].text == done.content[0].text
    assert done.stop_reason == "max_tokens" and done.usage.output_tokens == 8


def test_the_events_of_a_stream_come_in_order(client):
    kinds = [event.type for event in client.messages.create(messages=ASK, stream=True, **GREEDY)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}


def test_a_stop_sequence_is_named(client):
    whole = client.messages.create(messages=ASK, **GREEDY).content[0].text
    stop = whole[2:4]
    done = client.messages.create(messages=ASK, stop_sequences=[stop], **GREEDY)
    assert done.stop_reason == "stop_sequence" and done.stop_sequence == stop
    assert done.content[0].text == whole[: whole.index(stop)]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "add"}])
def test_a_tool_is_called(client, choice):
    choice = {**choice, "disable_parallel_tool_use": True}
    more = {"messages": ASK, "tools": [TOOL], "tool_choice": choice}
    done = client.messages.create(**more, **{**GREEDY, "max_tokens": 200})
    assert done.stop_reason == "tool_use"
    (block,) = done.content
    assert block.type == "tool_use" and block.name == "add" and isinstance(block.input["ok"], bool)
    with client.messages.stream(**more, **{**GREEDY, "max_tokens": 200}) as stream:
        streamed = stream.get_final_message()
    assert streamed.content[0].input == block.input


def test_an_answer_has_the_form_that_is_asked_for(client):
    form = {"type": "json_schema", "schema": TOOL["input_schema"]}
    asked = {**GREEDY, "max_tokens": 100, "messages": ASK}
    done = client.messages.create(**asked, output_config={"format": form, "effort": "low"})
    assert list(json.loads(done.content[0].text)) == ["ok"] and done.stop_reason == "end_turn"
    with pytest.raises(anthropic.BadRequestError, match="json_schema"):
        client.messages.create(**asked, output_config={"format": {"type": "xml"}})


def test_a_thought_is_a_block_of_its_own(tiny):
    body = {"temperature": 0, "chat_template_kwargs": {"think": True}, "ignore_eos": True}
    more = {**GREEDY, "extra_body": body}
    with serving(tiny("llama-gqa"), ServeOptions(alias="tiny", chat_template=THINKS)) as (url, _):
        client = anthropic.Anthropic(base_url=url, api_key="key", max_retries=0)
        done = client.messages.create(messages=ASK, **more)
        assert [block.type for block in done.content] == ["thinking"]
        with client.messages.stream(messages=ASK, **more) as stream:
            assert stream.get_final_message().content[0].thinking == done.content[0].thinking
        client.close()


def test_blocks_become_messages_of_the_template(client, url):
    content = [
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "abc"}},
        {"type": "text", "text": "the"},
    ]
    called = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"ok": True}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "4"}
    messages = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": [{"type": "text", "text": "an"}, called]},
        {"role": "user", "content": [result]},
    ]
    n = client.messages.count_tokens(model="tiny", messages=messages, system="be")
    prompt = (
        "<|system|>be<|end|><|user|>abc\nthe<|end|><|assistant|>an<tool_call>\n"
        '{"name": "add", "arguments": {"ok": true}}\n</tool_call><|end|><|tool|>4<|end|>'
        "<|assistant|>"
    )
    reply = post(
        f"{url}/tokenize",
        json={"content": prompt, "add_special": True},
        headers={"X-Api-Key": "key"},
    )
    assert n.input_tokens == len(reply.json()["tokens"])


def test_an_answer_goes_on_from_its_beginning(client):
    whole = client.messages.create(messages=ASK, **GREEDY).content[0].text
    begun = [*ASK, {"role": "assistant", "content": "the"}]
    n = client.messages.count_tokens(model="tiny", messages=begun).input_tokens
    assert n > client.messages.count_tokens(model="tiny", messages=ASK).input_tokens
    assert client.messages.create(messages=begun, **GREEDY).content[0].text != whole


def test_errors_have_anthropics_form(client, url):
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(messages=[{"role": "user", "content": "abc " * 2000}], **GREEDY)
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    with pytest.raises(anthropic.BadRequestError, match="image"):
        client.messages.create(messages=[{"role": "user", "content": [image]}], **GREEDY)
    with anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0) as wrong:
        with pytest.raises(anthropic.AuthenticationError):
            wrong.messages.create(messages=ASK, **GREEDY)
