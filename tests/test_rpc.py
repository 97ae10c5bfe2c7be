"""Layers on llama.cpp's RPC servers: two processes of this machine."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from edgekv.errors import BadInput, EdgeKVError
from edgekv.library import library_path
from edgekv.model import rpc
from tests.cli import refused, typed
from tests.engine import load, read
from tests.lib import nmse
from tests.rpc_server import serving


def has_rpc() -> bool:
    try:
        return library_path("ggml-rpc").is_file()
    except EdgeKVError:
        return False


needs_rpc = pytest.mark.skipif(not has_rpc(), reason="the library is built without RPC")


@pytest.fixture(scope="module")
def servers() -> Iterator[list[str]]:
    """Endpoints of two servers, each with a CPU."""
    with ExitStack() as stack:
        yield [stack.enter_context(serving())[0] for _ in range(2)]


@needs_rpc
@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize(("n_servers", "n_gpu_layers"), [(1, 2), (2, 99)])
def test_layers_on_servers_answer_as_on_the_cpu(tiny, text, servers, kind, n_servers, n_gpu_layers):
    """A server and the CPU, or two servers."""
    prompt, more = text(300), text(8, 1)
    expected = read(load(tiny("llama-gqa"), kind, kv_ratio=1.0), prompt, more)
    there = dict(rpc_servers=servers[:n_servers], n_gpu_layers=n_gpu_layers)
    with load(tiny("llama-gqa"), kind, kv_ratio=1.0, **there) as llm:
        got = read(llm, prompt, more)
    assert nmse(got, expected) < 1e-6 and np.array_equal(got.argmax(1), expected.argmax(1))


@needs_rpc
def test_a_model_that_names_no_server_uses_none(tiny, text):
    with serving() as (endpoint, server):
        load(tiny("llama-gqa"), kv_ratio=1.0, rpc_servers=endpoint, n_gpu_layers=99).close()
        server.kill()
        server.wait()
    llm = load(tiny("llama-gqa"), kv_ratio=1.0, n_gpu_layers=99)
    assert np.isfinite(read(llm, text(20), ())).all()


@needs_rpc
def test_several_devices_share_a_compressed_prompt(tiny, text, servers, monkeypatch):
    """Two servers stand in for two GPUs, for which llama.cpp's scheduler would keep several copies
    of each input. Rows are drawn, so that the same ones stay.
    """
    monkeypatch.setenv("EDGEKV_ATTEND", "graph")  # as on a device
    how = dict(kv_ratio=0.2, kv_method="random", n_ubatch=64, n_batch=128)
    prompt, more = text(300), text(8, 1)
    expected = read(load(tiny("llama-gqa"), **how), prompt, more)
    monkeypatch.delenv("EDGEKV_ATTEND")
    monkeypatch.setattr("edgekv.Llama._kv_check_remote", lambda *_: None)  # else it is refused
    with load(tiny("llama-gqa"), rpc_servers=servers, n_gpu_layers=99, **how) as llm:
        got = read(llm, prompt, more)
    assert nmse(got, expected) < 1e-4


def test_a_server_with_a_compressed_cache_is_refused(tiny):
    with pytest.raises(BadInput, match="kv_ratio"):
        load(tiny("llama-gqa"), kv_ratio=0.2, rpc_servers="localhost:1")
    line = f"run -m {tiny('llama-gqa')} -p a --rpc localhost:1 --kv-ratio 0.2"
    assert "--kv-ratio" in refused(typed(line))


@pytest.mark.parametrize("servers", ["localhost", ":1", "a:0", "a:65536", "a:b", "a:1,", "::1:80"])
def test_what_is_no_server_is_refused(servers):
    with pytest.raises(BadInput, match="host:port"):
        rpc.endpoints(servers)


@pytest.mark.parametrize("answer", [None, b"", b"HTTP/1.1 400 Bad Request\r\n", "nothing"])
def test_a_server_that_is_not_there_is_told_of(tiny, monkeypatch, answer):
    """Nobody listens, or something else than an RPC server does, or it is busy."""
    monkeypatch.setattr(rpc, "SECONDS", 0.2)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
        if answer is not None:
            server.listen()
        if isinstance(answer, bytes):

            def reply() -> None:
                client, _ = server.accept()
                client.recv(64)
                client.sendall(answer)
                client.close()

            threading.Thread(target=reply, daemon=True).start()
        said = refused(typed(f"run -m {tiny('llama-gqa')} -p a --rpc {endpoint}"))
    assert endpoint in said
