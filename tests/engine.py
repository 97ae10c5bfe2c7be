"""Short ways to drive `edgekv.Llama` with tokens: what the engine's tests share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import is_dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np

from tests import lib

if TYPE_CHECKING:  # torch, which many children of tests do without, takes a second to import
    from tests.reference.model import Reference

TYPES = {"f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30}
MAX_NMSE = {
    "f16": 1e-6,
    "bf16": 1e-4,
    "q8_0": 1e-3,
    "q5_1": 1e-3,
    "q5_0": 1e-3,
    "q4_1": 1e-3,
    "q4_0": 1e-3,
}
"""Of the engine against the reference that stores its rows likewise: a rounding that falls the
other way is all there is.
"""
SHARED: dict[str, Any] = dict(n_ctx=2048, n_batch=512, n_ubatch=256, n_threads=1)
"""Of the library jobs and of `load`: more chunks than one, the last one short; one thread, because
tiny models gain from no more.
"""


def per_f16(kind: str, d_head: int = 64, alibi: bool = False) -> Fraction:
    """KV entries of a cache type, or of "K,V", that take the bytes of one in f16."""
    bytes_ = []
    for name in (kind.split(",") * 2)[:2]:
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(TYPES[name])]
        bytes_.append(d_head // block * size)
    return Fraction(4 * d_head, sum(bytes_) + 4 * alibi)


def n_kept(ratio: float, n_tokens: int, kind: str = "f16", **more: Any) -> int:
    """Tokens that a ratio, which is of an f16 cache's bytes, keeps in a cache of some type."""
    return min(int(Fraction(repr(ratio)) * per_f16(kind, **more) * n_tokens), n_tokens)


def share(part: float, kind: str) -> float:
    """The ratio that keeps a part of the tokens in a cache of some type."""
    return float(Fraction(repr(part)) / per_f16(kind))


def load(path: Path, kind: str = "f16", after: Sequence[int] = (), **options: Any) -> Any:
    """An `edgekv.Llama` on one tiny model with the tests' defaults. kind: cache type of K and V, or
    "K,V"; after: tokens that it has read.
    """
    from edgekv import Llama

    type_k, type_v = (kind.split(",") * 2)[:2]
    options = {
        **SHARED,
        "flash_attn": True,
        "verbose": False,
        "kv_min_tokens": 1,
        "kv_method": "snapkv",
        "kv_hidden": "f32",  # exact; `auto` has tests of its own
        **options,
    }
    options.setdefault("n_threads_batch", options["n_threads"])
    llm = Llama(str(path), type_k=TYPES[type_k], type_v=TYPES[type_v], **options)
    if after:
        llm.eval(list(after))
    return llm


def random_profile(model: Path, to: Path, pairs: str = "neighbours") -> np.ndarray:
    """Write a profile with the same share for every head and random maps for kvzap; returns the
    maps, float32 [n_layer, n_head_kv, n_weights].
    """
    from edgekv import profiles
    from edgekv.methods.kvzap import Surrogate, n_features

    identity = profiles.identify(str(model))
    shape = (identity.n_layer, max(identity.n_head_kv))
    maps = (
        np.random.default_rng(2)
        .standard_normal((*shape, n_features(identity.d_head_k, identity.d_head_v) + 1))
        .astype(np.float32)
    )
    profiles.write(
        profiles.Profile(
            identity,
            "probe",
            (0.3,),
            np.full((1, *shape), 0.3, np.float32),
            surrogate=Surrogate(maps, pairs),
        ),
        to,
    )
    return maps


def job(
    path: Path, kind: str, tokens: Sequence[int], decode: Sequence[int], **options: Any
) -> lib.Job:
    """The same for the unpatched library."""
    return lib.Job(
        str(path),
        tuple(tokens),
        tuple(decode),
        type_k=TYPES[kind],
        type_v=TYPES[kind],
        **{**SHARED, **options},
    )


def logits(llm: Any) -> np.ndarray:
    """float32 [n_vocab]: logits of the last token."""
    return np.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), (llm.n_vocab(),)).copy()


def feed(llm: Any, tokens: Sequence[int]) -> np.ndarray:
    """Logits [n_tokens, n_vocab] after each of the tokens, fed one by one."""
    rows = []
    for token in tokens:
        llm.eval([token])
        rows.append(logits(llm))
    return np.stack(rows)


def read(llm: Any, prompt: Sequence[int], decode: Sequence[int]) -> np.ndarray:
    """Logits [1 + n_decode, n_vocab]: after the prompt, then after each decoded token."""
    llm.eval(list(prompt))
    return (
        np.concatenate([logits(llm)[None], feed(llm, decode)]) if len(decode) else logits(llm)[None]
    )


def positions(llm: Any) -> list[list[np.ndarray]]:
    """Token indices that attention reads, per layer and KV head, in the order of the store."""
    store = llm.engine.store
    return [
        [store.positions(il, k) for k in range(info.n_head_kv)]
        for il, info in enumerate(store.layers)
    ]


def evict_likewise(reference: Reference, llm: Any) -> None:
    """Let the reference see the rows that the engine kept. Its sliding-window layers mask by
    themselves.
    """
    rows = positions(llm)
    reference.keep([[] if reference.weights.swa[il] else heads for il, heads in enumerate(rows)])


def stored(store: Any, il: int, head: int) -> list[np.ndarray]:
    """K and V [rows, d_head] of one head as their bytes say, in the basis that they are stored
    in.
    """
    layer = store.layers[il]
    return [
        gguf.quants.dequantize(
            np.frombuffer(data, np.uint8), gguf.GGMLQuantizationType(kind)
        ).reshape(-1, d)
        for data, (kind, d) in zip(store.row_bytes(il, head), layer.stored, strict=True)
    ]


OF_THE_MODEL = {"n_evaluated", "_seed", "_mirostat_mu"}
"""A total, and what the parent writes for each answer and nobody reads behind its beginning."""


def attributes(llm: Any) -> dict[str, object]:
    """What the model and its engine have of their own now, by name."""
    found: dict[str, object] = {}
    for owner in (llm, llm.engine):
        for name, value in vars(owner).items():
            if name not in OF_THE_MODEL:
                inside = vars(value) if is_dataclass(value) else {"": value}
                found |= {f"{type(owner).__name__}.{name}.{x}": y for x, y in inside.items()}
    return {name: told_apart(x) for name, x in found.items()}


def told_apart(value: object) -> object:
    """What changes when the value does."""
    plain = isinstance(value, int | float | str | tuple | type(None))
    return value if plain else repr(value) if isinstance(value, list | dict) else id(value)
