"""Dense rows: cache types that take fewer bytes than f16, and which of them a model can have.

A ratio is of the full f16 cache's bytes, so denser rows are more of them. Those of q8_0 answer
nearly as well as f16's, so more of them in the same bytes answer better (docs/results/default.md).
"""

from __future__ import annotations

from typing import Any

from edgekv.model import facts

DENSE = "q8_0"


def best(
    shape: dict[str, Any], measured: tuple[str, str] | None, on_device: bool = False
) -> tuple[str, str]:
    """Types that fit a model of this shape: those measured, if it can have them; else DENSE."""
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
