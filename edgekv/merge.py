"""merge: what becomes of evicted rows: dropped, or folded into the kept rows they resemble.

Paper: Wan et al., D2O: Dynamic Discriminative Operations, arXiv 2406.13035, section 4.2.2, eq. 9 to 11. Per KV head: each evicted key
finds the kept key with the largest cosine u; evicted rows whose u is below a threshold are dropped, the others are added to their row,
key and value, with the weights exp(u) / (sum of exp(u) over what the row receives + e); the row's own weight is e over the same sum.
The threshold is a moving average over calls: tau_t = beta * mean of u + (1 - beta) * tau_(t-1), at first the mean itself.

Differences: the authors' code averages with the weights u instead. Keys are compared and merged as stored, rotated to their own tokens'
positions. The search goes through blocks, so that no array of [n_evicted, n_kept] is made. A finished layer that shrinks again while
later layers are read merges what it loses then, by a threshold that moves on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from edgekv.errors import BadInput

BLOCK_EVICTED, BLOCK_KEPT = 512, 4096
"""Rows compared at a time: 8 MiB of cosines."""
TINY = np.float32(1e-12)


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
    title: ClassVar[str] = "evicted rows are folded into the kept ones they resemble"
    paper: ClassVar[str] = "D2O, arXiv 2406.13035"

    def start(self) -> Folding:
        return Folding(self.params.ema)


MERGES: dict[str, D2O | None] = {"none": None, "d2o": D2O()}


class Folding:
    """The merges of one conversation: a threshold for each layer and KV head that moves from call to call."""

    def __init__(self, beta: float) -> None:
        self._beta = beta
        self._thresholds: dict[tuple[int, int], float | None] = {}

    def fold(
        self, il: int, head: int, keys: NDArray[np.float32], values: NDArray[np.float32], kept: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.float32]]:
        """Rows that change, as numbers into `kept`, and their new keys and values.

        keys [n, d_k], values [n, d_v]: all rows of the head before it is evicted to the rows `kept`.
        """
        gone = np.ones(len(keys), bool)
        gone[kept] = False
        p = plan(keys[gone], keys[kept], self._thresholds.get((il, head)), self._beta)
        self._thresholds[il, head] = p.threshold
        return p.rows, merged(p, keys[gone], keys[kept]), merged(p, values[gone], values[kept])


@dataclass(frozen=True)
class Plan:
    """What is merged into what, for one KV head. Rows are numbers into the evicted and the kept rows that `plan` was given."""

    source: NDArray[np.int32]
    """[n_merged] evicted rows that are not dropped, ascending."""
    target: NDArray[np.int32]
    """[n_merged] index into `rows`: the kept row that each goes to."""
    weight: NDArray[np.float32]
    """[n_merged] weight of each source."""
    rows: NDArray[np.int32]
    """[n_touched] kept rows that receive something, ascending."""
    own: NDArray[np.float32]
    """[n_touched] weight of the kept row itself; with what it receives it adds up to 1."""
    threshold: float | None
    """tau of this call, for the next one; None as long as nothing was evicted."""


def plan(evicted: NDArray[np.float32], kept: NDArray[np.float32], threshold: float | None = None, beta: float = 0.7) -> Plan:
    """Where the evicted rows of one head go.

    evicted: keys [n_evicted, d], kept: keys [n_kept, d], float32. threshold: that of the call before, None at the first.
    """
    assert evicted.ndim == kept.ndim == 2 and 0 <= beta <= 1
    if not len(evicted) or not len(kept):
        return _nothing(threshold)
    best, nearest = _nearest(_unit(evicted), _unit(kept))
    mean = float(best.mean(dtype=np.float64))
    tau = mean if threshold is None else beta * mean + (1 - beta) * threshold
    source = np.flatnonzero(best >= tau).astype(np.int32)
    rows, target = np.unique(nearest[source], return_inverse=True)
    strength = np.exp(best[source].astype(np.float64))
    total = np.bincount(target, strength, minlength=len(rows)) + np.e
    return Plan(source, target.astype(np.int32), (strength / total[target]).astype(np.float32), rows.astype(np.int32),
                (np.e / total).astype(np.float32), tau)


def merged(p: Plan, evicted: NDArray[np.float32], kept: NDArray[np.float32]) -> NDArray[np.float32]:
    """float32 [n_touched, d]: the kept rows `p.rows` after the merge. The same plan serves the keys and the values of a head."""
    if not len(p.rows):
        return np.zeros((0, kept.shape[1]), np.float32)
    order = np.argsort(p.target, kind="stable")  # what one row receives, side by side
    begin = np.searchsorted(p.target[order], np.arange(len(p.rows)))
    received = np.add.reduceat(p.weight[order, None] * evicted[p.source[order]], begin, axis=0)
    return p.own[:, None] * kept[p.rows] + received


def _nothing(threshold: float | None) -> Plan:
    rows, weights = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return Plan(rows, rows, weights, rows, weights, threshold)


def _unit(x: NDArray[np.float32]) -> NDArray[np.float32]:
    return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), TINY)


def _nearest(a: NDArray[np.float32], b: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """For each row of a [n, d] the largest product with a row of b [m, d], and which (the first of equal ones)."""
    best, where = np.full(len(a), -np.inf, np.float32), np.zeros(len(a), np.int32)
    for i in range(0, len(a), BLOCK_EVICTED):
        here = slice(i, i + BLOCK_EVICTED)
        for j in range(0, len(b), BLOCK_KEPT):
            products = a[here] @ b[j : j + BLOCK_KEPT].T
            column = products.argmax(axis=1)
            value = np.take_along_axis(products, column[:, None], axis=1)[:, 0]
            better = value > best[here]
            best[here][better], where[here][better] = value[better], column[better] + j
    return best, where
