"""One reading of a text serves many methods and ratios.

The text goes through the model once, with every query observed that any of the methods asks for, and every row is kept. What each
method would have kept is then evicted from a copy of that cache. By Theorem 1 of CAKE (top-k of top-k) the rows are those that
compressing while reading keeps; tests hold the two against each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv import native, select, session
from edgekv.engine import Settings, Watch
from edgekv.errors import EdgeKVError, Unsupported
from edgekv.methods import LayerStats, Preset


class Reading:
    """A text in the cache of `llm` (an edgekv.Llama with a store), and the scores of its rows by each preset.

    tokens: the text. presets: what `compress` may be asked for.
    """

    def __init__(self, llm: Any, tokens: Sequence[int], presets: Sequence[Preset]) -> None:
        if llm._kv is None:
            raise EdgeKVError("this model runs uncompressed: there is nothing to compare")
        for preset in presets:
            if preset.merge is not None:  # what it folds depends on how layers shrink while they are read
                raise Unsupported(f"'{preset.name}' merges rows, which one reading for all methods cannot show; leave the merge out")
        self._llm, self._engine, self._tokens = llm, llm._kv, list(tokens)
        self._scores: dict[str, list[tuple[NDArray[np.float32], LayerStats]]] = {p.name: [] for p in presets if not p.keeps_all}
        llm.reset()
        self._read([p for p in presets if not p.keeps_all])
        self.logits: NDArray[np.float32] = np.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), (llm.n_vocab(),)).copy()
        """Of the text's last token: the same for every method, since attention within the text is complete."""
        self._state = session.state_of(llm)

    def compress(self, preset: Preset, settings: Settings) -> None:
        """Make the cache what `preset` leaves of the text under `settings`. The conversation is then the text alone."""
        if not session.restore(self._llm, self._state, self._tokens):
            raise EdgeKVError("the cache could not be restored")
        if preset.keeps_all or not settings.compresses:
            return
        engine = self._engine
        engine.settings = settings
        plan = engine._plan(0)
        spending = engine._start(plan)
        read = self._scores[preset.name]
        for i, (scores, layer) in enumerate(read):
            counts = spending.update(i, select.protect(scores, layer.pos, layer.n_seen, settings.sink, settings.window), layer)
        for i, (scores, layer) in enumerate(read):
            rows = select.keep(scores, counts[i, : layer.n_head_kv], layer.pos, layer.n_seen, settings.sink, settings.window)
            engine.store.evict(plan.layers[i], rows)

    def _read(self, presets: Sequence[Preset]) -> None:
        watches = [Watch(replace(self._llm._kv_settings, preset=p), self._tokens, self._engine.tokenize) for p in presets]
        observers = [o for w in watches for o in w.observers]
        pieces = next((w.pieces for w in watches if w.pieces), [])
        first = np.cumsum([0] + [len(w.observers) for w in watches])
        with native.Prefill(self._llm._ctx.ctx, self._tokens, observers, pieces=pieces) as p:
            for il, info in enumerate(self._engine.store.layers):
                p.run(il)
                if info.n_swa:
                    continue
                for preset, watch, at in zip(presets, watches, first, strict=False):
                    layer = self._engine._layer_stats(p, watch, int(at))
                    scores = preset.score.score(layer, preset.params)
                    self._scores[preset.name].append((scores, replace(layer, rows=None)))
                p.keep([np.arange(len(self._tokens), dtype=np.int32)] * info.n_head_kv)
            p.end()
        self._llm.input_ids[: len(self._tokens)] = self._tokens
        self._llm.n_tokens = len(self._tokens)


def answer(llm: Any, logits: NDArray[np.float32], n_tokens: int) -> str:
    """Greedy continuation of the conversation in `llm`, whose next token has these logits."""
    out: list[int] = []
    while True:
        token = int(logits.argmax())
        if native.llama_cpp.llama_vocab_is_eog(native.llama_cpp.llama_model_get_vocab(llm._model.model), token) or len(out) == n_tokens:
            return llm.detokenize(out).decode(errors="replace")
        out.append(token)
        logits = feed(llm, [token])


def feed(llm: Any, tokens: Sequence[int]) -> NDArray[np.float32]:
    """Append tokens to the tail without compressing; the last one's logits [n_vocab]."""
    llm._kv.settings = replace(llm._kv.settings, tail=1 << 30)
    for i in range(0, len(tokens), 32):
        llm.eval(list(tokens[i : i + 32]))
    return np.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), (llm.n_vocab(),)).copy()
