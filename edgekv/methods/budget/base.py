"""How a budget is asked: once per prompt for a `Plan`, then once per finished layer.

A budget may know everything before the first layer (uniform, pyramid, a profile), need the layer's
own scores (AdaKV), or learn from every layer (CAKE, DynamicKV, D2O, pooled over the model). The
same two calls serve all: `start` and `update`. The engine cuts every finished layer to what
`update` says, so memory falls while the prompt is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from edgekv.methods.budget.clip import clip
from edgekv.methods.layer import LayerStats


@dataclass(frozen=True)
class Plan:
    """What there is to spend, and where.

    Layers and heads are those that can be compressed, in the order of the model: `layers[i]` is the
    model's layer, row i of every array here is about it. A layer with fewer KV heads than n_head_kv
    has `have` 0 there.
    """

    n_rows: int
    """Mean rows per head that may stay; the sum over all heads is n_rows * number of heads."""
    have: NDArray[np.int32]
    """[n_layer, n_head_kv] rows that each head holds before anything is evicted."""
    layers: tuple[int, ...]
    n_tokens: int
    """Tokens seen, this turn's included."""
    sink: int
    window: int
    """Last tokens that always stay; with a summary they may be more than the user's window."""
    ratio: float
    """n_rows / n_tokens."""

    @property
    def n_heads(self) -> int:
        return int((self.have > 0).sum())

    @property
    def total(self) -> int:
        """Rows of all heads together."""
        return self.n_rows * self.n_heads


class Spending(Protocol):
    """One prompt's budget in the making."""

    def update(self, i: int, scores: NDArray[np.float32], layer: LayerStats) -> NDArray[np.int32]:
        """Counts int32 [i + 1, n_head_kv] for the plan's layers 0..i, now that layer i is done.

        scores: float32 [n_head_kv, n_rows] of layer i, protected rows +inf, absent rows -inf.
        Earlier layers may only shrink; no count is above `have`, and after the last layer the sum
        is at most the plan's total.
        """
        ...


class Budget(Protocol):
    """A way to spread a plan's rows over layers and heads."""

    @property
    def name(self) -> str: ...

    @property
    def title(self) -> str: ...

    @property
    def paper(self) -> str: ...

    @property
    def stats(self) -> tuple[str, ...]:
        """Statistics that `update` reads (`edgekv.methods.Observe`), beside the score's."""
        ...

    @property
    def params(self) -> Any:
        """Instance of the budget's own frozen dataclass, or None if it has none;
        `dataclasses.replace(budget, params=...)` changes them.
        """
        ...

    def start(self, plan: Plan) -> Spending: ...


@dataclass(frozen=True)
class Spread:
    """Of shapes alone: `function(mean rows, n_layer, n_head_kv)` -> int32 [n_layer, n_head_kv]."""

    name: str
    function: Callable[[int, int, int], NDArray[np.int32]]
    title: str
    paper: str = ""
    stats: ClassVar[tuple[str, ...]] = ()
    params: ClassVar[None] = None

    def start(self, plan: Plan) -> Fixed:
        return Fixed(fit(self.function(plan.n_rows, *plan.have.shape), plan.have))


class Fixed:
    """Counts that are known before the first layer: int32 [n_layer, n_head_kv]."""

    def __init__(self, counts: NDArray[np.int32]) -> None:
        self.counts = counts

    def update(self, i: int, scores: NDArray[np.float32], layer: LayerStats) -> NDArray[np.int32]:
        return self.counts[: i + 1]


def fit(counts: NDArray[np.int32], have: NDArray[np.int32]) -> NDArray[np.int32]:
    """`clip` where some layers have fewer heads: those that do not exist (have 0) take nothing."""
    there, out = have > 0, np.zeros(have.shape, np.int32)
    out[there] = clip(counts[there], have[there])
    return out
