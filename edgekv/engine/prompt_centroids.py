"""The centroids of a prompt's layers, from the layer in work to the store;
`edgekv.methods.centroid_merge` says what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np
from numpy.typing import NDArray

from edgekv import native
from edgekv.base.parallel import one_thread_for_products
from edgekv.errors import Unsupported
from edgekv.methods.centroid_merge import CentroidMerge, HeadCentroids, draw, looking
from edgekv.methods.layer import LayerStats
from edgekv.methods.query_moments import PackedMoments, QueryMoments

ENOUGH = 256
"""Tokens whose queries tell what later tokens will ask; with fewer, those of an earlier prompt do.
"""


class PromptCentroids:
    """The summary rows of one prompt: made layer by layer, written when all layers are kept.

    Where the rows lie on a device, a layer's summary is made by a thread while the device reads the
    next layer; the processor's own cores have no time to spare while they read. A context manager:
    leaving it waits for that thread.
    """

    def __init__(
        self,
        merge: CentroidMerge | None,
        moments: Mapping[int, PackedMoments],
        sink: int,
        window: int,
        aside: bool,
    ) -> None:
        """moments: by layer, an earlier prompt's queries before RoPE; aside: rows on a device."""
        self._merge, self._sink, self._window = merge, sink, window
        self.moments = dict(moments)
        self._found: dict[int, list[HeadCentroids] | Future[list[HeadCentroids]]] = {}
        self._aside = ThreadPoolExecutor(1, "edgekv-summary") if merge and aside else None

    def __enter__(self) -> PromptCentroids:
        return self

    def __exit__(self, *_: object) -> None:
        if self._aside:
            self._aside.shutdown(cancel_futures=True)

    def add(
        self,
        p: native.Prefill,
        layer: LayerStats,
        keep: list[NDArray[np.int32]],
        queries: Callable[[int], QueryMoments],
        drop_queries: Callable[[], None],
    ) -> list[NDArray[np.int32]]:
        """The rows to keep of the layer in work, in the order to be stored. queries: those of a
        query head of the prompt, before RoPE; drop_queries: they have been looked at.
        """
        if self._merge is None or all(
            len(kept) == n for kept, n in zip(keep, layer.n_old + layer.n_new, strict=True)
        ):
            return keep
        try:
            if layer.n_new >= ENOUGH:
                self.moments[layer.il] = PackedMoments.of(map(queries, range(p.n_head)))
            elif layer.il in self.moments:
                queries = self.moments[layer.il].of_head
            else:
                return keep
            drawn = later_queries(
                map(queries, range(p.n_head)),
                p.rotation(self._merge.params.later),
                self._merge.params.draws,
            )
        except Unsupported:
            # positions that are no plain RoPE: rows are dropped, as without a summary
            self._merge = None
            return keep
        drop_queries()
        losses = self._merge.losses(keep, layer.pos, layer.n_seen, self._sink, self._window)
        self._wait()  # so that rows of one layer at most wait for the thread
        look = looking(layer.some_rows, losses, 2 * drawn.shape[1], at_once=self._aside is not None)
        make = partial(self._merge.centroids, losses, look, drawn, p.n_threads)
        self._found[layer.il] = self._aside.submit(make) if self._aside else make()
        return [head.keep for head in losses]

    def _wait(self) -> None:
        for il, found in self._found.items():
            if isinstance(found, Future):
                self._found[il] = found.result()

    def end(self, store: native.Store) -> None:
        """The prompt is the conversation: rows become what was made, whatever was lost since."""
        self._wait()
        for il, found in self._found.items():
            assert not isinstance(found, Future)
            write(store, il, found)


def write(store: native.Store, il: int, found: list[HeadCentroids]) -> None:
    """Put summary rows into a layer that keeps what they say, or the first rows of that."""
    length = store.length(il)
    for k, head in enumerate(found):
        m = min(len(head.keys), int(length[k]) - head.first)
        if m > 0:
            store.write(
                il,
                k,
                np.arange(head.first, head.first + m, dtype=np.int32),
                head.keys[:m],
                head.values[:m],
            )


def later_queries(
    heads: Iterable[QueryMoments], turn: NDArray[np.float32], n: int
) -> NDArray[np.float32]:
    """See `draw`: n of each head, turned to later positions, head by head."""
    with one_thread_for_products():
        return np.concatenate(
            [draw(*turned((mean[None], cov[None]), turn), n) for mean, cov in heads]
        )


def turned(moments: QueryMoments, turn: NDArray[np.float32]) -> QueryMoments:
    """Queries before RoPE at the positions that `edgekv.native.Prefill.rotation` stands for."""
    mean, cov = moments
    with one_thread_for_products():
        # not @, whose product of float32 is float64 to numpy's types
        return np.matmul(mean, turn.T), np.matmul(np.matmul(turn, cov), turn.T)
