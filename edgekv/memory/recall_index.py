"""The index by which tokens are recalled: how many bits it has, and the bytes it takes.

What it is stands in edgekv-index.h. The figures here say in advance what the native code takes.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, sqrt

from edgekv.native import LayerInfo

BLOCK = 32
"""Keys whose codes lie together."""
MOST_BITS = 128
EACH = 128
"""Tokens for each of the groups, of those that they are made of."""


def bits_for(ratio: float) -> int:
    """Bits for each 64 values of a key, a multiple of 4: 48 at a twentieth of the bytes, 96 at a
    fifth.

    Of bytes that are few more go to the index, of many to rows: tried with outputs of attention.
    """
    return min(4 * round(54 * sqrt(ratio)), MOST_BITS)


def index_bytes(layers: Iterable[LayerInfo], n_tokens: int, bits: int) -> int:
    """Bytes for that many tokens of these layers."""
    return sum(x.n_head_kv * _of_head(x.d_k, x.d_v, n_tokens, bits) for x in layers)


def _of_head(d_k: int, d_v: int, n_tokens: int, bits: int) -> int:
    parts = max(1, d_k * bits // 256)
    dims = min(d_k, 3 * parts)
    codebook = dims * (d_k * 2 if d_k % 32 else d_k * 34 // 32) + dims * 32 + 4 * (d_k + parts)
    codes = ceil(n_tokens / BLOCK) * (16 * parts + 4)
    groups = min(_found(n_tokens) // EACH, 64) * (2 * (d_k + d_v) + 4)
    return codebook + codes + groups


def _found(n_tokens: int) -> int:
    """The first tokens, whose keys make the groups: their number grows by a quarter at a time."""
    found = min(n_tokens, EACH)
    while found >= EACH and found * 5 // 4 <= n_tokens:
        found = found * 5 // 4
    return found
