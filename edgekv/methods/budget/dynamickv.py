"""dynamickv: layers share the rows by how many of the best scores are theirs, counted anew every
few layers.

Paper: Zhou et al., DynamicKV: Task-Aware Adaptive KV Cache Compression, arXiv 2412.14838, Algorithm
1. With wt the mean rows of a head and ws its window, a layer that is done keeps at most (wt - ws) *
r_max rows beside the window. Every m layers: of all scores so far the (wt - ws) * Hk * l best are
counted per layer; the counts, scaled to the whole model's rows, are the finished layers' budgets
(eq. 4 to 6).

Differences: sinks are kept beside the window. The paper gives neither r_max nor m. Budgets are
settled before m layers are through, too, if more than the total is held, and once more after the
last layer; a finished layer cannot grow again, what it cannot take goes evenly to the others. The
paper scales to r_max first and to the total then; the first cancels. The scores of all layers are
kept (4 bytes per row) until the prompt is read. Budgets round down, so up to one row per head stays
unspent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from edgekv.errors import BadInput
from edgekv.methods.budget.base import Plan, Spending
from edgekv.methods.budget.sharing import flat, free, in_proportion, protected, top, whole
from edgekv.methods.layer import LayerStats


@dataclass(frozen=True)
class DynamicKVParams:
    r_max: float = 10.0
    """Most rows of a layer, as a multiple of the mean."""
    m: int = 4
    """Layers between two updates."""

    def __post_init__(self) -> None:
        if not 1 <= self.r_max < float("inf"):
            raise BadInput(f"r_max {self.r_max:g} is below the mean; give a number, 1 or more")
        if self.m < 1:
            raise BadInput(f"m {self.m} is no number of layers; give a whole number, 1 or more")


@dataclass(frozen=True)
class DynamicKV:
    params: DynamicKVParams = DynamicKVParams()
    name: ClassVar[str] = "dynamickv"
    title: ClassVar[str] = "more for layers that hold many of the best scores"
    paper: ClassVar[str] = "DynamicKV, arXiv 2412.14838"
    stats: ClassVar[tuple[str, ...]] = ()

    def start(self, plan: Plan) -> Spending:
        return flat(plan) if free(plan) <= 0 else _Progressive(plan, self.params)


class _Progressive:
    def __init__(self, plan: Plan, params: DynamicKVParams) -> None:
        self._plan, self._m = plan, params.m
        self._least, self._free = protected(plan), free(plan)
        self._n_heads = (plan.have > 0).sum(axis=1)
        self._most = params.r_max * self._free / max(plan.n_heads, 1)
        # of each finished layer's rows that are not protected
        self._scores: list[NDArray[np.float32]] = []
        # per head of each finished layer, beside the protected ones, not yet whole
        self._rows: NDArray[np.float64] = np.zeros(0)

    def update(self, i: int, scores: NDArray[np.float32], layer: LayerStats) -> NDArray[np.int32]:
        assert i == len(self._rows), "layers come in order"
        self._scores.append(scores[~layer.absent & (scores < np.inf)])
        more = self._plan.have[: i + 1] - self._least[: i + 1]
        self._rows = np.append(self._rows, min(self._most, float(more[i].max())))
        counts = self._counts(more)
        if (
            (i + 1) % self._m == 0
            or i + 1 == len(self._plan.have)
            or (counts - self._least[: i + 1]).sum() > self._free
        ):
            self._rows = in_proportion(
                self._shares(), self._free, self._rows, self._n_heads[: i + 1]
            )
            counts = self._counts(more)
        return counts

    def _counts(self, more: NDArray[np.int32]) -> NDArray[np.int32]:
        return self._least[: len(more)] + np.minimum(whole(self._rows)[:, None], more)

    def _shares(self) -> NDArray[np.float64]:
        """float [n]: how many of the best scores are each finished layer's, per head."""
        n, n_heads = len(self._scores), self._n_heads[: len(self._scores)]
        layer = np.repeat(np.arange(n), [len(s) for s in self._scores])
        best = top(
            np.concatenate(self._scores), self._free * int(n_heads.sum()) // self._plan.n_heads
        )
        return np.bincount(layer[best], minlength=n) / np.maximum(n_heads, 1)
