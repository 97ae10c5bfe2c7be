"""What the server says of itself, in llama-server's words; and what a request says of memory."""

from __future__ import annotations

from typing import Any

import pytest

from edgekv.serve.options import ServeOptions
from tests.serving import get, post, serving, stream, until

CACHE: dict[str, Any] = dict(kv_ratio=0.5, kv_method="snapkv")


@pytest.fixture(scope="module")
def url(tiny):
    options = ServeOptions(metrics=True, parallel=2, alias="small")
    with serving(tiny("llama-gqa"), options, **CACHE) as (url, _):
        yield url


def test_models_are_listed_in_both_forms(url):
    said = get(f"{url}/v1/models").json()
    (one,), (other,) = said["data"], said["models"]
    assert one["id"] == other["name"] == other["model"] == "small"
    assert one["aliases"] == ["small"] and other["details"]["format"] == "gguf"


def test_props_say_how_answers_are_written(url):
    said = get(f"{url}/props").json()
    assert said["endpoint_metrics"] and said["endpoint_slots"] and said["total_slots"] == 2
    usual = said["default_generation_settings"]
    assert usual["params"]["temperature"] == 0.8 and usual["params"]["seed"] == 2**32 - 1
    assert usual["params"]["n_predict"] == -1 and usual["params"]["logit_bias"] == []


def test_slots_say_what_is_written(url):
    body = {"prompt": "abc", "ignore_eos": True, "n_predict": 900, "stream": True, "stop": ["@@"]}
    body |= {"top_k": 7, "temperature": 0}
    assert [one["is_processing"] for one in get(f"{url}/slots").json()] == [False, False]
    with stream(f"{url}/completion", json=body) as reply:
        lines = reply.iter_lines()
        until(lambda: '"content"' in next(lines))
        busy, free = get(f"{url}/slots").json()
        assert busy["is_processing"] and busy["id_task"] >= 0 and not busy["speculative"]
        assert busy["params"]["top_k"] == 7 and busy["params"]["stop"] == ["@@"]
        assert {one["bias"] for one in busy["params"]["logit_bias"]} == {None}
        (new,) = busy["next_token"]
        assert new["has_next_token"] and new["n_remain"] + new["n_decoded"] == 900
        assert free["id_task"] == -1 and "params" not in free
        assert len(get(f"{url}/slots?fail_on_no_slot=1").json()) == 2
        with stream(f"{url}/completion", json=body) as second:
            assert second.status_code == 200
            reply = get(f"{url}/slots?fail_on_no_slot=1")
            assert reply.status_code == 503 and "no slot" in reply.json()["error"]["message"]


def test_metrics_have_the_longest_conversation(url):
    post(f"{url}/completion", json={"prompt": "the " * 200, "n_predict": 1})
    lines = get(f"{url}/metrics").text.splitlines()
    found = next(line for line in lines if line.startswith("llamacpp:n_tokens_max "))
    assert float(found.split()[1]) >= 200


# ---- memory


@pytest.mark.parametrize("path", ["/completion", "/v1/completions"])
def test_a_prompt_is_read_anew_where_the_request_says_so(url, path):
    body = {"prompt": "the rain in the air " * 40 + path, "n_predict": 2, "temperature": 0}
    post(f"{url}{path}", json=body)
    n_read = []
    for more in ({}, {"cache_prompt": False}, {"cache_prompt": True}, {}):
        said = post(f"{url}/completion", json=body | more).json()
        n_read.append(said["tokens_cached"] < said["tokens_evaluated"] - 1)
    assert n_read == [False, True, False, False]


def test_a_chat_is_read_anew_where_the_request_says_so(url):
    body = {"messages": [{"role": "user", "content": "the air " * 80}], "max_tokens": 2}
    post(f"{url}/v1/chat/completions", json=body)
    said = post(f"{url}/v1/chat/completions", json=body | {"cache_prompt": False}).json()
    assert said["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize("slot, status", [(-1, 200), (0, 200), (1, 200), (2, 400), (-2, 400)])
def test_a_slot_that_there_is_not_is_refused(url, slot, status):
    body = {"prompt": "abc", "n_predict": 1, "id_slot": slot}
    reply = post(f"{url}/completion", json=body)
    assert reply.status_code == status
    assert status == 200 or "--parallel" in reply.json()["error"]["message"]
