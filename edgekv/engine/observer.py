"""The queries whose attention is measured while one prompt is read: those of the query source, and
what score, budget and merge need besides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from edgekv import native
from edgekv.choice.settings import Settings
from edgekv.engine.prompt_centroids import turned
from edgekv.memory.footprint import Extent, n_drawn
from edgekv.methods import probe
from edgekv.methods.base import LATE
from edgekv.methods.layer import LayerStats
from edgekv.methods.query_moments import QueryMoments
from edgekv.model import rotation


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
            begin = {
                "probe": n,
                "last": n - 1,
                "all": 0,
                "window": max(n - settings.window, 0),
                "late": max(n - LATE, 0),
            }[observe.source]
            end = n + sum(map(len, self.pieces))
            self.ranges.append(native.Observer(begin, end, names))
        self._names, self._n, self._stats, self._seed = names, n, observe.stats, settings.seed
        self._sums, self._preset = observe.sums, settings.preset
        if self._sums:
            self.ranges.append(native.Observer(0, n, ("mean",)))
        self._queries = observe.queries
        if self._queries:  # the first tokens of a text are like no others
            begin, every = settings.sink if n > 2 * settings.sink else 0, self._preset.query_step(n)
            self.ranges.append(native.Observer(begin, n, ("queries",), every))

    def extent(self, n_ubatch: int) -> Extent:
        """What goes through a layer."""
        lengths = [min(n_ubatch, one.end - one.begin) for one in self.ranges]
        raw = -(-lengths.pop() // self.ranges[-1].every) if self._queries else 0
        n_observed = n_ubatch if len(lengths) > 1 else max(lengths, default=0)  # share a chunk
        pieces = [len(piece) for piece in self.pieces]
        return Extent(
            self._n,
            self._n + sum(pieces),
            self._n + max(pieces, default=0),
            n_observed,
            self._stats,
            raw,
            n_drawn(self._preset),
        )

    def layer_stats(self, store: native.Store, p: native.Prefill, first: int = 0) -> LayerStats:
        """What a score may know of the layer in work; first: this object's first range in p."""
        n_old = p.n_old()
        n_rows = int(n_old.max(initial=0)) + p.n_tokens
        begin = store.memory().n_past
        pos = np.full((len(n_old), n_rows), -1, np.int32)
        for k, n in enumerate(n_old):
            # as many rows as tokens are all of them, in their order: those of the archive, say
            pos[k, :n] = np.arange(n) if n == begin else store.positions(p.il, k)
            pos[k, n : n + p.n_tokens] = np.arange(begin, begin + p.n_tokens)
        return LayerStats(
            p.il,
            len(store.layers),
            len(n_old),
            n_rows,
            n_old,
            p.n_tokens,
            pos,
            seed=self._seed,
            rows=p.rows,
            part=p.some_rows,
            predicted_scores=p.predicted_scores,
            blocks=rotation.blocks(store.layers[p.il]),
            **self._statistics(p, first),
        )

    def _statistics(self, p: native.Prefill, first: int) -> dict[str, Any]:
        """By the names of LayerStats; first: as above."""
        stats: dict[str, Any] = {name: p.stat(first, name) for name in self._names}
        if self._sums:
            stats["col_sum"] = p.stat(first + len(self._names[:1]), "mean") * np.float32(self._n)
        if self._queries:
            observer = first + len(self.ranges) - 1
            stats["future"] = lambda n: turned(p.queries(observer), p.rotation(n))
        return stats

    def queries(self, p: native.Prefill, head: int) -> QueryMoments:
        """The distribution of a head's queries before RoPE, if the method observes it. Raises
        Unsupported if positions are no plain RoPE.
        """
        assert self._queries
        return p.queries_of(len(self.ranges) - 1, head)

    def drop_queries(self, p: native.Prefill) -> None:
        """Those of the layer in work have been looked at."""
        if self._queries:
            p.drop_queries(len(self.ranges) - 1)
