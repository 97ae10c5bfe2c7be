"""Devices of other machines: llama.cpp's RPC servers, by functions of ggml that the bindings leave
out.

A server's devices are given to the models that name it, and to no other model of the process.
"""

from __future__ import annotations

import ctypes
import socket
import struct
from collections.abc import Sequence
from ctypes import c_char_p, c_int, c_size_t, c_void_p

from edgekv.errors import BadInput, EdgeKVError
from edgekv.library import library_path, logged_error
from edgekv.model.backends import function
from edgekv.native import llama_cpp

SECONDS = 5.0
"""How long a server may take to answer the first time."""
GPU, INTEGRATED = 1, 2
"""ggml's ggml_backend_dev_type."""
HELLO = 14
"""RPC_CMD_HELLO of ggml-rpc.cpp, which never changes."""
CAPABILITIES = 24
"""Bytes behind it that say what the caller can."""
UNCOMPRESSED = (
    "layers on RPC servers keep the whole cache so far: leave out rpc_servers (--rpc), or kv_ratio"
    " (--kv-ratio) at 1 and kv_fast_prefill (--kv-fast-prefill) out"
)


def endpoints(servers: str | Sequence[str] | None) -> list[str]:
    """HOST:PORT of each server, from "host:port,..." or a list of such texts. Raises BadInput."""
    texts = [servers] if isinstance(servers, str) else servers or ()
    found = [part.strip() for text in texts for part in text.split(",")]
    for one in found:
        host, _, port = one.rpartition(":")
        is_port = port.isascii() and port.isdigit() and len(port) <= 5
        if not host or ":" in host or not is_port or not 0 < int(port) < 2**16:
            raise BadInput(
                f"'{one}' is no RPC server: write host:port, such as 192.168.1.2:50052, with commas"
                " between several"
            )
    return list(dict.fromkeys(found))


def check(endpoint: str) -> None:
    """Ask a server for its version. Raises BadInput if none answers: llama.cpp would end the
    process, or wait for ever behind another client.
    """
    host, _, port = endpoint.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), SECONDS) as server:
            server.sendall(struct.pack("<BQ", HELLO, CAPABILITIES) + bytes(CAPABILITIES))
            answer = server.recv(8)
    except TimeoutError:
        raise BadInput(
            f"the RPC server {endpoint} does not answer: it serves one client at a time, and may"
            " have another one"
        ) from None
    except OSError as error:
        raise BadInput(
            f"the RPC server {endpoint} cannot be reached ({error.strerror or error}): start"
            " llama.cpp's rpc-server there"
        ) from None
    if len(answer) < 8 or struct.unpack("<Q", answer)[0] != 4 + CAPABILITIES:
        raise BadInput(
            f"{endpoint} is no RPC server that this build understands: start the rpc-server of a"
            " llama.cpp of about the same age there"
        )


def devices(servers: Sequence[str]) -> list[int]:
    """Addresses of the servers' devices, then of the GPUs of this machine, as llama.cpp orders
    them. Raises BadInput if the build has no RPC or a server does not answer.
    """
    try:
        library_path("ggml-rpc")
    except EdgeKVError:
        raise BadInput(
            "this build has no RPC: build edgekv with CMAKE_ARGS=-DGGML_RPC=ON pip install ."
        ) from None
    for endpoint in servers:
        check(endpoint)
    llama_cpp.llama_backend_init()  # loads the backends
    add = function("ggml-rpc", "ggml_backend_rpc_add_server", c_void_p, c_char_p)
    count = function("ggml-base", "ggml_backend_reg_dev_count", c_size_t, c_void_p)
    get = function("ggml-base", "ggml_backend_reg_dev_get", c_void_p, c_void_p, c_size_t)
    found = []
    for endpoint in servers:
        registry = add(endpoint.encode())
        if not registry:
            raise BadInput(f"the RPC server {endpoint} has no devices: {logged_error()}")
        found += [get(registry, i) for i in range(count(registry))]
    return found + _local()


def _local() -> list[int]:
    count = function("ggml", "ggml_backend_dev_count", c_size_t)
    get = function("ggml", "ggml_backend_dev_get", c_void_p, c_size_t)
    kind = function("ggml-base", "ggml_backend_dev_type", c_int, c_void_p)
    kinds = {get(i): kind(get(i)) for i in range(count())}
    gpus = [device for device, x in kinds.items() if x == GPU]
    return gpus or [device for device, x in kinds.items() if x == INTEGRATED]


def as_array(servers: Sequence[str]) -> ctypes.Array[c_void_p] | None:
    """`llama_model_params.devices`, for as long as it loads; None: none. Raises BadInput."""
    found = devices(servers) if servers else []
    return (c_void_p * (len(found) + 1))(*found) if found else None  # NULL ends it
