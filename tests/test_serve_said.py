"""What the server says in llama-server's words: counters, slots, models, what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edgekv.serve.options import ServeOptions
from tests.chats import TEMPLATE, THINKS, TOOLS
from tests.serving import BROWSER, get, post, serving, stream, until

ASK = [{"role": "user", "content": "abc"}]


@pytest.fixture(scope="module")
def url(tiny):
    options = ServeOptions(
        metrics=True, parallel=2, alias="small, quick", tags="chat,code", chat_template=TEMPLATE
    )
    with serving(tiny("llama-gqa"), options, n_ctx=512) as (url, _):
        yield url


def metrics_of(url: str) -> dict[str, tuple[str, float]]:
    """Name -> (kind, value) of the counters without labels."""
    reply = get(f"{url}/metrics")
    assert int(reply.headers["Process-Start-Time-Unix"]) > 0
    kinds: dict[str, str] = {}
    found: dict[str, tuple[str, float]] = {}
    helped = set()
    for line in reply.text.splitlines():
        words = line.split(" ")
        if line.startswith("# HELP "):
            helped.add(words[2])
        elif line.startswith("# TYPE "):
            kinds[words[2]] = words[3]
        else:
            assert words[0] in helped
            found[words[0]] = (kinds[words[0]], float(words[1]))
    return found


def test_metrics_have_llama_servers_names(url):
    post(f"{url}/completion", json={"prompt": "the rain", "n_predict": 3, "ignore_eos": True})
    found = metrics_of(url)
    counters = ("prompt_tokens_total", "prompt_tokens_cached_total", "prompt_seconds_total")
    counters += ("tokens_predicted_total", "tokens_predicted_seconds_total", "n_decode_total")
    counters += ("n_tokens_max", "spec_decode_num_draft_tokens_total")
    counters += ("spec_decode_num_accepted_tokens_total", "spec_decode_num_drafts_total")
    gauges = ("prompt_tokens_seconds", "predicted_tokens_seconds", "requests_processing")
    gauges += ("requests_deferred", "n_busy_slots_per_decode")
    for kind, names in (("counter", counters), ("gauge", gauges)):
        assert {found[f"llamacpp:{name}"][0] for name in names} == {kind}
    before = found["llamacpp:n_decode_total"][1]
    done = post(f"{url}/completion", json={"prompt": "the rain", "n_predict": 4}).json()
    after = metrics_of(url)["llamacpp:n_decode_total"][1]
    assert done["tokens_predicted"] - 1 <= after - before <= done["tokens_predicted"] + 1


def test_a_slot_has_llama_servers_fields(url):
    body = {"prompt": "abc", "ignore_eos": True, "n_predict": 400, "stream": True}
    with stream(f"{url}/completion", json=body) as reply:
        lines = reply.iter_lines()
        until(lambda: '"content"' in next(lines))
        busy, _ = get(f"{url}/slots").json()
    (new,) = busy["next_token"]
    assert new["has_next_token"] and new["n_remain"] + new["n_decoded"] == 400
    assert busy["n_prompt_tokens"] == (
        busy["n_prompt_tokens_processed"] + busy["n_prompt_tokens_cache"]
    )


def test_a_model_may_have_several_names(url):
    said = get(f"{url}/v1/models").json()
    (one,) = said["data"]
    assert one["id"] == said["models"][0]["name"] == "quick"  # the first one by its letters
    assert one["aliases"] == ["quick", "small"] and one["tags"] == ["chat", "code"]
    for name in one["aliases"]:
        assert get(f"{url}/v1/models/{name}").json()["id"] == "quick"
    assert get(f"{url}/v1/models/other").status_code == 404


def test_props_say_what_the_template_can_do(url):
    said = get(f"{url}/props").json()
    assert said["chat_template_caps"]["supports_tools"] and said["is_sleeping"] is False


# ---- begun answers


@pytest.mark.parametrize(
    "messages, more, reason",
    [
        ([*ASK, *[{"role": "assistant", "content": "a"}] * 2], {}, "two"),
        (
            [*ASK, {"role": "assistant", "content": "a"}],
            {"add_generation_prompt": True, "continue_final_message": True},
            "both",
        ),
        (ASK, {"continue_final_message": True}, "last message"),
    ],
)
def test_an_answer_that_cannot_go_on_is_refused(url, messages, more, reason):
    reply = post(f"{url}/v1/chat/completions", json={"messages": messages, **more})
    assert reply.status_code == 400 and reason in reply.json()["error"]["message"]


def test_an_answer_goes_on_whatever_says_so(url):
    body: dict[str, Any] = {"messages": [*ASK, {"role": "assistant", "content": "I know"}]}
    body |= {"max_tokens": 4, "temperature": 0}
    more = {"add_generation_prompt": False, "continue_final_message": True}
    one, other = (
        post(f"{url}/v1/chat/completions", json=body | x).json()["choices"][0]["message"]
        for x in ({}, more)
    )
    assert one["content"] == other["content"]


# ---- progress and errors


@pytest.mark.parametrize("again", [False, True])
def test_the_last_progress_is_the_whole_prompt(url, again):
    body = {"messages": [{"role": "user", "content": f"the rain {again} " * 20}], "max_tokens": 2}
    if again:
        post(f"{url}/v1/chat/completions", json=body)
    body |= {"stream": True, "return_progress": True}
    lines = post(f"{url}/v1/chat/completions", json=body).text.splitlines()
    events = [json.loads(x[6:]) for x in lines if x.startswith("data: {")]
    found = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    assert found[0]["processed"] == found[0]["cache"]
    assert found[-1]["processed"] == found[-1]["total"]
    assert [x["processed"] for x in found] == sorted({x["processed"] for x in found})


def test_a_long_prompt_is_refused_in_llama_servers_words(url):
    reply = post(f"{url}/v1/completions", json={"prompt": "the rain in the air " * 300})
    assert "exceeds the available context size" in reply.json()["error"]["message"]


def test_a_response_says_its_time_and_progress(url):
    body = {"input": "the rain in the air " * 9, "max_output_tokens": 6, "stream": True}
    body |= {"timings_per_token": True, "return_progress": True, "ignore_eos": True}
    lines = post(f"{url}/v1/responses", json=body).text.splitlines()
    events = [json.loads(x[6:]) for x in lines if x.startswith("data: {")]
    progress = [event for event in events if "prompt_progress" in event]
    assert progress and {event["type"] for event in progress} == {"response.in_progress"}
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert deltas and all(event["timings"]["predicted_n"] for event in deltas)
    assert events[-1]["timings"]["predicted_n"] == 6
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


# ---- thoughts and the page


def test_a_server_may_leave_thoughts_out(tiny):
    text = "{{ enable_thinking }}{% for m in messages %}{{ m.content }}{% endfor %}"
    for wish, expected in (("off", "False"), ("on", "True"), ("auto", "True")):
        options = ServeOptions(chat_template=text, reasoning=wish)
        with serving(tiny("llama-gqa"), options) as (url, _):
            body: dict[str, Any] = {"messages": ASK}
            for path in ("apply-template", "v1/chat/completions/input_tokens"):
                assert post(f"{url}/{path}", json=body).status_code == 200
            assert post(f"{url}/apply-template", json=body).json()["prompt"].startswith(expected)
            body["chat_template_kwargs"] = {"enable_thinking": True}
            assert post(f"{url}/apply-template", json=body).json()["prompt"].startswith("True")


@pytest.mark.parametrize("budget", [0, 3])
def test_a_thought_may_have_so_many_tokens(tiny, budget):
    with serving(tiny("llama-gqa"), ServeOptions(chat_template=THINKS)) as (url, _):
        body = {"messages": ASK, "max_tokens": 60, "ignore_eos": True, "temperature": 0}
        body |= {"chat_template_kwargs": {"think": True}, "reasoning_budget_tokens": budget}
        said = post(f"{url}/v1/chat/completions", json=body).json()["choices"][0]["message"]
        assert said["content"]
        assert len(said.get("reasoning_content", "")) <= 8 * budget


def test_a_server_may_have_no_page(tiny):
    with serving(tiny("llama-gqa"), ServeOptions(page=False)) as (url, _):
        assert (
            "<title>" not in get(url, headers=BROWSER).text
            and get(f"{url}/health").status_code == 200
        )
        assert not get(f"{url}/props").json()["webui"]


# ---- Anthropic's cache_control


def usage_of(url: str, **body: Any) -> dict[str, int]:
    usage = post(f"{url}/v1/messages", json={"max_tokens": 2, **body}).json()["usage"]
    return dict(usage)


def test_a_cache_that_a_request_marks_is_written_and_then_read(url):
    mark = {"cache_control": {"type": "ephemeral"}}
    system = [{"type": "text", "text": "the rain in the air " * 12, **mark}]
    body = {"system": system, "messages": ASK}
    first, second = usage_of(url, **body), usage_of(url, **body)
    n_marked = first["cache_creation_input_tokens"]
    assert n_marked > 30 and first["cache_read_input_tokens"] < 3
    assert 0 < first["input_tokens"] < n_marked
    assert second["cache_creation_input_tokens"] == 0
    assert second["cache_read_input_tokens"] >= n_marked
    total = sum(first[x] for x in first if x != "output_tokens")
    assert total == sum(second[x] for x in second if x != "output_tokens")
    text = post(f"{url}/v1/messages", json={"max_tokens": 2, **body, "stream": True}).text
    assert '"cache_creation_input_tokens": 0' in text


@pytest.mark.parametrize("where", ["none", "tool", "message", "request"])
def test_the_last_mark_counts(url, where):
    mark = {"cache_control": {"type": "ephemeral"}}
    text = f"the {where} in the air " * 12
    tool = {"name": f"add_{where}", "input_schema": TOOLS[1]["function"]["parameters"]}
    body: dict[str, Any] = {
        "tools": [tool | mark if where == "tool" else tool],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": text}]},
            {"role": "assistant", "content": "a"},
            {"role": "user", "content": "why"},
        ],
    }
    if where == "message":
        body["messages"][0]["content"][0] |= mark
    if where == "request":
        body |= mark
    usage = usage_of(url, **body)
    written, rest = usage["cache_creation_input_tokens"], usage["input_tokens"]
    assert (written > 0) == (where != "none")
    assert {"none": True, "tool": rest > 60, "message": rest < written, "request": rest == 0}[where]
