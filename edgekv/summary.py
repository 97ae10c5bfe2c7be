"""summary: a few rows of each KV head stand for all the rows that it lost.

Evicting rows takes the attention that they got from the softmax's sum, and all that is kept counts for more than it should, most of all in
heads that look at everything a little. A summary row gets as much attention as the rows that it stands for
would have got together, and its value is theirs on average. With the lost rows of a head in a few runs of neighbouring tokens, the
key k of a run is a ridge regression over queries q, such as later tokens will ask, of

    q . k = log sum_j exp(q . k_j),    weighted by the run's share of q's attention,

and its value the average of sum_j softmax_j(q . k_j) v_j under the same weights. Queries are drawn from the normal distribution that
Expected Attention takes them for (arXiv 2510.00636): mean and covariance of the prompt's queries before RoPE, turned to later positions.
This is edgekv's own merge, of none of the papers.

A run whose key misses the sum by too much says nothing and is dropped, as without a summary. Summary rows are rows like any others: of the
cache's type, in the place of the least of what was kept, counted in the budget, and judged and summed up again in a later turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from edgekv.errors import BadInput
from edgekv.parallel import each_head

MAX_SHARE = 8
"""A head's summary takes one of this many of its rows, at most."""
LONGEST = 4
"""A key may be this much longer than the longest of the rows that it stands for: in a quantised row more would drown the rest."""
MOST, MOST_KEPT = 512, 128
"""Rows of a run that are looked at (every second one, or third, for a run of more), and of as many runs of what a head keeps."""
JITTER = 1e-3
"""Added to the variances (relative to their mean) of queries: fewer tokens than dimensions leave some without any."""


@dataclass(frozen=True)
class SummaryParams:
    rows: int = 8
    """Rows of each head that sum up."""
    ridge: float = 0.03
    """Added to the second moments of the queries (relative to their mean)."""
    worst: float = 0.7
    """Error of a key, root mean square of the logarithm, above which its run is dropped."""
    least: float = 0.0
    """Share of the queries' attention that a head's lost rows must have had together; with less they are dropped."""
    later: int = 64
    """Later positions that queries are turned to, on average."""
    draws: int = 64
    """Queries that are drawn for each query head."""

    def __post_init__(self) -> None:
        for name, value in (("rows", self.rows), ("later", self.later), ("draws", self.draws)):
            if value < 1:
                raise BadInput(f"{name} {value} is no number of them; give 1 or more")
        if not 0 <= self.least <= 1:
            raise BadInput(f"least {self.least:g} is no share; give a number from 0 to 1, such as 0.05")
        for name, number in (("ridge", self.ridge), ("worst", self.worst)):
            if not 0 < number < np.inf:
                raise BadInput(f"{name} {number:g} is out of range; give a number above 0")


Rows = Callable[[int], tuple[NDArray[np.float32], NDArray[np.float32]]]
Asked = tuple[NDArray[np.float32], NDArray[np.float32]]
"""Mean [n_head, d_k] and covariance [n_head, d_k, d_k] of queries, such that a stored key's logits are its products with them."""


@dataclass(frozen=True, eq=False)
class Summed:
    """What one head keeps, in the order to be stored: `keep` [n] row numbers, of which those from `first` on become `keys` [m, d_k] and
    `values` [m, d_v], m being 0 or more."""

    keep: NDArray[np.int32]
    first: int
    keys: NDArray[np.float32]
    values: NDArray[np.float32]


@dataclass(frozen=True)
class Summary:
    """The merge as a preset names it."""

    params: SummaryParams = SummaryParams()
    name: ClassVar[str] = "summary"
    title: ClassVar[str] = "a few rows stand for all that are evicted"
    paper: ClassVar[str] = ""

    def of_layer(
        self, rows: Rows, asked: Asked, keep: list[NDArray[np.int32]], pos: NDArray[np.int32], n_seen: int, sink: int, window: int,
    ) -> list[Summed]:
        """The heads of a layer, of which `keep` stays. rows: see `edgekv.methods.LayerStats`; asked: the queries, turned to later positions;
        the others as for `edgekv.select.keep`."""
        mean, cov = asked
        group, loss = len(mean) // len(keep), []
        for k, kept in enumerate(keep):
            token = pos[k, kept]
            n_safe = int(((token < sink) | (token >= n_seen - window)).sum())
            n_sink = int((token[:n_safe] < sink).sum())
            places, lost = self._lost(int((pos[k] >= 0).sum()), kept, n_safe, n_sink)
            loss.append((kept, n_safe, places, _look(*rows(k), lost, len(places)) if len(places) else None))

        def summed(k: int) -> Summed:
            kept, n_safe, places, seen = loss[k]
            heads = slice(k * group, (k + 1) * group)
            return self._sum_up(kept, n_safe, places, seen, draw(mean[heads], cov[heads], self.params.draws)) if seen else _as_is(kept)

        return each_head(summed, len(keep), pos.shape[1])

    def of_head(
        self, keys: NDArray[np.float32], values: NDArray[np.float32], queries: NDArray[np.float32], keep: NDArray[np.int32], n_safe: int, n_sink: int,
    ) -> Summed:
        """keys [n, d_k], values [n, d_v]: all rows of a head, as stored; queries [m, d_k]: see `draw`; keep: the rows that stay, as
        `edgekv.select.keep` orders them: n_safe protected ones, of which the first n_sink are sinks."""
        places, lost = self._lost(len(keys), keep, n_safe, n_sink)
        return self._sum_up(keep, n_safe, places, _look(keys, values, lost, len(places)), queries) if len(places) else _as_is(keep)

    def _lost(self, n: int, keep: NDArray[np.int32], n_safe: int, n_sink: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Rows that give their places to the summary, the least worth first, then the window's oldest; and bool [n]: what it stands for."""
        n_rows = min(self.params.rows, len(keep) // MAX_SHARE) if len(keep) < n else 0
        places = np.concatenate([keep[n_safe:][::-1], keep[n_sink:n_safe]])[:n_rows]
        lost = np.ones(n, bool)
        lost[keep] = False
        lost[places] = True
        return places, lost

    def _sum_up(self, keep: NDArray[np.int32], n_safe: int, places: NDArray[np.int32], seen: Seen, queries: NDArray[np.float32]) -> Summed:
        runs, kept = ([(run, *_attend(queries, run)) for run in part] for part in seen)
        total = np.logaddexp.reduce([own for *_, own in runs + kept])
        if np.exp([own - total for *_, own in runs]).sum(axis=0).mean() < self.params.least:
            return _as_is(keep)
        found = [self._run(shares, own, total, queries, run.keys, run.values) for run, shares, own in runs]
        good = [pair for pair in found if pair is not None]
        if not good:
            return _as_is(keep)
        places = places[: len(good)]  # a row whose place was not needed stays; that it is summed up too weighs little
        stay = ~np.isin(keep, places)
        first = int(stay[:n_safe].sum())
        rest = keep[stay]
        k, v = (np.array(x, np.float32) for x in zip(*good, strict=True))
        return Summed(np.concatenate([rest[:first], places, rest[first:]]).astype(np.int32), first, k, v)

    def _run(
        self, shares: NDArray[np.float32], own: NDArray[np.float32], total: NDArray[np.float32], queries: NDArray[np.float32],
        keys: NDArray[np.float32], values: NDArray[np.float32],
    ) -> tuple[NDArray[np.float64], NDArray[np.float32]] | None:
        """The row that stands for the rows `keys`, `values` [n, d]. shares [m, n]: their attention among themselves; own, total [m]: the
        logarithm of the sum of their exponentials, and of all rows'."""
        weight = np.exp(own - total).astype(np.float64) + 1e-6
        weight /= weight.sum()
        q = queries.astype(np.float64)
        moments = q.T @ (q * weight[:, None])
        key = np.linalg.solve(moments + self.params.ridge * np.trace(moments) / len(moments) * np.eye(len(moments)), q.T @ (weight * own))
        error = np.sqrt((weight * (q @ key - own) ** 2).sum())
        if not error <= self.params.worst or np.linalg.norm(key) > LONGEST * np.linalg.norm(keys, axis=1).max():
            return None
        return key, (weight.astype(np.float32) @ shares) @ values


def draw(mean: NDArray[np.float32], cov: NDArray[np.float32], n: int) -> NDArray[np.float32]:
    """float32 [n_head * n, d]: n queries of each head, normally distributed (mean [n_head, d], cov [n_head, d, d]); always the same draws."""
    normal = _normal(n, mean.shape[1])
    d = mean.shape[1]
    spread = cov.astype(np.float64) + (JITTER * np.trace(cov, axis1=1, axis2=2) / d + 1e-12)[:, None, None] * np.eye(d)
    return np.concatenate([m + normal @ np.linalg.cholesky(c).T for m, c in zip(mean, spread, strict=True)]).astype(np.float32)


@lru_cache(maxsize=4)
def _normal(n: int, d: int) -> NDArray[np.float64]:
    return np.random.default_rng(0).standard_normal((n, d))


@dataclass(frozen=True, eq=False)
class Run:
    """Neighbouring rows: keys [n, d_k] and values [n, d_v] of those that are looked at, and how many each stands for."""

    keys: NDArray[np.float32]
    values: NDArray[np.float32]
    weight: np.float32


Seen = tuple[list[Run], list[Run]]
"""What a head loses, in runs, and what it keeps."""


def _look(keys: NDArray[np.float32], values: NDArray[np.float32], lost: NDArray[np.bool_], n_runs: int) -> Seen:
    def runs(rows: NDArray[np.int64], most: int) -> list[Run]:
        parts = [run for run in np.array_split(rows, n_runs) if len(run)]
        few = [run[:: -(-len(run) // most)] for run in parts]
        return [Run(keys[some], values[some], np.float32(len(run) / len(some))) for run, some in zip(parts, few, strict=True)]

    return runs(np.flatnonzero(lost), MOST), runs(np.flatnonzero(~lost), MOST_KEPT)


def _as_is(keep: NDArray[np.int32]) -> Summed:
    return Summed(keep, 0, np.zeros((0, 0), np.float32), np.zeros((0, 0), np.float32))


def _attend(queries: NDArray[np.float32], run: Run) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Attention of the queries to the rows of a run among themselves [m, n], and the logarithm [m] of the sum of the run's exponentials."""
    shares = queries @ run.keys.T
    most = shares.max(axis=1, keepdims=True)
    shares -= most
    np.exp(shares, out=shares)
    total = shares.sum(axis=1, keepdims=True)
    shares /= total
    return shares, (np.log(total * run.weight) + most)[:, 0]
