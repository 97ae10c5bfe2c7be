"""pooled: all rows of all layers and heads compete; one threshold over the model.

Paper: Kim et al., KVzip, arXiv 2505.23416, section 3.3 (non-uniform head budgets): the best scores
of all heads of all layers together.

Differences: the threshold rises layer by layer, over the layers done so far, and finished layers
are cut to it, so that never more than the total and one layer are held. A row below the threshold
of a few layers is below that of all, so the outcome is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from edgekv.methods.budget.base import Plan, Spending
from edgekv.methods.budget.sharing import flat, free, top
from edgekv.methods.layer import LayerStats


@dataclass(frozen=True)
class Pooled:
    params: ClassVar[None] = None
    name: ClassVar[str] = "pooled"
    title: ClassVar[str] = "one threshold for the scores of all heads of all layers"
    paper: ClassVar[str] = "KVzip, arXiv 2505.23416"
    stats: ClassVar[tuple[str, ...]] = ()

    def start(self, plan: Plan) -> Spending:
        return flat(plan) if free(plan) <= 0 else _Threshold(plan)


class _Threshold:
    """The scores above the threshold so far, and whose they are (layer * n_head_kv + head)."""

    def __init__(self, plan: Plan) -> None:
        self._total, self._n_head_kv = plan.total, plan.have.shape[1]
        self._scores: NDArray[np.float32] = np.zeros(0, np.float32)
        self._owner: NDArray[np.int32] = np.zeros(0, np.int32)

    def update(self, i: int, scores: NDArray[np.float32], layer: LayerStats) -> NDArray[np.int32]:
        head, _ = there = np.nonzero(~layer.absent)
        all_scores = np.concatenate([self._scores, scores[there]])
        owner = np.concatenate([self._owner, (i * self._n_head_kv + head).astype(np.int32)])
        stay = top(all_scores, self._total)
        self._scores, self._owner = all_scores[stay], owner[stay]
        counts = np.bincount(self._owner, minlength=(i + 1) * self._n_head_kv)
        return counts.reshape(i + 1, self._n_head_kv).astype(np.int32)
