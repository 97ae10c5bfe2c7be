"""Cache types that `auto` stores where none was named: what came nearest to the full cache in the
model's contest (`edgekv.learn.contest`), or DENSE.
"""

from __future__ import annotations

from typing import Any

from edgekv.choice.choose import AUTO, choose
from edgekv.choice.settings import Settings
from edgekv.memory.dense import best, fits
from edgekv.model import facts


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


def stored_as(path: str, shape: dict[str, Any], method: str, ratio: float) -> str:
    """The cache type where nobody names one: q8_0, or where K and V differ q8_0/q5_1."""
    if method != AUTO or not fits(shape):
        return "f16"
    type_k, type_v = best(shape, choose(AUTO, path, ratio=ratio).types)
    return type_k if type_k == type_v else f"{type_k}/{type_v}"
