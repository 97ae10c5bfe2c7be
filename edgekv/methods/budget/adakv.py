"""adakv: the heads of a layer compete for the layer's rows.

Paper: Feng et al., Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation, arXiv
2407.11550, Algorithm 1: the best scores of all KV heads of a layer together, counted per head. Each
layer has the same rows; each head keeps at least `alpha` of an equal share.

Differences: the authors mix the counts with the equal share (alpha of one, the rest of the other);
here the share is a floor, as later implementations have it, so a head that would get more anyway is
not cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from edgekv.errors import BadInput
from edgekv.methods.budget.base import Fixed, Plan, Spending
from edgekv.methods.budget.sharing import ALMOST, flat, free, top
from edgekv.methods.layer import LayerStats


@dataclass(frozen=True)
class AdaKVParams:
    alpha: float = 0.2
    """Share of an equal budget that every head keeps, 0 to 1."""

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise BadInput(
                f"alpha {self.alpha:g} is no share; give a number from 0 to 1, such as 0.2"
            )


@dataclass(frozen=True)
class AdaKV:
    params: AdaKVParams = AdaKVParams()
    name: ClassVar[str] = "adakv"
    title: ClassVar[str] = "the heads of a layer share its tokens by their scores"
    paper: ClassVar[str] = "Ada-KV, arXiv 2407.11550"
    stats: ClassVar[tuple[str, ...]] = ()

    def start(self, plan: Plan) -> Spending:
        return flat(plan) if free(plan) <= 0 else _PerLayer(flat(plan), self.params.alpha)


class _PerLayer:
    """AdaKV's budgets while layers finish: heads of a layer share by scores.

    equal: what each head would get without competition.
    """

    def __init__(self, equal: Fixed, alpha: float) -> None:
        self._equal, self._alpha = equal.counts, alpha
        self._counts = np.zeros_like(equal.counts)

    def update(self, i: int, scores: NDArray[np.float32], layer: LayerStats) -> NDArray[np.int32]:
        equal = self._equal[i]
        least = np.floor(self._alpha * equal + ALMOST).astype(int)
        heads = [np.sort(s[~absent])[::-1] for s, absent in zip(scores, layer.absent, strict=True)]
        for k, head in enumerate(heads):
            head[: least[k]] = np.inf
        owner = np.repeat(np.arange(len(heads)), [len(head) for head in heads])
        chosen = top(np.concatenate(heads), int(equal.sum()))
        self._counts[i, : len(heads)] = np.bincount(owner[chosen], minlength=len(heads))
        return self._counts[: i + 1]
