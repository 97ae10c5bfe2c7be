"""summary, a centroid merge: a few rows of each KV head stand for all the rows that it lost.

Evicting rows takes the attention that they got from the softmax's sum, and all that is kept counts
for more than it should, most of all in heads that look at everything a little. A summary row gets
as much attention as the rows that it stands for would have got together, and its value is theirs on
average. This is edgekv's own merge, of none of the papers.

The lost rows of a head are put into groups whose keys answer alike: k-means, with two keys as far
apart as their logits are for queries such as later tokens will ask, and values beside them that
count as much. The key k of a group is wanted to be, for such queries q,

    q . k = log sum_j exp(q . k_j),    weighted by the group's share of q's attention.

k is the average of the k_j under that attention, which is the slope of the right side, averaged
too, and what it leaves over, the logarithm of their number above all, by ridge regression. The
value is the average of the v_j under the same attention. Keys miss what they are wanted to be by a
little, and then all that is kept counts for too much or too little. So all values of a head's
summary are moved together, by ridge regression, to where attention over what is kept and the
summary is what it was over all rows. (Fitting values so is also what GRKV, arXiv 2605.31105, and
Attention Matching, arXiv 2602.16284, do, to rows that stay.) Queries are drawn from the normal
distribution that Expected Attention takes them for (arXiv 2510.00636): mean and covariance of the
prompt's queries before RoPE, turned to later positions.

A group whose key misses the sum by too much says nothing and is dropped, as without a summary.
Summary rows are rows like any others: of the cache's type, in the place of the least of what was
kept, counted in the budget, and judged and summed up again in a later turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from edgekv.base.parallel import pairs_of_heads
from edgekv.errors import BadInput
from edgekv.methods.layer import PartReader
from edgekv.methods.query_moments import JITTER, root_of

RECENT_SHARE = 5
"""The tokens that always stay are one in this many of the rows, at most (or the window)."""
LONGEST = 4
"""A key may be this much longer than the longest of the rows that it stands for, and a value than
the longest of what is lost.
"""
LOST, KEPT, MOST_VALUES = 4096, 512, 1 << 21
"""Rows of what a head loses, and of what it keeps, that are looked at where there are more, evenly
spaced; of wide heads no more than take 8 MiB as f32.
"""
ROUNDS = 3
"""Rounds of k-means."""


@dataclass(frozen=True)
class CentroidParams:
    rows: int = 16
    """Rows of each head that sum up."""
    share: int = 4
    """A head's summary takes one of this many of its rows, at most."""
    ridge: float = 0.1
    """Added to the second moments of the queries (relative to their mean)."""
    worst: float = 2.0
    """Error of a key, root mean square of the logarithm, above which its group is dropped."""
    fit: float = 0.1
    """The ridge of the values' regression, relative to the mean of the queries' powers."""
    later: int = 64
    """Later positions that queries are turned to, on average."""
    draws: int = 64
    """Queries that are drawn for each query head."""
    recent: int = 96
    """Last tokens that always stay, if a fifth of the rows at most; --kv-window in any case."""

    def __post_init__(self) -> None:
        for name, value, least in (
            ("rows", self.rows, 1),
            ("share", self.share, 2),
            ("later", self.later, 1),
            ("draws", self.draws, 1),
            ("recent", self.recent, 0),
        ):
            if value < least:
                raise BadInput(f"{name} {value} is no number of them; give {least} or more")
        for name, number in (("ridge", self.ridge), ("worst", self.worst), ("fit", self.fit)):
            if not 0 < number < np.inf:
                raise BadInput(f"{name} {number:g} is out of range; give a number above 0")


@dataclass(frozen=True, eq=False)
class Loss:
    """What one head loses: `lost` [n] row numbers. It keeps `keep`, in the order to be stored, of
    which up to n_places rows from `first` on are to become the summary; they are among the lost
    ones. The least worth is the first of them.
    """

    keep: NDArray[np.int32]
    first: int
    n_places: int
    lost: NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class HeadCentroids:
    """What stands in a head's rows from `first` on: keys [m, d_k] and values [m, d_v], m >= 0."""

    first: int
    keys: NDArray[np.float32]
    values: NDArray[np.float32]


@dataclass(frozen=True)
class CentroidMerge:
    """The merge as a preset names it."""

    params: CentroidParams = CentroidParams()
    name: ClassVar[str] = "summary"
    title: ClassVar[str] = "a few summaries stand for all tokens that are evicted"
    paper: ClassVar[str] = ""

    def window(self, n_rows: int, window: int) -> int:
        """Last tokens that always stay where heads keep n_rows on average: `window`, or more.

        A question at the end of a prompt is longer than the window of methods that look at its
        attention, and a summary of the text, which is like the text's own queries, stands for none
        of it.
        """
        return max(window, min(self.params.recent, n_rows // RECENT_SHARE))

    def losses(
        self,
        keep: list[NDArray[np.int32]],
        pos: NDArray[np.int32],
        n_seen: int,
        sink: int,
        window: int,
    ) -> list[Loss]:
        """Of a layer's heads, of which `keep` stays (as `edgekv.methods.select.keep` orders it)."""
        return [
            self._loss(int((pos[k] >= 0).sum()), kept, pos[k, kept], n_seen, sink, window)
            for k, kept in enumerate(keep)
        ]

    def _loss(
        self,
        n: int,
        keep: NDArray[np.int32],
        token: NDArray[np.int32],
        n_seen: int,
        sink: int,
        window: int,
    ) -> Loss:
        """n: rows of the head; keep: those that stay, of the tokens `token`."""
        n_rows = min(self.params.rows, len(keep) // self.params.share) if len(keep) < n else 0
        n_safe = int(((token < sink) | (token >= n_seen - window)).sum())
        n_sink = int((token[:n_safe] < sink).sum())
        # the least worth, then the window's oldest
        places = np.concatenate([keep[n_safe:][::-1], keep[n_sink:n_safe]])[:n_rows]
        stays = np.zeros(n, bool)
        stays[keep] = True
        stays[places] = False
        first, rest = int(stays[keep[:n_safe]].sum()), keep[stays[keep]]
        lost = np.flatnonzero(~stays).astype(np.int32)
        return Loss(
            np.concatenate([rest[:first], places, rest[first:]]).astype(np.int32),
            first,
            n_rows,
            lost,
        )

    def centroids(
        self,
        losses: list[Loss],
        look: Callable[[int], Look],
        queries: NDArray[np.float32],
        n_threads: int = 1,
    ) -> list[HeadCentroids]:
        """The summaries of a layer's heads, by n_threads threads. look: see `looking`; queries: see
        `draw`, turned to later positions.
        """
        asked = np.split(queries, len(losses))

        def summed(k: int, n_threads: int) -> HeadCentroids:
            loss = losses[k]
            if not loss.n_places:
                return HeadCentroids(loss.first, *np.zeros((2, 0, 0), np.float32))
            keys, values, _ = stand_for(look(k), asked[k], loss.n_places, self.params, n_threads)
            return HeadCentroids(loss.first, keys, values)

        return pairs_of_heads(summed, len(losses), n_threads)


@dataclass(frozen=True, eq=False)
class Look:
    """Rows of a head that are looked at: keys [n, d_k] and values [n, d_v] of what it loses, kept
    ([m, d_k], [m, d_v]) of what it keeps, and how many rows each of them stands for.
    """

    keys: NDArray[np.float32]
    values: NDArray[np.float32]
    each: float
    kept: tuple[NDArray[np.float32], NDArray[np.float32]]
    each_kept: float


def looking(
    rows: PartReader, losses: list[Loss], width: int, at_once: bool
) -> Callable[[int], Look]:
    """What a head's summary is made from, by its number. Rows of a long prompt that are not looked
    at are not fetched either. width: see `n_looked_at`; at_once: all are fetched now, because the
    rows will be gone later.
    """
    if not at_once:
        return lambda k: _look(rows, k, losses[k], width)
    seen = {k: _look(rows, k, loss, width) for k, loss in enumerate(losses) if loss.n_places}
    return seen.pop


def n_looked_at(width: int) -> int:
    """Rows of what a head loses, at most. width: values of a key and of a value together."""
    return min(LOST, MOST_VALUES // width)


def _look(rows: PartReader, head: int, loss: Loss, width: int) -> Look:
    kept = np.sort(
        np.concatenate([loss.keep[: loss.first], loss.keep[loss.first + loss.n_places :]])
    )
    some, some_kept = _spaced(loss.lost, n_looked_at(width)), _spaced(kept, KEPT)
    return Look(
        rows(head, some, "k"),
        rows(head, some, "v"),
        len(loss.lost) / len(some),
        (rows(head, some_kept, "k"), rows(head, some_kept, "v")),
        len(kept) / max(1, len(some_kept)),
    )


def _spaced(rows: NDArray[np.int32], most: int) -> NDArray[np.int32]:
    return rows if len(rows) <= most else rows[np.linspace(0, len(rows) - 1, most).astype(int)]


def stand_for(
    seen: Look, queries: NDArray[np.float32], n: int, p: CentroidParams, n_threads: int = 1
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int32]]:
    """Keys [m, d_k] and values [m, d_v] for up to n groups of the lost rows, and the group of each
    of these. queries [n_queries, d_k]: see `draw`.
    """
    from edgekv.native.centroids import centroids  # methods are chosen without the library

    return centroids(
        seen.keys,
        seen.values,
        seen.kept,
        queries,
        (seen.each, seen.each_kept),
        {
            "n_groups": n,
            "rounds": ROUNDS,
            "jitter": JITTER,
            "ridge": p.ridge,
            "worst": p.worst,
            "longest": LONGEST,
            "fit": p.fit,
            "n_threads": n_threads,
        },
    )


def draw(mean: NDArray[np.float32], cov: NDArray[np.float32], n: int) -> NDArray[np.float32]:
    """float32 [n_head * n, d]: n queries of each head, normally distributed (mean [n_head, d], cov
    [n_head, d, d]); always the same draws.
    """
    normal = _normal(n, mean.shape[1])
    return np.concatenate(
        [m + normal @ root_of(c).T for m, c in zip(mean, cov, strict=True)]
    ).astype(np.float32)


@lru_cache(maxsize=4)
def _normal(n: int, d: int) -> NDArray[np.float64]:
    return np.random.default_rng(0).standard_normal((n, d))
