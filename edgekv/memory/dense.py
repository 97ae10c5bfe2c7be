"""Cache types and bytes: what `auto` stores where no type was named, and entries per byte.

A model's contest (`edgekv.profiles.contest`) says what is best for it; without one it is DENSE.

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


def picked(
    model_path: str,
    method: str,
    settings: Settings,
    type_k: Any,
    type_v: Any,
    on_device: bool = False,
) -> tuple[str, str] | None:
    """The types of K and V that a cache with these settings gets because nobody named one: those of
    the model's contest, or else DENSE. None where `auto` does not decide, a budget in rows has
    nothing to win, or the model cannot have them.

    on_device: rows lie on a GPU, whose kernels are made for K and V of one type.
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
        return None
    shape = facts.model_info(model_path)
    return best(shape, settings.preset.types, on_device) if fits(shape) else None


def best(
    shape: dict[str, Any], measured: tuple[str, str] | None, on_device: bool = False
) -> tuple[str, str]:
    """Types for a model of this shape that fits: what was measured, if it can have that; else
    DENSE.
    """
    if measured is None or on_device and measured[0] != measured[1]:
        return DENSE, DENSE
    return measured if can_have(shape, measured) else (DENSE, DENSE)


def fits(shape: dict[str, Any]) -> bool:
    """Whether a model of this shape (see `edgekv.model.facts.model_info`) can have dense rows."""
    return shape["mode"] == "layers" and can_store(shape, DENSE)


def can_store(shape: dict[str, Any], kind: str) -> bool:
    """Whether heads of a model of this shape fill whole blocks of a cache type."""
    block = facts.cache_types[kind][1]
    return not (shape["d_head_k"] % block or shape["d_head_v"] % block)


def can_have(shape: dict[str, Any], types: tuple[str, str]) -> bool:
    """Whether a model of this shape can have these types of K and V: one where V is part of K."""
    same = types[0] == types[1] or not shape["v_in_k"]
    return same and all(can_store(shape, kind) for kind in types)


def stored_as(path: str, shape: dict[str, Any], method: str, ratio: float) -> str:
    """The cache type of a compressed cache where nobody names one: as in q8_0, or where K and V
    differ as in q8_0/q5_1.
    """
    from edgekv.methods.choose import AUTO, choose

    if method != AUTO or not fits(shape):
        return "f16"
    type_k, type_v = best(shape, choose(AUTO, path, ratio=ratio).types)
    return type_k if type_k == type_v else f"{type_k}/{type_v}"


def f16_bytes(layer: LayerInfo) -> int:
    """Of what is stored of one entry of a KV head: K, and V if it is no part of K."""
    return 2 * sum(d for _, d in layer.stored)


def entries_per_f16(layers: Sequence[LayerInfo]) -> Fraction:
    """KV entries of these layers that take the bytes of one in f16, the mean over their heads."""
    stored = sum(x.bytes_row * x.n_head_kv for x in layers)
    return (
        Fraction(sum(f16_bytes(x) * x.n_head_kv for x in layers), stored) if stored else Fraction(1)
    )
