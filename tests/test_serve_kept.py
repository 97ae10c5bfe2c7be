"""What of a conversation's text the cache keeps, over HTTP."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from edgekv.serve.options import ServeOptions
from tests.serving import get, post, serving

KEY = {"X-Api-Key": "key"}
RAIN = "the rain in the air is an art and the sun is on the ear " * 12
TALE = "a fact in an inn on the island is the end of the tale and there " * 12
CACHE: dict[str, Any] = dict(kv_ratio=0.3, kv_method="snapkv", kv_min_tokens=64)


@pytest.fixture(scope="module")
def url(tiny):
    with serving(tiny("llama-gqa"), ServeOptions(api_keys=("key",)), **CACHE) as (url, _):
        yield url


def ask(url: str, text: str) -> tuple[str, dict[str, Any]]:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0}
    done = post(f"{url}/v1/chat/completions", json=body, headers=KEY).json()
    return done["choices"][0]["message"]["content"], done["kv"]


def kept(url: str, conversation: str, **more: Any) -> Any:
    return get(f"{url}/kept", params={"conversation": conversation, **more}, headers=KEY)


def test_each_token_says_how_many_heads_keep_it(url):
    answer, kv = ask(url, RAIN)
    said = kept(url, kv["conversation"]).json()
    texts = [text for text, *_ in said["tokens"]]
    assert RAIN.strip() in "".join(texts)
    assert said["n_heads"] == 6 and said["layers"] == [0, 1, 2] and said["layer"] is None
    counts = [n for _, n, _ in said["tokens"]]
    assert min(counts) == 0 and max(counts) == 6 and counts[-5] == 6, "the end stays"
    share = sum(counts) / (6 * len(counts))
    assert share == pytest.approx(kv["bytes"] / kv["bytes_full"], abs=0.1)
    assert {level for _, n, level in said["tokens"] if n == 6} == {20}
    alone = [kept(url, kv["conversation"], layer=il).json() for il in said["layers"]]
    assert [one["n_heads"] for one in alone] == [2, 2, 2]
    sums = [sum(one["tokens"][i][1] for one in alone) for i in range(len(counts))]
    assert sums == counts


def test_a_conversation_that_waits_is_looked_at_and_goes_on(url):
    answer, kv = ask(url, TALE)
    before = kept(url, kv["conversation"]).json()
    other = ask(url, "the sun " * 100)[1]
    assert other["conversation"] != kv["conversation"]
    assert kept(url, kv["conversation"]).json() == before
    assert ask(url, TALE)[0] == answer


def test_only_who_has_the_answer_can_look(url):
    _, kv = ask(url, RAIN)
    assert get(f"{url}/kept", params={"conversation": kv["conversation"]}).status_code == 401
    listed = [x["id"] for x in get(f"{url}/conversations", headers=KEY).json()["data"]]
    assert listed
    for handle in (*listed, "", "x", "é", "0" * 5000):
        assert kept(url, handle).status_code == 404


def test_what_cannot_be_looked_at_is_said(url, tiny):
    _, kv = ask(url, RAIN)
    for layer in (-1, 3, 2**70, "x"):
        reply = kept(url, kv["conversation"], layer=layer)
        assert reply.status_code == 400 and "layer" in reply.json()["error"]["message"]
    assert get(f"{url}/kept", headers=KEY).status_code == 400
    with serving(tiny("llama-gqa")) as (url, _):
        body = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 2}
        kv = post(f"{url}/v1/chat/completions", json=body).json()["kv"]
        reply = get(f"{url}/kept", params={"conversation": kv["conversation"]})
        assert kv["method"] == "full"
        assert reply.status_code == 400 and "not compressed" in reply.text


def test_layers_with_a_sliding_window_do_not_choose(tiny):
    with serving(tiny("gemma3"), **CACHE) as (url, _):
        _, kv = ask(url, RAIN)
        said = kept(url, kv["conversation"]).json()
        assert said["n_heads"] == 2 and len(said["layers"]) < 3


def listed(url: str) -> list[Any]:
    found = get(f"{url}/conversations", headers=KEY).json()["data"]
    return [{k: v for k, v in one.items() if k != "last_used"} for one in found]


@pytest.mark.parametrize("cache_ram", [None, 0])
def test_looking_leaves_all_conversations_where_they_are(tiny, tmp_path, cache_ram):
    options = ServeOptions(api_keys=("key",), cache_disk=str(tmp_path), cache_ram=cache_ram)
    with serving(tiny("llama-gqa"), options, **CACHE) as (url, _):
        answer, kv = ask(url, RAIN)
        first = kept(url, kv["conversation"]).json()
        ask(url, TALE)
        before, files = listed(url), sorted(tmp_path.iterdir())
        for _ in range(3):
            assert kept(url, kv["conversation"]).json() == first
        assert listed(url) == before
        assert sorted(tmp_path.iterdir()) == files
        assert ask(url, RAIN)[0] == answer


def test_an_answer_is_the_same_while_others_look_all_the_time(url):
    _, kv = ask(url, RAIN * 3)
    over, n = threading.Event(), list[int]()

    def watch() -> None:
        while not over.is_set():
            n.append(kept(url, kv["conversation"]).status_code)

    body = {"prompt": TALE, "max_tokens": 300, "temperature": 0, "ignore_eos": True}
    alone = post(f"{url}/v1/completions", json=body, headers=KEY).json()
    watchers = [threading.Thread(target=watch) for _ in range(4)]
    for one in watchers:
        one.start()
    together = post(f"{url}/v1/completions", json=body, headers=KEY).json()
    over.set()
    for one in watchers:
        one.join()
    assert n and set(n) == {200}
    assert together["choices"][0]["text"] == alone["choices"][0]["text"]
