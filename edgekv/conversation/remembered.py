"""What the engine knows of a conversation besides the store (`edgekv.engine.past.Past`), as
bytes.

Without it a conversation that was saved goes on differently once its recent buffer is compressed:
by queries, shares and thresholds of its own instead of those of its last prompt. A small
description says which arrays follow; it is checked before a size is computed from it, and the
arrays before they are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.engine.past import Past
from edgekv.methods.merge import Folding
from edgekv.methods.query_moments import PackedMoments
from edgekv.native import LayerInfo

Layout = dict[Any, tuple[str, tuple[int, ...]]]
_MOST = 1e15
"""A number that makes no sense for a query: its products leave float32."""
_PARTS = ("mean", "root", "scale")
"""The arrays of edgekv.methods.query_moments.PackedMoments."""


def described(past: Past) -> dict[str, Any]:
    """What `arrays` are going to say, for JSON."""
    return {
        "compressed_at": past.compressed_at,
        "ratio": float(past.ratio),
        "spread": past.spread is not None,
        "beta": None if past.folding is None else float(past.folding.beta),
        "queries": sorted(past.queries),
    }


def arrays(past: Past, layers: Sequence[LayerInfo]) -> list[NDArray[Any]]:
    """The arrays of a description, in the order of its `layout`."""
    found: dict[Any, Any] = {"spread": past.spread}
    if past.folding is not None:
        found["thresholds"] = np.full(_heads(layers), np.nan)
        for at, threshold in past.folding.thresholds.items():
            found["thresholds"][at] = threshold
    for il, asked in past.queries.items():
        for name in _PARTS:
            found[il, name] = getattr(asked, name)
    return [
        np.ascontiguousarray(found[name], kind).reshape(shape)
        for name, (kind, shape) in layout(described(past), layers).items()
    ]


def layout(description: Any, layers: Sequence[LayerInfo]) -> Layout:
    """Type and shape of each array by its name.

    Raises ValueError if the description makes no sense.
    """
    if not isinstance(description, dict) or set(description) != {
        "compressed_at",
        "ratio",
        "spread",
        "beta",
        "queries",
    }:
        raise ValueError("its description has other names")
    at, ratio, spread, beta, queries = (
        description[x] for x in ("compressed_at", "ratio", "spread", "beta", "queries")
    )
    if (
        type(at) is not int
        or not 0 <= at < 2**31
        or type(spread) is not bool
        or not _is_share(ratio)
    ):
        raise ValueError("its numbers are out of range")
    if beta is not None and not _is_share(beta):
        raise ValueError("its weights are out of range")
    ils = (
        [il for il in queries if type(il) is int and 0 <= il < len(layers)]
        if type(queries) is list
        else None
    )
    if ils is None or ils != queries or ils != sorted(set(ils)):
        raise ValueError("its layers do not exist")
    found: Layout = {"spread": ("<f8", _heads(layers))} if spread else {}
    if beta is not None:
        found["thresholds"] = "<f8", _heads(layers)
    for il in ils:
        n, d = layers[il].n_head, layers[il].d_k
        found[il, "mean"], found[il, "scale"] = ("<f4", (n, d)), ("<f4", (n,))
        found[il, "root"] = "<f2", (n, d * (d + 1) // 2)
    return found


def n_bytes(form: Layout) -> int:
    """Bytes of the arrays together."""
    return sum(np.dtype(kind).itemsize * prod(shape) for kind, shape in form.values())


def remembered(description: dict[str, Any], form: Layout, data: memoryview) -> Past:
    """What `described` and `arrays` were made of; form: the description's `layout`.

    Raises ValueError if the arrays hold what an engine never knows.
    """
    found, begin = {}, 0
    for name, (kind, shape) in form.items():
        found[name] = np.frombuffer(data, kind, prod(shape), begin).reshape(shape)
        begin += found[name].nbytes
    spread, thresholds = found.get("spread"), found.get("thresholds")
    queries = description["queries"]
    if spread is not None and not ((spread >= 0) & (spread <= 1)).all():
        raise ValueError("not all shares are between 0 and 1")
    if thresholds is not None and (np.abs(thresholds) > 1.001).any():
        raise ValueError("not all thresholds are cosines")
    asked = {il: PackedMoments(*(found[il, name] for name in _PARTS)) for il in queries}
    if not all(_are_queries(x) for x in asked.values()):
        raise ValueError("not all queries are numbers")
    folding = None
    if thresholds is not None:
        folding = Folding(float(description["beta"]))
        folding.thresholds = {
            (int(il), int(k)): float(thresholds[il, k])
            for il, k in np.argwhere(~np.isnan(thresholds))
        }
    return Past(description["compressed_at"], folding, asked, spread, float(description["ratio"]))


def _are_queries(x: PackedMoments) -> bool:
    return bool(
        (np.abs(x.mean) < _MOST).all()
        and (np.abs(x.root) <= 1).all()
        and (np.abs(x.scale) < _MOST).all()
    )


def _heads(layers: Sequence[LayerInfo]) -> tuple[int, int]:
    """Layers, and the most KV heads that one has."""
    return len(layers), max(x.n_head_kv for x in layers)


def _is_share(x: Any) -> bool:
    return type(x) in (int, float) and 0 <= x <= 1
