"""The queries whose attention is measured while one prompt is read: those of the query source, and
what score, budget and merge need besides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv import native
from edgekv.memory.footprint import Extent
from edgekv.methods import probe
from edgekv.methods.centroid_merge import QueryMoments
from edgekv.methods.prompt_centroids import turned
from edgekv.settings import Settings

MANY = 2048
"""Tokens whose queries a summary looks at where there are twice as many or more, evenly spaced."""


class QueryObserver:
    """Whose queries' attention is measured over one prompt: ranges of tokens for the native
    scorer, and which statistic is whose.

    tokenize: text -> tokens, for the probe.
    """

    def __init__(
        self, settings: Settings, tokens: Sequence[int], tokenize: Callable[[str], list[int]] | None
    ) -> None:
        observe, n = settings.preset.observe, len(tokens)
        self.pieces = probe.pieces(tokens, tokenize) if observe.probe else []
        names = observe.observed
        self.ranges: list[native.Observer] = []
        if names:
            begin = {"probe": n, "last": n - 1, "all": 0, "window": max(n - settings.window, 0)}[
                observe.source
            ]
            self.ranges.append((begin, n + sum(map(len, self.pieces)), names))
        self._names, self._n, self._stats = names, n, observe.stats
        self._sums = observe.sums
        if self._sums:
            self.ranges.append((0, n, ("mean",)))
        self._queries = observe.queries
        self.every = [1] * len(self.ranges)
        if self._queries:  # the first tokens of a text are like no others
            self.ranges.append((settings.sink if n > 2 * settings.sink else 0, n, ("queries",)))
            self.every.append(1 if settings.preset.score.observe.queries else max(1, n // MANY))

    def extent(self, n_ubatch: int) -> Extent:
        """What goes through a layer."""
        lengths = [min(n_ubatch, end - begin) for begin, end, _ in self.ranges]
        n_observed = (
            n_ubatch if len(lengths) > 1 and max(lengths) else max(lengths, default=0)
        )  # two ranges may share a chunk
        n_queries = int(self._queries) + int(len(self.ranges) > self._queries)
        pieces = [len(piece) for piece in self.pieces]
        return Extent(
            self._n,
            self._n + sum(pieces),
            self._n + max(pieces, default=0),
            n_observed,
            n_queries,
            self._stats,
        )

    def read(self, p: native.Prefill, first: int = 0) -> dict[str, Any]:
        """The statistics of the layer in work, by the names of LayerStats; first: number of this
        object's first range.
        """
        stats: dict[str, Any] = {name: p.stat(first, name) for name in self._names}
        if self._sums:
            stats["col_sum"] = p.stat(first + len(self._names[:1]), "mean") * np.float32(self._n)
        if self._queries:
            stats["future"] = partial(_future, p, first + len(self.ranges) - 1)
        return stats

    def queries(self, p: native.Prefill) -> QueryMoments:
        """The queries' distribution before RoPE, if the method observes it. Raises Unsupported if
        positions are no plain RoPE.
        """
        assert self._queries
        return p.queries(len(self.ranges) - 1)


def _future(
    p: native.Prefill, observer: int, n: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """See `edgekv.methods.base.Future`."""
    return turned(p.queries(observer), p.rotation(n))
