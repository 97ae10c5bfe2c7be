"""One reading of a text serves many methods and ratios.

The text goes through the model once, with every query observed that any of the methods asks for,
and every row is kept. What each method would have kept is then evicted from a copy of that cache.
By Theorem 1 of CAKE (top-k of top-k) the rows are those that compressing while reading keeps; tests
hold the two against each other. Only D2O's merges read the text anew each time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.chat.drafts import MOST
from edgekv.choice.settings import Settings
from edgekv.conversation import state
from edgekv.engine.observer import QueryObserver
from edgekv.engine.prompt_centroids import ENOUGH, write
from edgekv.errors import EdgeKVError, Unsupported
from edgekv.methods import Preset, select
from edgekv.methods.budget import Plan
from edgekv.methods.centroid_merge import CentroidMerge, draw, looking
from edgekv.methods.layer import Future, LayerStats
from edgekv.methods.merge import D2O


class Reading:
    """A text in the cache of `llm` (an edgekv.Llama with a store), and the scores of its rows by
    each preset.

    tokens: the text. presets: what `compress` may be asked for.
    """

    def __init__(self, llm: Any, tokens: Sequence[int], presets: Sequence[Preset]) -> None:
        if llm.engine is None:
            raise EdgeKVError("this model runs uncompressed: there is nothing to compare")
        self._llm, self._engine, self._tokens = llm, llm.engine, list(tokens)
        scored = [p for p in presets if not p.keeps_all and not isinstance(p.merge, D2O)]
        self._scores: dict[str, list[tuple[NDArray[np.float32], LayerStats]]] = {
            p.name: [] for p in scored
        }
        self._unrounded: list[list[tuple[NDArray[Any], NDArray[np.float16]]]] = []
        """Of each layer and head all rows as a prompt has them, before they are rounded: what
        summaries are made from. Halves, but keys of a layer with a basis are whole, and no halves.
        """
        llm.reset()
        self._read(scored)
        self.logits: NDArray[np.float32] = llm.logits().copy()
        """Of the text's last token, for every method: attention within the text is complete."""
        self._state = state.take(llm)

    def compress(self, preset: Preset, settings: Settings) -> None:
        """Make the cache what `preset` leaves of the text under `settings`. The conversation is
        then the text alone.

        A preset that merges as D2O does reads the text again: what it folds depends on how layers
        shrink while they are read.
        """
        if isinstance(preset.merge, D2O) and settings.compresses:
            self._llm.reset()
            self._engine.settings = settings
            self._llm.eval(self._tokens)
            return
        if not state.put(self._llm, self._state):
            raise EdgeKVError("the cache could not be restored")
        if preset.keeps_all or not settings.compresses:
            return
        engine = self._engine
        engine.settings = settings
        plan = engine.plan(0)
        spending = engine.start(plan)
        read, first = self._scores[preset.name], []
        for i, (scores, layer) in enumerate(read):
            counts = spending.update(
                i, select.protect(scores, layer.pos, layer.n_seen, plan.sink, plan.window), layer
            )
            first.append(counts[i, : layer.n_head_kv].copy())
        for i, (scores, layer) in enumerate(read):
            keep = select.keep(scores, first[i], layer.pos, layer.n_seen, plan.sink, plan.window)
            self._evict(i, keep, counts[i], layer, preset, plan)

    def _evict(
        self,
        i: int,
        keep: list[NDArray[np.int32]],
        counts: NDArray[np.int32],
        layer: LayerStats,
        preset: Preset,
        plan: Plan,
    ) -> None:
        """i: the layer's number among those whose rows are chosen; keep: what stayed when it had
        been read, which a summary is made for; counts: how many of each head's in the end.
        """
        store, il, found = self._engine.store, plan.layers[i], []
        if isinstance(preset.merge, CentroidMerge) and layer.future and layer.n_new >= ENOUGH:
            merge = preset.merge
            drawn = draw(*layer.future(merge.params.later), merge.params.draws)
            losses = merge.losses(keep, layer.pos, layer.n_seen, plan.sink, plan.window)

            def rows(head: int, some: NDArray[np.int32], part: str) -> NDArray[np.float32]:
                at = "kv".index(part)
                if self._unrounded:
                    return self._unrounded[i][head][at][some].astype(np.float32)
                return store.rows(il, head, some)[at]

            look = looking(rows, losses, 2 * drawn.shape[1], at_once=False)
            found = merge.centroids(losses, look, drawn)
            keep = [head.keep for head in losses]
        store.evict(il, [kept[:n] for kept, n in zip(keep, counts)])
        write(store, il, found)

    def _read(self, presets: Sequence[Preset]) -> None:
        query_observers = [
            QueryObserver(
                replace(self._llm.settings, preset=p), self._tokens, self._engine.tokenize
            )
            for p in presets
        ]
        observers = [o for x in query_observers for o in x.ranges]
        pieces = next((x.pieces for x in query_observers if x.pieces), [])
        first = np.cumsum([0] + [len(x.ranges) for x in query_observers])
        everything = np.arange(len(self._tokens), dtype=np.int32)
        sums_up = any(isinstance(p.merge, CentroidMerge) for p in presets)
        with self._engine.layers(self._tokens, observers, pieces=pieces) as layers:
            for p in layers:
                for preset, observer, at in zip(presets, query_observers, first, strict=False):
                    layer = observer.layer_stats(self._engine.store, p, int(at))
                    scores = preset.score.score(layer, preset.params)
                    alone = replace(
                        layer, rows=None, predicted_scores=None, future=_later(layer, preset)
                    )
                    self._scores[preset.name].append((scores, alone))
                heads = range(len(p.n_old()))
                info = self._engine.store.layers[p.il]
                if sums_up and info.rounds_late:
                    kind = np.float32 if info.has_basis else np.float16
                    both = map(p.rows, heads)
                    self._unrounded.append(
                        [(k.astype(kind), v.astype(np.float16)) for k, v in both]
                    )
                p.keep([everything for _ in heads])
        self._llm.input_ids[: len(self._tokens)] = self._tokens
        self._llm.n_tokens = len(self._tokens)


def _later(layer: LayerStats, preset: Preset) -> Future | None:
    """What a summary will ask of `layer.future`, which goes with the prompt, if it can."""
    if not isinstance(preset.merge, CentroidMerge) or layer.future is None:
        return None
    try:
        later = layer.future(preset.merge.params.later)
    except Unsupported:
        return None
    return lambda n: later


JUDGED = 256
"""Tokens that `predict` reads at once."""


def predict(llm: Any, tokens: Sequence[int]) -> Iterator[NDArray[np.float32]]:
    """Append tokens without compressing; logits [some, n_vocab] of each of them, in order.

    The tokens are read as a prompt, of which every row is kept: decoding them takes longer
    (docs/results/cost.md).
    """
    for i in range(0, len(tokens), JUDGED):
        part = list(tokens[i : i + JUDGED])
        logits = np.empty((len(part), llm.n_vocab()), np.float32)
        with llm.engine.layers(part, [], logits=logits) as layers:
            for p in layers:
                p.keep([np.arange(n + len(part), dtype=np.int32) for n in p.n_old()])
        llm.input_ids[llm.n_tokens : llm.n_tokens + len(part)] = part
        llm.n_tokens += len(part)
        yield from np.split(logits, range(BLOCK, len(part), BLOCK))


BLOCK = 32
"""Tokens whose logits are looked at together: those of a large vocabulary take a MiB each."""


def written(llm: Any, tokens: Sequence[int]) -> Iterator[NDArray[np.float32]]:
    """Append tokens as if they were written, so that each recalls; logits as of `predict`."""
    for i in range(0, len(tokens), BLOCK):
        block: list[NDArray[np.float32]] = []
        for j in range(i, min(i + BLOCK, len(tokens)), 1 + MOST):
            part = list(tokens[j : min(j + 1 + MOST, i + BLOCK)])
            llm.check(part[0], part[1:])
            block += [llm.logits(n).copy() for n in range(-len(part), 0)]
        yield np.stack(block)
