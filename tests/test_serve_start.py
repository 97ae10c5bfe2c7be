"""The server listens at once: before its model is loaded, and while the model is prepared."""

from __future__ import annotations

import shutil
import signal
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import httpx
import numpy as np
import pytest

from edgekv import profiles
from edgekv.commands.later import Later
from edgekv.commands.serve import _beside
from edgekv.errors import BadInput
from edgekv.llama import instead
from edgekv.methods.kvzap import Surrogate, n_features
from edgekv.profiles import places
from edgekv.profiles.winners import PLAIN, Distance, Winner, Winners
from edgekv.serve import status
from edgekv.serve.listening import listen
from edgekv.serve.options import ServeOptions
from edgekv.serve.run import Server
from tests.engine import load
from tests.serving import PATIENCE, get, post, serving, started, stream, until


@pytest.fixture
def early():
    """(address, server) of a server that has no model yet."""
    server = Server(None, ServeOptions(api_keys=("key",)))
    listening = listen("127.0.0.1", 0)
    address = f"http://127.0.0.1:{listening.getsockname()[1]}"
    with server.running([listening]):
        until(lambda: server.started)
        yield address, server


def test_a_server_without_its_model_says_that_it_loads(early):
    url, _ = early
    reply = get(f"{url}/health")
    assert reply.status_code == 503 and reply.headers["retry-after"]
    assert reply.json()["status"] == "loading model"
    assert reply.json()["error"]["type"] == "unavailable_error"
    key = {"X-Api-Key": "key"}
    reply = post(f"{url}/v1/messages", json={}, headers=key)
    assert reply.status_code == 503 and reply.json()["error"]["type"] == "overloaded_error"
    assert post(f"{url}/v1/messages", json={}).status_code == 401
    assert get(f"{url}/health", headers={"Host": "evil.example"}).status_code == 403


def test_it_answers_once_the_model_is_there(early, tiny):
    url, server = early
    llm = load(tiny("llama-gqa"))
    asked: list[httpx.Response] = []

    def ask() -> None:
        body, key = {"prompt": "abc", "max_tokens": 2}, {"X-Api-Key": "key"}
        asked.append(post(f"{url}/v1/completions", json=body, headers=key))
        raise KeyboardInterrupt

    options = ServeOptions(alias="later")
    with pytest.raises(KeyboardInterrupt):
        server.answer_with(llm, options, ask, lambda: None)
    llm.close()
    assert asked[0].status_code == 200 and asked[0].json()["model"] == "later"
    with pytest.raises(httpx.TransportError):
        get(f"{url}/health")


def test_a_model_that_cannot_be_loaded_ends_the_server():
    server, listening = Server(None, ServeOptions()), listen("127.0.0.1", 0)
    with pytest.raises(ValueError, match="no model"), server.running([listening]):
        raise ValueError("no model")
    assert not [x for x in threading.enumerate() if x.name == "edgekv-server"]


def test_a_first_start_does_not_wait_for_the_preparation(tiny, tmp_path):
    with started(tiny, tmp_path, "--kv-ratio", "0.2") as child:
        assert "goes on beside the server" in child.said
        assert get(f"{child.url}/health").json() == {"status": "ok"}
        body = {"prompt": "abc", "max_tokens": 2}
        assert post(f"{child.url}/v1/completions", json=body).status_code == 200
        child.send_signal(signal.SIGTERM)
        assert child.wait(PATIENCE) == 143


@pytest.fixture
def learning(tiny, tmp_path, monkeypatch):
    """(path of a model that nothing is known of, learn()): what its preparation would leave."""
    monkeypatch.setattr(places, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(places, "user_cache", lambda: tmp_path)
    model = shutil.copy(tiny("llama-gqa"), tmp_path / "m.gguf")
    one = profiles.identify(str(model))
    shape = 1, one.n_layer, max(one.n_head_kv)
    maps = np.zeros((*shape[1:], n_features(one.d_head_k, one.d_head_v) + 1), np.float32)
    near = Distance(0.01, 0.1)
    won = Winners((Winner(0.2, PLAIN, "q8_0", "q4_0", near, near),), None, 1280, 190)
    made = profiles.Profile(
        one,
        "probe",
        (0.2,),
        np.full(shape, 0.2, np.float32),
        "keydiff",
        surrogate=Surrogate(maps, "halves"),
        contest=won,
    )
    return model, lambda: profiles.write(made, tmp_path / "kvbudget-m.gguf")


WORDS = "the rain on the island "


def say(url: str, more: str) -> tuple[str, int, str]:
    """(the answer to a text, tokens of it that were there, the method)."""
    body = {"prompt": WORDS * 60 + more, "n_predict": 4, "temperature": 0, "ignore_eos": True}
    said = post(f"{url}/completion", json=body).json()
    return said["content"], said["timings"]["cache_n"], said["kv"]["method"]


@pytest.mark.parametrize("disk", [False, True])
def test_a_server_goes_by_the_preparation_when_it_is_done(learning, tmp_path, disk, caplog):
    model, learn = learning
    options = ServeOptions(metrics=True, cache_disk=str(tmp_path / "talks") if disk else None)
    caplog.set_level("INFO", "edgekv")
    with serving(model, options, kv_ratio=0.2) as (url, server):
        method = say(url, "")[2]
        assert say(url, "and")[1] > 0
        learn()
        server.renew().result(PATIENCE)
        assert len(get(f"{url}/conversations").json()["data"]) == 0
        found, cached, new_method = say(url, "")
        assert cached == 0 and new_method != method
        assert say(url, "and")[1] > 0
        n = len([x for x in caplog.records if "preparation is done" in x.getMessage()])
        counted = f"edgekv:conversations_read_again_total {float(n)}"
        assert n > 0 and counted in get(f"{url}/metrics").text
    with serving(model, kv_ratio=0.2) as (url, _):
        assert say(url, "")[::2] == (found, new_method), "as a start would"


def test_it_waits_until_no_answer_is_written(learning):
    model, learn = learning
    with serving(model, kv_ratio=0.2) as (url, server):
        body = {"prompt": "abc", "n_predict": 500, "ignore_eos": True, "stream": True}
        with stream(f"{url}/completion", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            learn()
            renewing = server.renew()
            assert server.worker.call(lambda: renewing.done()).result(PATIENCE) is False
            assert '"tokens_predicted":500' in "".join(lines).replace(" ", "")
        renewing.result(PATIENCE)


def test_what_cannot_be_taken_over_changes_nothing(learning, monkeypatch):
    model, learn = learning
    with serving(model, kv_ratio=0.2) as (url, server):
        before = say(url, "")
        learn()
        monkeypatch.setattr(instead, "can_have", lambda *given: False)
        with pytest.raises(BadInput, match="cannot have"):
            server.renew().result(PATIENCE)
        again = say(url, "")
        assert again[::2] == before[::2] and again[1] > 0


@pytest.mark.parametrize(
    ("code", "error", "says"),
    [(0, None, "goes by it now"), (0, BadInput("no room"), "next start"), (1, None, "has failed")],
)
def test_the_end_of_the_preparation_is_said_once(code, error, says, capsys):
    renewing: Future[None] = Future()
    server = SimpleNamespace(renew=lambda: renewing, worker=SimpleNamespace(is_idle=False))
    later = Later()
    later._process = SimpleNamespace(poll=lambda: code, suspend=lambda: None)
    tick = _beside(server, later)
    tick()
    said = capsys.readouterr().err
    assert code or not said
    if error:
        renewing.set_exception(error)
    else:
        renewing.set_result(None)
    for _ in range(2):
        tick()
    said += capsys.readouterr().err
    assert said.count(says) == 1


def test_health_tells_a_model_that_does_not_answer(tiny, monkeypatch):
    monkeypatch.setattr(status, "SILENT_S", 1.5)
    go_on = threading.Event()
    with serving(tiny("llama-gqa")) as (url, server):
        assert get(f"{url}/health").status_code == 200
        waiting = server.worker.call(lambda: go_on.wait(PATIENCE))
        until(lambda: get(f"{url}/health").status_code == 503)
        assert "not answered" in get(f"{url}/health").json()["error"]["message"]
        go_on.set()
        assert waiting.result(PATIENCE)
        until(lambda: get(f"{url}/health").status_code == 200)
