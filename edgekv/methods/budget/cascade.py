"""cascade: budgets per layer that are settled again whenever a layer is done.

Paper: Qin et al., CAKE, arXiv 2503.12491, section 4.2, Algorithm 1: after layer m the rows are
divided among the layers 0..m by their weights, so the finished layers shrink and what is held stays
within the total. They only ever shrink (Prop. 1), so keeping the best of the best is keeping the
best of all rows (Theorem 1).

A layer that had to be clipped to the rows it has makes the difference: what it cannot take goes
evenly to the others, but never gives back rows that are gone, so a layer may then end with fewer
than one division at the end would give it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from edgekv.methods.budget.base import Plan
from edgekv.methods.budget.sharing import free, in_proportion, protected, whole
from edgekv.methods.layer import LayerStats


class Cascade:
    """The spending of one prompt: `measure` judges a layer, `weigh` turns all measures so far
    (float [n]) into weights (float [n]).
    """

    def __init__(
        self,
        plan: Plan,
        measure: Callable[[LayerStats], float],
        weigh: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    ) -> None:
        self._plan, self._measure, self._weigh = plan, measure, weigh
        self._least, self._free = protected(plan), free(plan)
        self._measures: NDArray[np.float64] = np.zeros(0)
        # per head of each finished layer, beside the protected ones, not yet whole
        self._rows: NDArray[np.float64] = np.zeros(0)

    def update(self, i: int, scores: NDArray[np.float32], layer: LayerStats) -> NDArray[np.int32]:
        assert i == len(self._rows), "layers come in order"
        self._measures = np.append(self._measures, self._measure(layer))
        more = self._plan.have[: i + 1] - self._least[: i + 1]
        room = np.append(self._rows, float(more[i].max()))
        n_heads = (self._plan.have[: i + 1] > 0).sum(axis=1)
        self._rows = in_proportion(self._weigh(self._measures), self._free, room, n_heads)
        return self._least[: i + 1] + np.minimum(whole(self._rows)[:, None], more)
