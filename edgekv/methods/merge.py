"""merge: evicted rows are folded into the kept rows that they resemble, as in D2O.
`edgekv.methods.centroid_merge` is the other merge.

Paper: Wan et al., D2O: Dynamic Discriminative Operations, arXiv 2406.13035, section 4.2.2, eq. 9 to
11. Per KV head: each evicted key finds the kept key with the largest cosine u; evicted rows whose u
is below a threshold are dropped, the others are added to their row, key and value, with the weights
exp(u) / (sum of exp(u) over what the row receives + e); the row's own weight is e over the same
sum.
The threshold is a moving average over calls: tau_t = beta * mean of u + (1 - beta) * tau_(t-1), at
first the mean itself.

Differences: the authors' code averages with the weights u instead. Keys are compared and merged as
stored, rotated to their own tokens' positions. A finished layer that shrinks again while later
layers are read merges what it loses then, by a threshold that moves on.

Searching and folding touch rows and are native (`edgekv_prefill_nearest`, `edgekv_prefill_merge`);
which rows, and by what weights, is here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from edgekv.errors import BadInput


@dataclass(frozen=True)
class D2OParams:
    ema: float = 0.7
    """beta: weight of this call's mean in the threshold, 0 to 1."""

    def __post_init__(self) -> None:
        if not 0 <= self.ema <= 1:
            raise BadInput(f"ema {self.ema:g} is no weight; give a number from 0 to 1, such as 0.7")


@dataclass(frozen=True)
class D2O:
    """The merge as a preset names it; a conversation's thresholds are in what `start` gives."""

    params: D2OParams = D2OParams()
    name: ClassVar[str] = "d2o"
    title: ClassVar[str] = "evicted tokens are folded into the kept ones they resemble"
    paper: ClassVar[str] = "D2O, arXiv 2406.13035"

    def start(self) -> Folding:
        return Folding(self.params.ema)


class FoldPlan(NamedTuple):
    """What is merged into what, for one KV head, by its row numbers before it is evicted."""

    rows: NDArray[np.int32]
    """[n] rows that receive something, ascending."""
    own: NDArray[np.float32]
    """[n] weight of the row itself; with the weights of what it receives it adds up to 1."""
    counts: NDArray[np.int32]
    """[n] how many each receives."""
    sources: NDArray[np.int32]
    """[sum of counts] what they receive, one row's list after the other."""
    weights: NDArray[np.float32]
    """[sum of counts] weight of each source."""


class Rows(Protocol):
    """Where the rows are, see `edgekv.native.Prefill`."""

    def nearest(
        self, il: int, head: int, gone: NDArray[np.int32], kept: NDArray[np.int32]
    ) -> tuple[NDArray[np.float32], NDArray[np.int32]]: ...
    def merge(self, il: int, head: int, plan: FoldPlan) -> None: ...


class Folding:
    """The merges of one conversation: a moving threshold for each layer and KV head."""

    def __init__(self, beta: float) -> None:
        self.beta = beta
        self.thresholds: dict[tuple[int, int], float] = {}
        """By layer and KV head."""

    def fold(self, where: Rows, il: int, head: int, n_rows: int, kept: NDArray[np.int32]) -> None:
        """Fold what a head will lose into what it keeps: `kept` of its n_rows rows, still there."""
        lost = np.ones(n_rows, bool)
        lost[kept] = False
        gone = np.flatnonzero(lost).astype(np.int32)
        if not len(gone) or not len(kept):
            return
        cosine, nearest = where.nearest(il, head, gone, kept)
        tau = threshold(cosine, self.thresholds.get((il, head)), self.beta)
        self.thresholds[il, head] = tau
        stay = cosine >= tau
        where.merge(il, head, plan(gone[stay], kept[nearest[stay]], cosine[stay]))


def threshold(cosine: NDArray[np.float32], before: float | None, beta: float) -> float:
    """tau of a call by its evicted rows' cosines (one at least); before: the last tau, or None."""
    assert len(cosine) and 0 <= beta <= 1
    mean = float(cosine.mean(dtype=np.float64))
    return mean if before is None else beta * mean + (1 - beta) * before


def plan(
    sources: NDArray[np.int32], targets: NDArray[np.int32], cosine: NDArray[np.float32]
) -> FoldPlan:
    """Row sources[i] is merged into targets[i]; cosine[i]: of their keys. All [n_merged]."""
    rows, which, counts = np.unique(targets, return_inverse=True, return_counts=True)
    strength = np.exp(cosine.astype(np.float64))
    total = np.bincount(which, strength, minlength=len(rows)) + np.e
    order = np.argsort(which, kind="stable")
    return FoldPlan(
        rows.astype(np.int32),
        (np.e / total).astype(np.float32),
        counts.astype(np.int32),
        sources[order].astype(np.int32),
        (strength / total[which])[order].astype(np.float32),
    )
