"""Several answers to one prompt (n), chats' tokens counted, and offsets of tokens in texts."""

from __future__ import annotations

import openai
import pytest

from edgekv.serve.options import ServeOptions
from tests.serving import post, serving

ASK = [{"role": "user", "content": "the rain in the air " * 8}]
BODY = {"messages": ASK, "prompt": "the rain in the air " * 8, "max_tokens": 6, "temperature": 1}
PATHS = ["/v1/chat/completions", "/v1/completions"]
CACHES = {"full": {}, "compressed": {"kv_ratio": 0.5, "kv_method": "snapkv"}}


@pytest.fixture(scope="module", params=CACHES)
def server(tiny, request):
    options = ServeOptions(alias="tiny", parallel=2)
    with serving(tiny("llama-gqa"), options, **CACHES[request.param]) as (url, server):
        yield url, server


def texts(choices: list[dict]) -> list[str]:
    return [one["message"]["content"] if "message" in one else one["text"] for one in choices]


@pytest.mark.parametrize("path", PATHS)
def test_n_answers_have_seeds_that_follow_each_other(server, path):
    url, _ = server
    body = {**BODY, "seed": 7, "ignore_eos": True}
    both = post(f"{url}{path}", json={**body, "n": 3}).json()
    assert [one["index"] for one in both["choices"]] == [0, 1, 2]
    alone = [post(f"{url}{path}", json={**body, "seed": 7 + i}).json() for i in range(3)]
    assert texts(both["choices"]) == [texts(one["choices"])[0] for one in alone]
    assert len(set(texts(both["choices"]))) > 1
    assert both["usage"]["completion_tokens"] == 18
    assert both["usage"]["prompt_tokens"] == alone[0]["usage"]["prompt_tokens"]


@pytest.mark.parametrize("path", PATHS)
def test_the_prompt_of_n_answers_is_read_once(server, path):
    url, server = server
    before = server.worker.totals.n_prompt
    usage = post(f"{url}{path}", json={**BODY, "n": 4, "cache_prompt": False}).json()["usage"]
    n_read = server.worker.totals.n_prompt - before
    assert usage["prompt_tokens"] <= n_read <= usage["prompt_tokens"] + 3


def test_n_answers_are_streamed_with_their_index(server):
    with openai.OpenAI(base_url=f"{server[0]}/v1", api_key="none", max_retries=0) as client:
        asked = {"model": "any", "n": 2, "seed": 3, "max_tokens": 6, "messages": ASK}
        whole = client.chat.completions.create(**asked).choices
        more = {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, last = client.chat.completions.create(**asked, **more)
        for i in range(2):
            own = [c.choices[0] for c in chunks if c.choices[0].index == i]
            said = "".join(one.delta.content or "" for one in own)
            assert said == whole[i].message.content and own[0].delta.role == "assistant"
            assert own[-1].finish_reason == whole[i].finish_reason
        assert len({chunk.id for chunk in [*chunks, last]}) == 1 and last.choices == []
        assert last.usage.completion_tokens <= 12


@pytest.mark.parametrize("path", [*PATHS, "/completion"])
@pytest.mark.parametrize("n", [0, -1, 65])
def test_another_number_of_answers_is_refused(server, path, n):
    assert post(f"{server[0]}{path}", json={**BODY, "n": n}).status_code == 400


def test_llama_servers_name_of_n_is_known(server):
    said = post(f"{server[0]}/completion", json={**BODY, "n_cmpl": 2, "n_predict": 2}).json()
    assert [one["index"] for one in said] == [0, 1]


def test_answers_that_would_be_dropped_are_refused(server):
    reply = post(f"{server[0]}/v1/completions", json={**BODY, "best_of": 3})
    assert reply.status_code == 400 and "best_of" in reply.json()["error"]["message"]
    assert post(f"{server[0]}/v1/completions", json={**BODY, "best_of": 1}).status_code == 200


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_tokens_of_a_chat_are_counted(server, prefix):
    url = server[0]
    said = post(f"{url}{prefix}/chat/completions/input_tokens", json=BODY).json()
    usage = post(f"{url}/v1/chat/completions", json=BODY).json()["usage"]
    assert said == {"object": "response.input_tokens", "input_tokens": usage["prompt_tokens"]}
    said = post(f"{url}{prefix}/responses/input_tokens", json={"input": ASK}).json()
    assert said["input_tokens"] == usage["prompt_tokens"]


# ---- offsets


def test_tokens_of_a_text_have_their_place_behind_the_prompt(server):
    body = {"prompt": "abc def", "logprobs": 1, "max_tokens": 12, "seed": 1}
    more = {"grammar": "root ::= [a-zé ]{90}"}
    whole = post(f"{server[0]}/v1/completions", json=body | more).json()["choices"][0]
    found = whole["logprobs"]
    text = body["prompt"] + whole["text"]
    for token, begin in zip(found["tokens"], found["text_offset"], strict=True):
        assert "\ufffd" in token or text[begin:].startswith(token)
    assert found["text_offset"][0] == len(body["prompt"])
    with openai.OpenAI(base_url=f"{server[0]}/v1", api_key="none", max_retries=0) as client:
        chunks = client.completions.create(model="any", stream=True, extra_body=more, **body)
        streamed = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs]
    assert [x for one in streamed for x in one.text_offset] == found["text_offset"]
