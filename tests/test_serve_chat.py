"""The server through OpenAI's own client: chats and texts, whole and streamed."""

from __future__ import annotations

import base64
import hashlib
import json
import re

import numpy as np
import openai
import pydantic
import pytest

from edgekv.serve import sse
from edgekv.serve.options import ServeOptions
from tests.serving import BROWSER, get, post, serving, until


@pytest.fixture(scope="module")
def server(tiny):
    options = ServeOptions(alias="tiny", metrics=True, parallel=1)
    with serving(tiny("llama-gqa"), options) as (url, server):
        yield url, server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server[0]}/v1", api_key="none", max_retries=0) as client:
        yield client


ASK = [{"role": "user", "content": "abc def"}]
GREEDY = {"model": "tiny", "temperature": 0, "max_tokens": 8}


def test_the_model_is_listed(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "edgekv"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_health(server):
    assert get(f"{server[0]}/health").json() == {"status": "ok"}


def test_a_chat_is_answered(client):
    done = client.chat.completions.create(messages=ASK, **GREEDY)
    choice = done.choices[0]
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason == "length"
    assert done.model == "tiny"
    assert done.usage.completion_tokens == 8
    assert done.usage.total_tokens == done.usage.prompt_tokens + 8


def test_a_streamed_chat_says_the_same(client):
    whole = client.chat.completions.create(messages=ASK, **GREEDY).choices[0].message.content
    chunks = list(
        client.chat.completions.create(
            messages=ASK, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(pieces) == whole
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage.completion_tokens == 8


def test_without_include_usage_no_chunk_lacks_choices(client):
    chunks = client.chat.completions.create(messages=ASK, stream=True, **GREEDY)
    assert all(chunk.choices for chunk in chunks)


def test_a_text_goes_on(client):
    done = client.completions.create(prompt="abc", **GREEDY)
    pieces = client.completions.create(prompt="abc", stream=True, **GREEDY)
    assert "".join(piece.choices[0].text for piece in pieces) == done.choices[0].text
    assert done.choices[0].finish_reason == "length"


def test_several_prompts_have_an_answer_each(client):
    both = client.completions.create(prompt=["abc", "the"], **GREEDY)
    alone = [client.completions.create(prompt=p, **GREEDY).choices[0].text for p in ("abc", "the")]
    assert [choice.text for choice in both.choices] == alone
    assert [choice.index for choice in both.choices] == [0, 1]
    assert both.usage.completion_tokens == 16


def test_a_prompt_of_tokens_is_its_text(client, server):
    tokens = post(f"{server[0]}/tokenize", json={"content": "abc", "add_special": True}).json()[
        "tokens"
    ]
    by_text, by_tokens = (
        client.completions.create(prompt=prompt, **GREEDY).choices[0].text
        for prompt in ("abc", tokens)
    )
    assert by_text == by_tokens


def test_llama_servers_own_path_says_the_same(client, server):
    text = client.completions.create(prompt="abc", **GREEDY).choices[0].text
    body = {"prompt": "abc", "temperature": 0, "n_predict": 8}
    done = post(f"{server[0]}/completion", json={**body, "n_probs": 2}).json()
    assert done["content"] == text and done["stop"] and done["stop_type"] == "limit"
    assert done["tokens_predicted"] == 8 and done["tokens"] == []
    assert done["has_new_line"] == ("\n" in text)
    settings = done["generation_settings"]
    assert (settings["temperature"], settings["n_predict"], settings["n_probs"]) == (0, 8, 2)
    tokens = post(f"{server[0]}/completion", json={**body, "return_tokens": True}).json()["tokens"]
    assert [one["id"] for one in done["completion_probabilities"]] == tokens and len(tokens) == 8
    assert all(len(one["top_logprobs"]) == 2 for one in done["completion_probabilities"])
    reply = post(f"{server[0]}/completion", json={**body, "stream": True, "stop": [text[4:6]]})
    data = [line for line in reply.text.splitlines() if line.startswith("data: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in data]
    assert "".join(event["content"] for event in events) == text[: text.index(text[4:6])]
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["generation_settings"]["stop"] == [text[4:6]]
    assert events[-1]["stop_type"] == "word" and events[-1]["stopping_word"] == text[4:6]


def test_echo_repeats_the_prompt(client):
    done = client.completions.create(prompt="abc", echo=True, **GREEDY)
    assert done.choices[0].text.lstrip().startswith("abc")


def test_what_was_read_before_is_not_read_again(client):
    long = [{"role": "user", "content": "the " * 100}]
    client.chat.completions.create(messages=long, **GREEDY)
    usage = client.chat.completions.create(messages=long, **GREEDY).usage
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1


def test_a_compressed_cache_says_what_it_had_too(tiny):
    cache = {"kv_ratio": 0.5, "kv_method": "snapkv", "n_ubatch": 64}
    with serving(tiny("llama-gqa"), **cache) as (url, _):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        document = {"type": "text", "text": "the " * 200}
        messages = [
            {"role": "user", "content": [document, {"type": "text", "text": question}]}
            for question in ("abc", "def")
        ]
        usages = [client.chat.completions.create(messages=[m], **GREEDY).usage for m in messages]
        last = client.chat.completions.create(messages=[messages[0]], **GREEDY)
        client.close()
    assert last.kv["method"] == "snapkv"
    assert 0.4 < last.kv["bytes"] / last.kv["bytes_full"] < 0.7
    assert usages[0].prompt_tokens_details.cached_tokens == 0
    assert usages[1].prompt_tokens_details.cached_tokens > 200


def test_the_answer_ends_before_a_stop(client):
    whole = client.completions.create(prompt="abc", **GREEDY).choices[0].text
    stop = whole[3:5]
    done = client.completions.create(prompt="abc", stop=stop, **GREEDY)
    assert done.choices[0].text == whole[: whole.index(stop)]
    assert done.choices[0].finish_reason == "stop"
    pieces = client.completions.create(prompt="abc", stop=[stop, "zzzz"], stream=True, **GREEDY)
    assert "".join(piece.choices[0].text for piece in pieces) == done.choices[0].text


def test_a_seed_gives_the_same_answer_again(client):
    def answer(seed):
        done = client.chat.completions.create(
            messages=ASK, model="tiny", temperature=1.5, seed=seed, max_tokens=16
        )
        return done.choices[0].message.content

    assert answer(7) == answer(7)
    assert len({answer(seed) for seed in range(4)}) > 1


def test_logprobs_are_those_of_the_models_own_logits(client, tiny):
    from tests.engine import load, logits

    done = client.completions.create(
        prompt=[5, 9, 12, 40, 41], model="tiny", temperature=0, max_tokens=1, logprobs=3
    )
    llm = load(tiny("llama-gqa"))
    llm.eval([5, 9, 12, 40, 41])
    row = logits(llm).astype(np.float64)
    expected = row - row.max() - np.log(np.exp(row - row.max()).sum())
    got = done.choices[0].logprobs
    assert got.token_logprobs[0] == pytest.approx(expected.max(), abs=1e-3)
    assert sorted(got.top_logprobs[0].values())[-1] == pytest.approx(expected.max(), abs=1e-3)


def test_each_token_of_a_chat_has_its_logprob(client):
    done = client.chat.completions.create(messages=ASK, logprobs=True, top_logprobs=2, **GREEDY)
    content = done.choices[0].logprobs.content
    assert len(content) == 8
    assert all(len(one.top_logprobs) == 2 for one in content)
    assert all(one.logprob == one.top_logprobs[0].logprob for one in content)
    text = b"".join(bytes(one.bytes) for one in content).decode("utf-8", "replace")
    assert text == done.choices[0].message.content
    chunks = client.chat.completions.create(messages=ASK, logprobs=True, stream=True, **GREEDY)
    streamed = [
        one for c in chunks if c.choices[0].logprobs for one in c.choices[0].logprobs.content
    ]
    expected = [one.logprob for one in content]
    assert [one.logprob for one in streamed] == pytest.approx(expected, abs=1e-3)


SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["red", "blue"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_fits_its_schema(client, stream):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    done = client.chat.completions.create(
        messages=ASK, model="tiny", seed=1, response_format=form, stream=stream, max_tokens=200
    )
    if stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in done)
    else:
        text = done.choices[0].message.content
        assert done.choices[0].finish_reason == "stop"
    value = json.loads(text)
    assert set(value) == {"ok", "kind"} and value["kind"] in ("red", "blue")


class Choice(pydantic.BaseModel):
    ok: bool
    maybe: bool | None


def test_openais_client_reads_types_of_its_own(client):
    ask = {"messages": ASK, "model": "tiny", "response_format": Choice}
    assert client.chat.completions.parse(**ask).choices[0].message.parsed.ok in (True, False)
    with client.chat.completions.stream(**ask) as stream:
        done = stream.get_final_completion()
    assert isinstance(done.choices[0].message.parsed, Choice)


def test_a_grammar_decides(client):
    extra = {"grammar": 'root ::= ("yes" | "no") "!"'}
    done = client.chat.completions.create(
        messages=ASK, model="tiny", temperature=2, extra_body=extra
    )
    assert done.choices[0].message.content in ("yes!", "no!")


@pytest.mark.parametrize(
    "grammar", ["root ::= (", "root ::= root", 'other ::= "a"', "(" * 10000, 'root ::= "a"{99999}']
)
def test_a_grammar_that_cannot_be_read_is_refused(client, grammar):
    with pytest.raises(openai.BadRequestError, match="grammar"):
        client.chat.completions.create(
            messages=ASK, extra_body={"grammar": grammar}, stream=True, **GREEDY
        )
    assert client.chat.completions.create(messages=ASK, **GREEDY).choices


def test_a_schema_that_cannot_be_used_is_refused(client):
    schema = {"$ref": "https://example.org/schema"}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match="schema"):
        client.chat.completions.create(messages=ASK, response_format=form, **GREEDY)


def test_any_model_name_is_answered_by_the_one_there_is(client):
    done = client.chat.completions.create(messages=ASK, **{**GREEDY, "model": "gpt-4o"})
    assert done.model == "tiny"


def test_no_tokens_are_written_where_none_are_wanted(client):
    done = client.completions.create(prompt="abc", model="tiny", max_tokens=0)
    assert done.choices[0].text == "" and done.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    "body, word",
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "role"),
        ({"messages": ASK, "temperature": "hot"}, "temperature"),
        ({"messages": ASK, "n": 0}, "n"),
        ({"messages": ASK, "tool_choice": "required"}, "tools"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text"),
    ],
)
def test_what_cannot_be_answered_is_said_in_openais_form(server, body, word):
    reply = post(f"{server[0]}/v1/chat/completions", json=body)
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["code"] == 400
    assert error["type"] == "invalid_request_error" and word in error["message"]
    assert "\n" not in error["message"]


@pytest.mark.parametrize("text", ["{", "", "[1", "nothing", "[" * 10**5, '{"messages": NaN}'])
def test_no_json_is_refused(server, text):
    reply = post(f"{server[0]}/v1/chat/completions", content=text)
    assert reply.status_code == 400 and "error" in reply.json()


def test_half_a_pair_of_surrogates_is_read_as_a_mark(server):
    body = '{"messages": [{"role": "user", "content": "a\\ud800b"}], "max_tokens": 2}'
    reply = post(f"{server[0]}/v1/chat/completions", content=body)
    assert reply.status_code == 200, reply.text


def test_half_a_pair_of_surrogates_comes_back_as_a_mark(server):
    body = '{"input": "a", "instructions": "b\\ud800", "max_output_tokens": 2}'
    reply = post(f"{server[0]}/v1/responses", content=body)
    assert reply.status_code == 200 and reply.json()["instructions"] == "b?"
    body = '{"messages": [{"role": "user", "content": "a\\ud800"}]}'
    reply = post(f"{server[0]}/apply-template", content=body)
    assert reply.status_code == 200 and "a?" in reply.json()["prompt"]
    body = '{"messages": [{"role": "user", "content": [{"type": "\\ud800"}]}]}'
    assert post(f"{server[0]}/v1/messages", content=body).status_code == 400


def test_an_event_is_one_line():
    line = sse.event({"text": "a\u2028b\x85c\nd\ud800"})
    assert len(line.strip().splitlines()) == 1
    assert json.loads(line.removeprefix("data: "))["text"] == "a\u2028b\x85c\nd?"


def test_a_prompt_longer_than_the_context_is_refused_before_anything_is_read(client):
    long = [{"role": "user", "content": "abc " * 2000}]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(messages=long, stream=stream, **GREEDY)
        assert caught.value.body["type"] == "exceed_context_size_error"
        assert caught.value.body["n_ctx"] == 2048


def test_text_becomes_tokens_and_comes_back(server):
    url = server[0]
    tokens = post(f"{url}/tokenize", json={"content": "the abc"}).json()["tokens"]
    assert post(f"{url}/detokenize", json={"tokens": tokens}).json()["content"].strip() == (
        "the abc"
    )
    pieces = post(f"{url}/tokenize", json={"content": "é", "with_pieces": True}).json()
    assert [0xC3] in [one["piece"] for one in pieces["tokens"]]
    assert post(f"{url}/detokenize", json={"tokens": [10**6]}).status_code == 400
    prompt = post(f"{url}/apply-template", json={"messages": ASK}).json()["prompt"]
    ask = {"messages": ASK, "add_generation_prompt": False}
    bare = post(f"{url}/apply-template", json=ask).json()["prompt"]
    assert prompt.startswith(bare) and "assistant" in prompt.removeprefix(bare)
    assert prompt == "<|user|>abc def<|assistant|>"


def test_embeddings_are_refused(client):
    with pytest.raises(openai.BadRequestError, match="no embeddings"):
        client.embeddings.create(input="abc", model="tiny")


def test_props_slots_and_metrics(server, client):
    url, own = server
    assert get(f"{url}/props").json()["default_generation_settings"]["n_ctx"] == 2048
    before = own.worker.totals.n_written
    client.chat.completions.create(messages=ASK, **GREEDY)
    slots = get(f"{url}/slots").json()
    assert len(slots) == 1 and slots[0]["n_ctx"] == 2048
    assert own.worker.totals.n_written == before + 8
    lines = get(f"{url}/metrics").text.splitlines()
    assert f"llamacpp:tokens_predicted_total {float(before + 8)}" in lines


def test_the_page_uses_nothing_from_elsewhere(server):
    reply = get(server[0], headers=BROWSER)
    assert reply.status_code == 200 and "<title>edgekv" in reply.text
    assert not re.search(r"(src|href)=.?(https?:)?//", reply.text)
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    (script,) = re.findall("<script>(.*?)</script>", reply.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"'sha256-{digest}'" in policy


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "the " * 900}]}),
        ("/v1/completions", {"prompt": "the def " * 450}),
        ("/completion", {"prompt": "the abc " * 450}),
    ],
)
def test_the_progress_of_a_prompt_is_said_once(server, path, prompt):
    body = {**prompt, "stream": True, "max_tokens": 1}
    lines = post(f"{server[0]}{path}", json={**body, "return_progress": True}).text.splitlines()
    comments = [line.removeprefix(": prompt ") for line in lines if line.startswith(": prompt ")]
    steps = [tuple(map(int, comment.split("/"))) for comment in comments]
    assert len(steps) > 2 and len(set(steps)) == len(steps) and steps[-1][0] == steps[-1][1]
    events = [json.loads(line.removeprefix("data: ")) for line in lines if "_progress" in line]
    said = [event["prompt_progress"] for event in events]
    assert [(one["processed"], one["total"]) for one in said] == steps
    quiet = post(f"{server[0]}{path}", json=body).text
    assert ": prompt " in quiet and "prompt_progress" not in quiet


# ---- stopping


LONG = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}


def test_a_stream_that_is_left_stops_and_the_next_is_answered(server, client):
    own = server[1]
    stream = client.chat.completions.create(messages=ASK, stream=True, **LONG)
    for _ in zip(range(3), stream):
        pass
    assert own.worker.active()
    stream.close()
    until(lambda: not own.worker.active())
    assert client.chat.completions.create(messages=ASK, **GREEDY).usage.completion_tokens == 8


def test_an_answer_stops_where_its_client_goes(server, client):
    own = server[1]
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.2).chat.completions.create(messages=ASK, **LONG)
    until(lambda: not own.worker.active())
    assert client.chat.completions.create(messages=ASK, **GREEDY).usage.completion_tokens == 8


@pytest.mark.parametrize(
    "more",
    [
        {"dry_multiplier": 5.0, "dry_allowed_length": 1, "temperature": 0},
        {"xtc_probability": 1.0, "xtc_threshold": 0.0001},
        {"top_n_sigma": 0.01},
        {"dynatemp_range": 0.7, "temperature": 0.8},
        {"mirostat": 2, "mirostat_tau": 0.1},
        {"samplers": ["top_k"], "top_k": 1},
        {"logit_bias": {"the": 100}, "temperature": 0},
        {"logit_bias": [["e", 100.0], ["\x03", False]], "temperature": 0},
    ],
)
def test_what_a_request_says_of_samplers_is_done(server, more):
    body = {"prompt": "the the the the", "seed": 3, "n_predict": 40, "ignore_eos": True}
    usual = {name: value for name, value in more.items() if name == "temperature"}
    plain, other = (
        post(f"{server[0]}/completion", json={**body, **said}).json()["content"]
        for said in (usual, more)
    )
    assert plain != other


def test_a_sampler_that_there_is_not_is_refused(server):
    answer = post(f"{server[0]}/completion", json={"prompt": "a", "samplers": ["best"]})
    assert answer.status_code == 400 and "best" in answer.text
