"""The server through Ollama's own client, and what that client does not ask."""

from __future__ import annotations

import json

import pytest

from edgekv.serve.keep_alive import seconds
from edgekv.serve.options import ServeOptions
from tests.chats import TEMPLATE, THINKS, TOOLS
from tests.serving import BROWSER, delete, get, post, serving, stream

ollama = pytest.importorskip("ollama")

ASK = [{"role": "user", "content": "abc def"}]
GREEDY = {"model": "tiny", "options": {"temperature": 0, "num_predict": 8}}
SHAPE = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
LONG = {"temperature": 0, "num_predict": 200}
CALL = '<tool_call>\n{"name": "add", "arguments": {"unit": "one", "n": true}}\n</tool_call>'


@pytest.fixture(scope="module")
def url(tiny):
    with serving(tiny("llama-gqa"), ServeOptions(alias="tiny", chat_template=TEMPLATE)) as (url, _):
        yield url


@pytest.fixture(scope="module")
def client(url):
    with ollama.Client(url) as client:
        yield client


@pytest.fixture(scope="module")
def thinker(tiny):
    template = THINKS.replace("if think ", "if enable_thinking ")
    with serving(tiny("llama-gqa"), ServeOptions(alias="tiny", chat_template=template)) as (url, _):
        yield url


# ---- answers


def test_a_chat_is_answered(client):
    done = client.chat(messages=ASK, **GREEDY)
    assert done.model == "tiny" and done.message.role == "assistant" and done.message.content
    assert done.done and done.done_reason == "length"
    assert done.eval_count == 8 and done.prompt_eval_count > 0
    assert 0 < done.eval_duration < done.total_duration and done.load_duration == 0
    again = client.chat(messages=ASK, **GREEDY)
    assert again.prompt_eval_count == done.prompt_eval_count


def test_a_stream_says_the_same(client):
    whole = client.chat(messages=ASK, **GREEDY)
    *parts, last = client.chat(messages=ASK, stream=True, **GREEDY)
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert not any(part.done for part in parts) and last.done and last.eval_count == 8


def test_a_stream_is_lines_of_json_unless_something_else_is_said(url):
    with stream(f"{url}/api/chat", json={"messages": ASK, **GREEDY}) as reply:
        assert reply.headers["content-type"] == "application/x-ndjson"
        lines = [json.loads(line) for line in reply.iter_lines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]


def test_an_answer_has_the_form_that_is_asked_for(client):
    said = client.chat(model="tiny", messages=ASK, format=SHAPE, options=LONG).message.content
    assert isinstance(json.loads(said)["ok"], bool)
    said = client.generate(model="tiny", prompt="abc", format=SHAPE, options=LONG).response
    assert isinstance(json.loads(said)["ok"], bool)
    said = client.chat(model="tiny", messages=ASK, format="json", options=LONG)
    assert said.message.content.lstrip()[:1] in ("", "{")


def test_an_answer_ends_at_a_stop(client):
    whole = client.chat(messages=ASK, **GREEDY).message.content
    options = {**GREEDY["options"], "stop": [whole[2:4]]}
    done = client.chat(model="tiny", messages=ASK, options=options)
    assert done.message.content == whole[: whole.index(whole[2:4])] and done.done_reason == "stop"


def test_probabilities_are_named(client):
    done = client.chat(messages=ASK, logprobs=True, top_logprobs=2, **GREEDY)
    assert len(done.logprobs) == 8 and len(done.logprobs[0].top_logprobs) == 2
    parts = client.chat(messages=ASK, logprobs=True, stream=True, **GREEDY)
    assert sum(len(part.logprobs or ()) for part in parts) == 8


def test_a_tool_is_called(url):
    begun = [*ASK, {"role": "assistant", "content": CALL[:-30]}]
    body = {"messages": begun, "tools": TOOLS, "options": LONG}
    done = post(f"{url}/api/chat", json={**body, "stream": False}).json()
    (call,) = done["message"]["tool_calls"]
    assert call["function"]["name"] == "add" and call["function"]["index"] == 0
    assert isinstance(call["function"]["arguments"], dict)
    with stream(f"{url}/api/chat", json=body) as reply:
        lines = [json.loads(line) for line in reply.iter_lines()]
    calls = [x for line in lines for x in line["message"].get("tool_calls", ())]
    assert [x["function"] for x in calls] == [call["function"]]


def test_calls_and_their_results_go_into_the_prompt(client, url):
    call = {"function": {"name": "add", "arguments": {"unit": "one", "n": True}}}
    messages = [
        *ASK,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_name": "add"},
    ]
    done = client.chat(messages=messages, **GREEDY)
    prompt = f"<|user|>abc def<|end|><|assistant|>{CALL}<|end|><|tool|>4<|end|><|assistant|>"
    body = {"content": prompt, "add_special": True}
    assert done.prompt_eval_count == len(post(f"{url}/tokenize", json=body).json()["tokens"])


def test_a_thought_stands_apart(thinker):
    options = {**GREEDY["options"], "ignore_eos": True}
    with ollama.Client(thinker) as client:
        whole = client.chat("tiny", ASK, think=True, options=options).message
        parts = client.chat("tiny", ASK, think=True, options=options, stream=True)
        assert "".join(part.message.thinking or "" for part in parts) == whole.thinking != ""
        assert not whole.content
        done = client.generate("tiny", "abc def", think=True, options=options)
        assert done.thinking == whole.thinking and not done.response


def test_thoughts_are_wanted_of_models_that_have_them(client, thinker):
    with pytest.raises(ollama.ResponseError, match="does not support thinking"):
        client.chat(messages=ASK, think=True, **GREEDY)
    assert client.chat(messages=ASK, think=False, **GREEDY).done
    with ollama.Client(thinker) as other:
        assert other.chat(messages=ASK, think="low", **GREEDY).done
    body = {"messages": ASK, "think": "much"}
    assert post(f"{thinker}/api/chat", json=body).status_code == 400


# ---- texts


def test_a_question_is_answered_as_in_a_chat(client):
    done = client.generate(prompt="abc def", system="the", **GREEDY)
    messages = [{"role": "system", "content": "the"}, *ASK]
    assert done.response == client.chat(messages=messages, **GREEDY).message.content
    assert (
        "".join(
            part.response
            for part in client.generate(prompt="abc def", system="the", stream=True, **GREEDY)
        )
        == done.response
    )


def test_a_question_goes_on_from_a_context(client):
    first = client.generate(prompt="abc def", **GREEDY)
    assert len(first.context) >= first.prompt_eval_count + first.eval_count
    second = client.generate(prompt="the", context=first.context, **GREEDY)
    assert second.prompt_eval_count > len(first.context)
    assert list(second.context)[: len(first.context)] == list(first.context)
    with pytest.raises(ollama.ResponseError, match="token"):
        client.generate(prompt="the", context=[10**6], **GREEDY)


def test_a_raw_text_has_no_template(client, url):
    done = client.generate(prompt="abc def", raw=True, **GREEDY)
    n = len(
        post(f"{url}/tokenize", json={"content": "abc def", "add_special": True}).json()["tokens"]
    )
    assert done.prompt_eval_count == n and done.context is None


# ---- what is refused


@pytest.mark.parametrize(
    ("path", "more", "says"),
    [
        ("chat", {"options": {"num_ctx": 10**6}}, "-c 1000000"),
        ("chat", {"options": {"nonsense": 1}}, "options.nonsense"),
        ("chat", {"options": {"tfs_z": 0.5}}, "tfs_z"),
        ("chat", {"format": "xml"}, "JSON schema"),
        ("chat", {"keep_alive": "soon"}, "duration"),
        ("chat", {"top_logprobs": 2}, "logprobs"),
        ("chat", {"messages": [{"role": "user", "content": "a", "images": ["aa"]}]}, "images"),
        ("chat", {"messages": [], "keep_alive": 0}, "one model"),
        ("generate", {"images": ["aa"]}, "images"),
        ("generate", {"suffix": "b"}, "suffix"),
        ("generate", {"template": "b"}, "template"),
        ("generate", {"raw": True, "system": "b"}, "system"),
        ("generate", {"prompt": "abc " * 3000}, "tokens"),
        ("chat", {"options": {"stop": ["a"] * 300}}, "stop"),
        ("chat", {"messages": 7}, "messages"),
    ],
)
def test_a_mistake_is_one_line(url, path, more, says):
    body = {"chat": {"messages": ASK}, "generate": {"prompt": "abc"}}[path]
    reply = post(f"{url}/api/{path}", json={**body, **more})
    assert reply.status_code == 400
    (error,) = reply.json().values()
    assert says in error and "\n" not in error


@pytest.mark.parametrize("path", ["copy", "create", "push", "blobs/sha256:0", "delete"])
def test_what_changes_models_says_what_there_is(url, path):
    reply = delete(f"{url}/api/delete") if path == "delete" else post(f"{url}/api/{path}", json={})
    assert reply.status_code == 501 and " here: " in reply.json()["error"]


def test_options_about_loading_change_nothing(client):
    options = {**GREEDY["options"], "num_ctx": 512, "num_gpu": 0, "num_thread": 2, "num_keep": 4}
    done = client.chat(model="tiny", messages=ASK, options=options, keep_alive="5m")
    assert done.message.content == client.chat(messages=ASK, **GREEDY).message.content


# ---- models


def test_models_are_listed_and_shown(client, url):
    (one,) = client.list().models
    assert one.model == "tiny" and one.details.family == "llama" and one.size > 1000
    assert len(one.digest) == 64 and one.modified_at
    shown = client.show("tiny")
    assert shown.template == TEMPLATE and "completion" in shown.capabilities
    assert shown.modelinfo["general.architecture"] == "llama"
    assert shown.modelinfo["general.parameter_count"] > 1000
    with pytest.raises(ollama.ResponseError, match="not found") as caught:
        client.show("other")
    assert caught.value.status_code == 404
    (running,) = client.ps().models
    assert running.context_length == 2048 and running.size > 2**20
    assert client.pull("tiny").status == "success"
    with pytest.raises(ollama.ResponseError, match="edgekv pull"):
        client.pull("other")


def test_a_model_is_loaded_by_a_question_without_words(client):
    assert client.chat("tiny", []).done_reason == "load"
    assert client.generate("tiny").done_reason == "load"


def test_programs_see_that_ollama_is_spoken_and_browsers_a_page(url, tiny):
    assert get(url).text == "Ollama is running"
    assert "<title>edgekv" in get(url, headers=BROWSER).text
    assert {"version", "edgekv"} <= get(f"{url}/api/version").json().keys()
    with serving(tiny("llama-gqa"), ServeOptions(page=False)) as (url, _):
        assert get(url, headers=BROWSER).text == "Ollama is running"


@pytest.mark.parametrize(
    ("said", "means"),
    [(0, 0), ("0", 0), (30, 30), ("1h30m", 5400), ("1.5s", 1.5), ("250ms", 0.25)],
)
def test_durations_are_go_s(said, means):
    assert seconds(said) == means
    assert seconds(-1) == seconds("-1m") == float("inf")
