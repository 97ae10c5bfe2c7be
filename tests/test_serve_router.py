"""A server of many models: who is loaded, who leaves, and what is handed on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import pytest

from edgekv.models.found.found import Found
from edgekv.serve.errors import ApiError
from edgekv.serve.router.child import HOST
from edgekv.serve.router.forward import Forwarded
from edgekv.serve.router.loaded import LOOK_S, Models
from edgekv.serve.router.options import RouterOptions
from tests.lib import ROOT
from tests.serving import BROWSER, PATIENCE, get, post, stream, until

SIZE = 1000
ASK = [{"role": "user", "content": "abc def"}]
GREEDY = {"messages": ASK, "max_tokens": 4, "temperature": 0}


# ---- who is loaded, with processes that are none


class Fake:
    """A child that is ready at once, or whose test says when."""

    def __init__(self, path: str) -> None:
        self.path, self.exit_code, self.n_bytes = path, None, 0
        self.ready: Future[int] = Future()
        self.ready.set_result(1)

    def end(self) -> None:
        self.exit_code = 0


class House:
    """Models of SIZE bytes each, and what became of them."""

    def __init__(self, folder, **options) -> None:
        self.children: list[Fake] = []
        self.folder, self.options = folder, RouterOptions(**options)

    def model(self, name: str) -> Found:
        path = self.folder / f"{name}.gguf"
        path.write_bytes(bytes(SIZE))
        return Found(name, str(path))

    def start(self, model: Found) -> Fake:
        self.children.append(Fake(model.path))
        return self.children[-1]

    def run(self, test):
        async def all_of_it():
            models = Models(self.options, self.start, 0)
            tending = asyncio.ensure_future(models.tend())
            try:
                return await test(models)
            finally:
                tending.cancel()
                with suppress(asyncio.CancelledError):
                    await tending

        return asyncio.run(all_of_it())


async def use(models, model, keep_s=None):
    async with models.using(model, keep_s) as one:
        return one


def names(models):
    return [one.model.name for one in models.all() if not one.is_over]


@pytest.mark.parametrize("limit", [{"models_max": 2}, {"models_memory": 2 * SIZE + SIZE // 2}])
def test_the_model_used_longest_ago_leaves(tmp_path, limit):
    house = House(tmp_path, **limit)

    async def test(models):
        a, b, c = map(house.model, "abc")
        for model in (a, b, a, c):
            await use(models, model)
        assert names(models) == ["c", "a"]
        await use(models, a)
        await use(models, b)
        assert names(models) == ["b", "a"]

    house.run(test)
    assert len(house.children) == 4


def test_a_model_that_answers_stays_and_who_asks_for_others_waits_in_order(tmp_path):
    house = House(tmp_path, models_max=1)

    async def test(models):
        a, b = map(house.model, "ab")
        async with models.using(a):
            waiting = [asyncio.ensure_future(use(models, model)) for model in (b, a)]
            await asyncio.sleep(0.05)
            assert names(models) == ["a"] and not any(one.done() for one in waiting)
        await asyncio.gather(*waiting)
        assert names(models) == ["a"]

    house.run(test)
    assert [child.path[-6] for child in house.children] == ["a", "b", "a"]


def test_a_loaded_model_answers_several_at_once(tmp_path):
    house = House(tmp_path, models_max=1)

    async def test(models):
        async with models.using(house.model("a")) as one, models.using(house.model("a")) as other:
            assert one is other and one.n_active == 2

    house.run(test)


def test_a_model_that_nobody_uses_leaves(tmp_path):
    house = House(tmp_path, keep_alive=0.0)

    async def test(models):
        await use(models, house.model("a"))
        await use(models, house.model("b"), float("inf"))
        end = time.monotonic() + PATIENCE
        while names(models) != ["b"]:
            assert time.monotonic() < end
            await asyncio.sleep(LOOK_S / 5)
        await asyncio.sleep(2 * LOOK_S)
        assert names(models) == ["b"]

    house.run(test)


def test_a_model_that_has_grown_makes_others_leave(tmp_path):
    house = House(tmp_path, models_memory=3 * SIZE)

    async def test(models):
        await use(models, house.model("a"))
        async with models.using(house.model("b")):
            house.children[1].n_bytes = 4 * SIZE
        end = time.monotonic() + PATIENCE
        while names(models) != ["b"]:
            assert time.monotonic() < end
            await asyncio.sleep(LOOK_S / 5)

    house.run(test)


def test_room_is_made_for_what_a_model_took_the_last_time(tmp_path):
    house = House(tmp_path, models_memory=3 * SIZE)

    async def test(models):
        a, b = map(house.model, "ab")
        async with models.using(a):
            house.children[0].n_bytes = 2 * SIZE + SIZE // 2
        await use(models, b)
        await use(models, a)
        assert names(models) == ["a"]

    house.run(test)


def test_a_model_that_has_crashed_is_loaded_again_and_others_stay(tmp_path):
    house = House(tmp_path)

    async def test(models):
        a, b = map(house.model, "ab")
        await use(models, a)
        other = await use(models, b)
        house.children[0].exit_code = -11
        await use(models, a)
        assert models.get(b) is other

    house.run(test)
    assert [child.path[-6] for child in house.children] == ["a", "b", "a"]


def test_what_cannot_be_loaded_says_why(tmp_path):
    def broken(model):
        child = Fake(model.path)
        child.ready = Future()
        child.ready.set_exception(RuntimeError("it is damaged"))
        return child

    async def test(models):
        with pytest.raises(ApiError, match="it is damaged"):
            await use(models, house.model("a"))
        assert not any(one.n_active for one in models.all())

    house = House(tmp_path)
    house.start = broken
    house.run(test)
    house = House(tmp_path, models_memory=SIZE // 2)

    async def too_large(models):
        with pytest.raises(ApiError, match="--models-memory"):
            await use(models, house.model("a"))

    house.run(too_large)
    house = House(tmp_path, models_autoload=False)

    async def by_hand(models):
        with pytest.raises(ApiError, match="/models/load"):
            await use(models, house.model("a"))
        await models.load(house.model("a"))
        await use(models, house.model("a"))

    house.run(by_hand)


def test_a_model_is_told_whose_request_it_is():
    """Its server shares places between clients, and sees the router's address alone."""
    told = []

    async def answer(reader, writer):
        told.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    async def ask():
        async with await asyncio.start_server(answer, HOST, 0) as child:
            asked = Forwarded(child.sockets[0].getsockname()[1], "key")
            invented = [(b"X-Forwarded-For", b"10.0.0.9")]
            await asked.send("GET", b"/slots", invented, b"", "192.0.2.1")
            asked.close()

    asyncio.run(ask())
    assert b"x-forwarded-for: 192.0.2.1\r\n" in told[0].lower() and b"10.0.0.9" not in told[0]


# ---- with processes


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("folder")
    for name in ("one", "two"):
        os.link(tiny("llama-gqa"), folder / f"{name}.gguf")
    (folder / "broken.gguf").write_bytes(b"GGUF nothing")
    return folder


@pytest.fixture(scope="module")
def router(folder, tmp_path_factory):
    """(address, process) of a router that loads one model at a time."""
    home = tmp_path_factory.mktemp("home")
    words = ["--models-dir", str(folder), "--models-max", "1", "--cache-disk", str(home / "disk")]
    words += ["--port", "0", "-c", "512", "-t", "1", "--api-key", "key"]
    places = {name: str(home) for name in ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME")}
    child = subprocess.Popen(
        [sys.executable, "-m", "edgekv", "serve", *words],
        cwd=ROOT,
        env={**os.environ, **places, "LLAMA_CACHE": str(home), "OLLAMA_MODELS": str(home)},
        stderr=subprocess.PIPE,
        text=True,
    )
    line = child.stderr.readline()
    assert "all models at http" in line, line
    yield line.split(" at ")[1].strip(), child
    child.send_signal(signal.SIGTERM)
    with child:
        log = child.stderr.read()
        assert child.wait(PATIENCE) == 128 + signal.SIGTERM, log
    assert "Traceback" not in log, log


KEY = {"headers": {"Authorization": "Bearer key"}}


def chat(url, model, **more):
    return post(f"{url}/v1/chat/completions", json={**GREEDY, "model": model, **more}, **KEY)


def status_of(url):
    data = get(f"{url}/v1/models").json()["data"]
    return {one["id"]: one["status"]["value"] for one in data if "/" not in one["id"]}


def test_models_are_named_and_come_and_go(router):
    url, _ = router
    document = [{"role": "user", "content": "the rain in the air " * 30}]
    there = status_of(url)
    assert {"one", "two"} <= there.keys() and set(there.values()) == {"unloaded"}
    done = chat(url, "one", messages=document).json()
    assert done["model"] == "one"
    assert status_of(url)["one"] == "loaded"
    said = chat(url, "two:latest", stream=True).text
    assert said.startswith("data: ") and said.rstrip().endswith("[DONE]")
    assert {k for k, v in status_of(url).items() if v == "loaded"} == {"two"}
    answer = done["choices"][0]["message"]
    usage = chat(url, "one", messages=[*document, answer, *ASK]).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 100, "its conversation was on disk"
    props = get(f"{url}/props", params={"model": "one"}, **KEY).json()
    assert props["model_alias"] == "one" and get(f"{url}/props", **KEY).json()["role"] == "router"


def test_ollamas_protocol_names_models_too(router):
    url, _ = router
    with stream(f"{url}/api/chat", json={"model": "one", "messages": ASK}, **KEY) as reply:
        lines = [json.loads(line) for line in reply.iter_lines()]
    assert lines[-1]["done"] and lines[-1]["model"] == "one"
    assert [one["name"] for one in get(f"{url}/api/ps", **KEY).json()["models"]] == ["one"]
    assert {"one", "two"} <= {x["name"] for x in get(f"{url}/api/tags", **KEY).json()["models"]}
    shown = post(f"{url}/api/show", json={"model": "two"}, **KEY).json()
    assert shown["model_info"]["general.architecture"] == "llama"
    assert post(f"{url}/api/pull", json={"model": "two"}, **KEY).json() == {"status": "success"}
    reply = post(f"{url}/api/pull", json={"model": "user/other"}, **KEY)
    assert reply.status_code == 403 and "--allow-pull" in reply.json()["error"]
    body = {"model": "one", "keep_alive": 0}
    assert post(f"{url}/api/generate", json=body, **KEY).json()["done_reason"] == "unload"
    until(lambda: not get(f"{url}/api/ps", **KEY).json()["models"])


def test_what_is_wrong_is_one_line(router):
    url, _ = router
    for model, status, says in [
        ("on", 404, "did you mean"),
        ("zzz", 404, "/v1/models"),
        ("", 400, "/v1/models"),
        ("broken", 500, "broken cannot be loaded: "),
    ]:
        reply = chat(url, model)
        assert reply.status_code == status and says in reply.json()["error"]["message"]
    reply = post(f"{url}/api/chat", json={"model": "nonsense", "messages": ASK}, **KEY)
    assert reply.status_code == 404 and reply.json() == {"error": "model 'nonsense' not found"}
    assert post(f"{url}/api/chat", json={"model": "one"}).status_code == 401
    assert post(f"{url}/models/unload", json={"model": "two"}, **KEY).status_code == 400
    assert get(f"{url}/nonsense", params={"model": "one"}, **KEY).status_code == 404
    assert get(f"{url}/non%20sense%ff", params={"model": "one"}, **KEY).status_code == 404
    assert get(url).text == "Ollama is running" and "<title>" in get(url, headers=BROWSER).text


def test_a_model_that_crashes_is_loaded_again(router):
    psutil = pytest.importorskip("psutil")
    url, process = router
    assert post(f"{url}/models/load", json={"model": "two"}, **KEY).json() == {"success": True}
    until(lambda: status_of(url)["two"] == "loaded")
    (child,) = psutil.Process(process.pid).children()
    body = {**GREEDY, "model": "two", "stream": True, "max_tokens": 400, "ignore_eos": True}
    with stream(f"{url}/v1/chat/completions", json=body, **KEY) as reply:
        lines = reply.iter_lines()
        next(lines)
        child.kill()
        assert "has ended meanwhile" in [line for line in lines if line][-1]
    assert chat(url, "two").status_code == 200
    (child,) = psutil.Process(process.pid).children()
    child.suspend()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(chat, url, "two")
        time.sleep(0.5)  # the request has reached the process
        child.kill()
        assert waiting.result().status_code == 200, "it is asked once more"
    assert post(f"{url}/models/unload", json={"model": "two"}, **KEY).json() == {"success": True}
    assert status_of(url)["two"] == "unloaded"
    assert not psutil.Process(process.pid).children()
