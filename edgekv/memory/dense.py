"""Cache types and bytes: what `auto` stores where no type was named, and entries per byte.

A ratio is a share of the bytes that a full f16 cache takes, whatever the cache's type: with q8_0
it holds 1.88 entries where f16 has one. They answer nearly as well, so more of them in the same
bytes answer better (docs/results/default.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from edgekv.model import facts

if TYPE_CHECKING:
    from edgekv.native import LayerInfo
    from edgekv.settings import Settings

DENSE = "q8_0"


def picks(model_path: str, method: str, settings: Settings, type_k: Any, type_v: Any) -> bool:
    """Whether a cache with these settings gets dense rows: `auto` decides, nobody named a type, a
    budget in rows has nothing to win, and the model can have them.
    """
    # with all methods, which a plan (`edgekv.memory.fit`) has no use for and would count as its own
    from edgekv.methods.choose import AUTO

    if (
        method != AUTO
        or not (type_k is None and type_v is None)
        or not settings.compresses
        or settings.tokens
        or settings.table is not None
    ):
        return False
    return fits(facts.model_info(model_path))


def fits(shape: dict[str, Any]) -> bool:
    """Whether a model of this shape (see `edgekv.model.facts.model_info`) can have dense rows."""
    return shape["mode"] == "layers" and can_store(shape, DENSE)


def can_store(shape: dict[str, Any], kind: str) -> bool:
    """Whether heads of a model of this shape fill whole blocks of a cache type."""
    block = facts.cache_types[kind][1]
    return not (shape["d_head_k"] % block or shape["d_head_v"] % block)


def stored_as(shape: dict[str, Any], method: str) -> str:
    """The cache type of a compressed cache where nobody names one."""
    from edgekv.methods.choose import AUTO

    return DENSE if method == AUTO and fits(shape) else "f16"


def f16_bytes(layer: LayerInfo) -> int:
    """Of what is stored of one entry of a KV head: K, and V if it is no part of K."""
    return 2 * sum(d for _, d in layer.stored)


def entries_per_f16(layers: Sequence[LayerInfo]) -> Fraction:
    """KV entries of these layers that take the bytes of one in f16, the mean over their heads."""
    stored = sum(x.bytes_row * x.n_head_kv for x in layers)
    return (
        Fraction(sum(f16_bytes(x) * x.n_head_kv for x in layers), stored) if stored else Fraction(1)
    )
