"""Conversations on disk, and the statistics of an uncompressed one.

File: a line `edgekv session 1`, a line of JSON (model fingerprint, cache types, sizes), tokens (int32), llama.cpp's state of
sequence 0, and the SHA-256 of everything before it. Written beside and renamed.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgekv import facts, state
from edgekv.errors import BadInput
from edgekv.stats import KVStats

if TYPE_CHECKING:
    from edgekv.llama import Llama

MAGIC = b"edgekv session 1\n"
_HASHED = 1 << 20  # bytes of the model file that go into its fingerprint: metadata, vocabulary and the first weights


def fingerprint(path: str) -> str:
    """A model file's identity: SHA-256 of its size and its first MiB."""
    with open(path, "rb") as f:
        return hashlib.sha256(str(os.path.getsize(path)).encode() + f.read(_HASHED)).hexdigest()


def _identity(llm: Llama) -> dict[str, Any]:
    return {
        "model": fingerprint(llm.model_path), "type_k": int(llm.context_params.type_k), "type_v": int(llm.context_params.type_v),
        "compressed": llm._kv is not None,
    }


def save(llm: Llama, path: str) -> None:
    """Write the conversation of `llm` to `path`."""
    now = state.take(llm)
    header = _identity(llm) | {"n_tokens": llm.n_tokens, "n_state": now.n_bytes}
    parts = [MAGIC, json.dumps(header).encode() + b"\n", now.tokens.astype("<i4").tobytes(), memoryview(now.data)]
    digest = hashlib.sha256()
    target = Path(path)
    try:
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=target.name, delete=False) as f:
            for part in parts:
                f.write(part)
                digest.update(part)
            f.write(digest.digest())
        os.replace(f.name, target)
    except OSError as error:
        raise BadInput(f"{path} cannot be written ({error.strerror}); choose another place") from None


def load(llm: Llama, path: str) -> None:
    """Make the conversation in `path` that of `llm`; anything wrong with the file leaves `llm` as it was."""
    tokens, data = _read(llm, path)
    if len(tokens) > llm.n_ctx():
        raise BadInput(f"{path} holds {len(tokens)} tokens, this context {llm.n_ctx()}: use a larger --ctx-size")
    if not state.put(llm, state.State(tokens, (ctypes.c_uint8 * len(data)).from_buffer_copy(data), None)):
        raise BadInput(f"{path} does not fit this model and its cache")


def _read(llm: Llama, path: str) -> tuple[np.ndarray[Any, Any], bytes]:
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror})") from None
    if not data.startswith(MAGIC):
        raise BadInput(f"{path} is no saved conversation of this edgekv version")
    if len(data) < 64 or hashlib.sha256(data[:-32]).digest() != data[-32:]:
        raise BadInput(f"{path} is damaged: its checksum does not match")
    line, _, body = data[len(MAGIC) : -32].partition(b"\n")
    header, mine = json.loads(line), _identity(llm)
    wrong = [name for name, value in mine.items() if header.get(name) != value]
    if wrong:
        what = {"model": "another model", "type_k": "another K cache type", "type_v": "another V cache type",
                "compressed": "a compressed cache" if header.get("compressed") else "an uncompressed cache"}
        raise BadInput(f"{path} was saved with {what[wrong[0]]}: load it with the same flags")
    cut = 4 * header["n_tokens"]
    return np.frombuffer(body[:cut], "<i4"), body[cut:]


def type_names(llm: Llama) -> tuple[str, str]:
    """Of the cache's K and V."""
    names = {kind: name for name, (kind, _, _) in facts.cache_types.items()} | {0: "f32"}
    return names[int(llm.context_params.type_k)], names[int(llm.context_params.type_v)]


def stats_uncompressed(llm: Llama, note: str, prefill_ms: float) -> KVStats:
    """Statistics of llama.cpp's own cache: every row of every token, allocated for the whole context at the start."""
    info, (type_k, type_v) = facts.model_shape(llm._model.model), type_names(llm)
    types = {kind: (block, size) for kind, block, size in facts.cache_types.values()} | {0: (1, 4)}
    params = llm.context_params

    def row(kind: int, d: int) -> int:
        block, size = types[int(kind)]
        return d // block * size

    per_token = sum(n * (row(params.type_k, info["d_head_k"]) + row(params.type_v, info["d_head_v"])) for n in info["n_head_kv"])
    allocated, in_f16 = per_token * llm.n_ctx(), 2 * sum(info["n_head_kv"]) * (info["d_head_k"] + info["d_head_v"])
    kept = np.full((info["n_layer"], max(info["n_head_kv"])), llm.n_tokens, np.int32)
    return KVStats(method="full", ratio=1.0, n_seen=llm.n_tokens, n_kept=float(llm.n_tokens), kept=kept, n_bytes=allocated,
                   type_k=type_k, type_v=type_v, n_bytes_peak=allocated, n_bytes_full=in_f16 * llm.n_tokens, n_bytes_used=per_token * llm.n_tokens, n_ctx=llm.n_ctx(), prefill_ms=prefill_ms, compress_ms=0.0, mode="uncompressed", note=note)
