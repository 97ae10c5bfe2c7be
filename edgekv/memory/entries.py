"""Entries per byte.

A ratio is a share of the bytes that a full f16 cache takes, whatever the cache's type: with q8_0
it holds 1.88 entries where f16 has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgekv.native import LayerInfo


def f16_bytes(layer: LayerInfo) -> int:
    """Of what is stored of one entry of a KV head: K, and V if it is no part of K."""
    return 2 * sum(d for _, d in layer.stored)


def entries_per_f16(layers: Sequence[LayerInfo]) -> Fraction:
    """KV entries of these layers that take the bytes of one in f16, the mean over their heads."""
    stored = sum(x.bytes_row * x.n_head_kv for x in layers)
    return (
        Fraction(sum(f16_bytes(x) * x.n_head_kv for x in layers), stored) if stored else Fraction(1)
    )
