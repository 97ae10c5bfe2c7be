"""Dense rows: the cache type that `auto` picks where none was asked for.

A row in q8_0 takes 34 bytes where one in f16 takes 64 and answers nearly as well, so more of them in the same bytes answer better than fewer in
f16: docs/methods.md, "Measured: what `auto` is". A ratio is then a share of the bytes that the f16 cache would take.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from edgekv import facts

if TYPE_CHECKING:
    from edgekv.engine import Settings
    from edgekv.native import LayerInfo

DENSE = "q8_0"


def picks(model_path: str, method: str, settings: Settings, type_k: Any, type_v: Any) -> bool:
    """Whether a cache with these settings gets dense rows: `auto` decides, nobody named a type, a budget in rows has nothing to win, and the model can
    have them."""
    from edgekv.choose import AUTO  # with all methods, which a plan (`edgekv.fit`) has no use for and would count as its own

    if method != AUTO or not (type_k is None and type_v is None) or not settings.compresses or settings.tokens or settings.table is not None:
        return False
    return fits(facts.model_info(model_path))


def fits(shape: dict[str, Any]) -> bool:
    """Whether a model of this shape (see `edgekv.facts.model_info`) can have dense rows."""
    block = facts.cache_types[DENSE][1]
    return shape["mode"] == "layers" and not (shape["d_head_k"] % block or shape["d_head_v"] % block)


def f16_bytes(layer: LayerInfo) -> int:
    """Of one K row and one V row of a KV head."""
    return 2 * (layer.d_k + layer.d_v)


def rows_per_f16(layers: Sequence[LayerInfo]) -> float:
    """Rows of these layers that take the bytes of one in f16, the mean over their heads."""
    stored = sum(x.bytes_row * x.n_head_kv for x in layers)
    return sum(f16_bytes(x) * x.n_head_kv for x in layers) / stored if stored else 1.0
