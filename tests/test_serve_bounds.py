"""How much a request may hold, and that nobody waits for somebody else's."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import httpx
import pytest

from edgekv.serve.errors import ApiError
from edgekv.serve.options import ServeOptions
from edgekv.serve.preparing import N_THREADS, Preparing
from edgekv.serve.queue import FairQueue
from tests.serving import PATIENCE, post, serving


@pytest.fixture(scope="module")
def url(tiny):
    with serving(tiny("llama-gqa"), ServeOptions(slot_save_path="/tmp"), n_ctx=512) as (url, _):
        yield url


def message(url: str, path: str, body: object) -> str:
    """What a refusal says."""
    reply = post(f"{url}{path}", content=json.dumps(body))
    assert reply.status_code == 400, reply.text[:200]
    return reply.json()["error"]["message"]


SAID = {"role": "user", "content": "abc"}


@pytest.mark.parametrize("path", ["/apply-template", "/v1/chat/completions", "/v1/messages"])
def test_a_request_with_too_many_messages_is_refused(url, path):
    assert "messages may have" in message(url, path, {"messages": [SAID] * 10_001})


def test_a_message_of_too_many_texts_is_refused(url):
    texts = [{"type": "text", "text": "a"}] * 10_001
    body = {"messages": [{"role": "user", "content": texts}]}
    assert "content may have" in message(url, "/v1/chat/completions", body)


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity"])
def test_numbers_that_json_cannot_hold_are_refused(url, number):
    """An answer repeats the tools."""
    tool = {"type": "function", "name": "f", "parameters": {"maximum": 7}}
    body = json.dumps({"input": "abc", "tools": [tool], "max_output_tokens": 2})
    reply = post(f"{url}/v1/responses", content=body.replace("7", number))
    assert reply.status_code == 400 and number in reply.json()["error"]["message"]


@pytest.mark.parametrize("stop", [["a"] * 257, ["a" * 17_000], "a" * 17_000])
def test_too_many_stops_are_refused(url, stop):
    body = {"prompt": "abc", "stop": stop, "max_tokens": 2}
    assert "stop may have" in message(url, "/v1/completions", body)


def test_too_many_values_are_refused_before_they_are_read(url):
    begin = time.monotonic()
    assert "values" in message(url, "/detokenize", {"tokens": [1] * 4_000_000})
    assert "values" in message(url, "/detokenize", {"tokens": [""] * 4_000_000})
    assert time.monotonic() - begin < 20


def test_what_stands_in_a_text_is_no_value(url):
    text = '{"a": [1, 2, "\\\\\\""]}, ' * 40_000
    said = post(f"{url}/tokenize", json={"content": text}).json()["tokens"]
    assert post(f"{url}/detokenize", json={"tokens": said[:20]}).json()["content"] in text


def test_a_text_that_cannot_fit_is_refused_without_being_cut_up(url):
    text = "the rain in the air " * 100_000
    for path, body in (
        ("/v1/completions", {"prompt": text}),
        ("/completion", {"prompt": text}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
    ):
        reply = post(f"{url}{path}", json=body).json()["error"]
        assert reply["type"] == "exceed_context_size_error" and "at least" in reply["message"]
        assert 512 <= reply["n_prompt_tokens"] <= len(text)


def test_a_text_to_cut_into_tokens_is_bounded(url):
    assert "bytes" in message(url, "/tokenize", {"content": "a" * (9 << 20)})


@pytest.mark.parametrize("with_pieces", [False, True])
def test_tokens_of_a_long_text_come_whole(url, with_pieces):
    text = "the rain in the air " * 3000
    body = {"content": text, "with_pieces": with_pieces}
    said = post(f"{url}/tokenize", json=body).json()["tokens"]
    if with_pieces:
        assert "".join(one["piece"] for one in said) == text
    else:
        assert post(f"{url}/detokenize", json={"tokens": said}).json()["content"] == text


def test_health_is_answered_while_long_texts_are_prepared(url):
    """The longest gap between two answers stays below a second."""
    body = json.dumps({"content": "the rain in the air " * 60_000, "with_pieces": True})
    over, gaps = threading.Event(), [0.0]

    def watch() -> None:
        with httpx.Client(timeout=PATIENCE) as client:
            while not over.is_set():
                begin = time.monotonic()
                client.get(f"{url}/health")
                gaps.append(time.monotonic() - begin)

    watcher = threading.Thread(target=watch)
    watcher.start()
    post(f"{url}/tokenize", content=body)
    over.set()
    watcher.join()
    assert max(gaps) < 1, f"{max(gaps):.1f} s"


# ---- shares of clients


def test_who_has_most_gives_way_where_a_queue_is_full():
    queue = FairQueue(4)
    assert [queue.put("a", i) for i in range(4)] == [None] * 4
    with pytest.raises(ApiError, match="are waiting"):
        queue.put("a", 5)
    assert queue.put("b", 6) == 3
    assert queue.put("c", 7) == 2
    with pytest.raises(ApiError, match="are waiting"):
        queue.put("b", 8)
    assert [queue.get() for _ in range(5)] == [0, 6, 7, 1, None]


def test_who_is_busy_is_passed_over():
    queue = FairQueue(4)
    queue.put("a", 1)
    queue.put("b", 2)
    assert queue.get(but=["a"]) == 2 and queue.get(but=["a"]) is None and queue.get() == 1


def prepare(*tasks, n_most: int = 8):
    """What becomes of (client, work) that come at once: results, or errors."""

    async def all_of_them():
        preparing = Preparing(n_most)
        running = [preparing.run(client, work) for client, work in tasks]
        return await asyncio.gather(*running, return_exceptions=True)

    return asyncio.run(all_of_them())


def test_one_client_does_not_take_all_the_threads():
    free, order = threading.Event(), []

    def long() -> None:
        assert free.wait(PATIENCE)
        order.append("long")

    def short() -> None:
        order.append("short")
        free.set()

    done = prepare(*[("a", long)] * N_THREADS, ("b", short), n_most=20)
    assert done == [None] * (N_THREADS + 1) and order[0] == "short"


def test_what_nobody_waits_for_is_not_begun():
    begun = list[int]()

    async def ask() -> None:
        preparing, free = Preparing(8), threading.Event()
        first = asyncio.ensure_future(preparing.run("a", lambda: free.wait(PATIENCE)))
        second = asyncio.ensure_future(preparing.run("a", lambda: begun.append(1)))
        await asyncio.sleep(0.05)
        second.cancel()
        await asyncio.sleep(0)
        free.set()
        await first
        await preparing.run("a", lambda: None)

    asyncio.run(ask())
    assert not begun


def test_preparing_has_a_limit():
    free = threading.Event()
    work = [(i, lambda: free.wait(0.2)) for i in range(N_THREADS + 12)]
    done = prepare(*work, n_most=2)
    errors = [one for one in done if isinstance(one, ApiError)]
    assert errors and {one.status for one in errors} == {503}


def test_an_invented_key_makes_no_new_client(tiny):
    """Without keys to ask for, a client is its address."""
    seen = list[object]()
    with serving(tiny("llama-gqa"), ServeOptions(parallel=1)) as (url, server):
        submit = server.worker.submit

        def watched(job):
            seen.append(job.client)
            submit(job)

        server.worker.submit = watched
        for i in range(3):
            body = {"prompt": "abc", "max_tokens": 1}
            post(f"{url}/v1/completions", json=body, headers={"X-Api-Key": str(i)})
    assert len(seen) == 3 and len(set(seen)) == 1


def test_who_waits_for_a_text_is_told_when_the_server_stops():
    async def ask() -> list[object]:
        preparing, free = Preparing(8), threading.Event()
        works = [preparing.run("a", lambda: free.wait(PATIENCE)) for _ in range(2)]
        running = asyncio.gather(*works, return_exceptions=True)
        await asyncio.sleep(0.05)
        preparing.stop()
        said = await asyncio.wait_for(running, 5)
        assert not preparing.join(0.05)
        free.set()
        assert preparing.join(PATIENCE)
        return said

    assert [error.status for error in asyncio.run(ask())] == [503, 503]
