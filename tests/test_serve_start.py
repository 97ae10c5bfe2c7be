"""The server listens at once: before its model is loaded, and while the model is prepared."""

from __future__ import annotations

import signal
import threading

import httpx
import pytest

from edgekv.serve import status
from edgekv.serve.options import ServeOptions
from edgekv.serve.run import Server, listen
from tests.engine import load
from tests.serving import PATIENCE, get, post, serving, started, until


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
