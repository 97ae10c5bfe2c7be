"""memory: a limit in bytes for the whole KV cache, turned into rows.

A budget in bytes (`kv_budget_mb`) is about the rows that selection keeps. A limit for the cache
holds at any time between prompts: it also counts what the recent buffer may grow to before it is
compressed again, the room that is allocated ahead, and sliding-window layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from edgekv.base.sizes import size_text
from edgekv.errors import BadInput
from edgekv.memory.entries import f16_bytes

if TYPE_CHECKING:
    from edgekv.native import LayerInfo

APPEND_MAX = 64
"""New tokens that are appended to the recent buffer at once, at most; a longer text is read layer
by layer. A full one grows by as many.
"""
SWA_SLACK = 64
"""Rows behind the window that a sliding-window layer keeps (native/src/store/edgekv-store.cpp)."""
RECENT, RECENT_STAY, RECENT_STEP = 192, 128, 64
"""New rows of a head that wait in f16 before they are rounded: at most, and how many are left then;
their room grows in steps (native/src/store/edgekv-layer.cpp).
"""
LAYER_BYTES = 256
"""What aligning a layer's two tensors may take, on any backend."""


def reserve(layers: Sequence[LayerInfo], tail: int, window: int) -> int:
    """Bytes that are not kept rows, at most: tails, room allocated ahead, sliding windows."""
    n_tail = max(tail, window) + APPEND_MAX
    return sum(LAYER_BYTES + x.n_head_kv * _beside_kept(x, n_tail) for x in layers)


def _beside_kept(layer: LayerInfo, n_tail: int) -> int:
    """The same of one head."""
    if layer.n_swa:
        return layer.bytes_row * (layer.n_swa + SWA_SLACK + APPEND_MAX)
    if not layer.waits:
        return layer.bytes_row * n_tail
    n_recent = min(-(-n_tail // RECENT_STEP) * RECENT_STEP, RECENT)
    return f16_bytes(layer) * n_recent + layer.bytes_row * max(n_tail - RECENT_STAY, 0)


def growth(layers: Sequence[LayerInfo]) -> int:
    """Bytes that a cache takes more, at most, once APPEND_MAX tokens or fewer are appended."""
    return sum(
        LAYER_BYTES + x.n_head_kv * APPEND_MAX * (x.bytes_row + x.waits * f16_bytes(x))
        for x in layers
    )


def rows_within(
    layers: Sequence[LayerInfo], n_bytes: int, tail: int, window: int, sink: int
) -> int:
    """Rows per head that may be kept so that the cache never takes more than n_bytes, tails
    included.

    Rows may move to the widest heads, so all count as such. Raises BadInput if not even the rows
    that always stay (sink, window) would fit.
    """
    full = [x for x in layers if x.selects]
    row = max((x.bytes_row for x in full), default=0) * sum(x.n_head_kv for x in full)
    rest = reserve(layers, tail, window)
    least = rest + row * (sink + window)
    if n_bytes < least:
        raise BadInput(
            f"kv_memory {size_text(n_bytes)} is too small: new tokens and those that always stay"
            f" take {size_text(least)} of this model's cache; give more, a smaller --kv-tail, or"
            " smaller cache types (-ctk, -ctv)"
        )
    return (n_bytes - rest) // row if row else 2**31 - 1
