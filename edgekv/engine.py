"""The loop: prompt -> prefill -> score -> budget -> select -> evict, layer by layer.

`Engine` belongs to one llama.cpp context with a ragged store. It knows no text, no sampling and no chat: tokens go in,
the cache is what the method left of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv import budget, methods, native, select
from edgekv.errors import BadInput
from edgekv.methods import LayerStats, Preset


@dataclass
class Settings:
    """What the user asked for. Of ratio, tokens and n_bytes the smallest counts; see `edgekv.budget.rows_for`."""

    ratio: float = 1.0
    tokens: int | None = None
    n_bytes: int | None = None
    table: NDArray[np.int32] | None = None
    """Explicit rows of each head [n_layer, n_head_kv], instead of the above and the preset's budget."""
    preset: Preset = field(default_factory=lambda: methods.get(methods.DEFAULT))
    sink: int = 4
    window: int = 32
    min_tokens: int = 128
    tail: int = 512
    """Tokens that may gather behind the compressed prompt before they are compressed too."""
    hidden: str = "f32"
    seed: int = 0

    @property
    def compresses(self) -> bool:
        wish = self.ratio < 1 or self.tokens is not None or self.n_bytes is not None or self.table is not None
        return wish and not self.preset.keeps_all


class Engine:
    """Reads prompts into the ragged store of one context."""

    def __init__(self, ctx: Any, settings: Settings) -> None:
        store = native.Store.of(ctx)
        assert store is not None, "the context was created with native.next_context(True)"
        self.ctx, self.store, self.settings = ctx, store, settings
        self.progress: Callable[[int, int], None] | None = None
        self.prefill_ms = self.compress_ms = 0.0
        self.by_layer = True
        self._last = 0  # tokens seen when the tail was compressed last

    def prefill(self, tokens: Sequence[int]) -> None:
        """Read `tokens` behind what the store holds and compress all of it to the budget.

        Afterwards llama_get_logits_ith(ctx, -1) has the last token's logits. Raises BadInput if they do not fit the context, Cancelled
        or whatever `progress` raised if it was stopped; the store is then as before.
        """
        s, begin = self.settings, time.perf_counter()
        with native.Prefill(self.ctx, tokens, self._observers(len(tokens)), hidden=s.hidden, progress=self.progress) as p:
            self.by_layer = p.by_layer
            counts = self._counts(len(tokens))
            spent = 0.0
            for il, info in enumerate(self.store.layers):
                p.run(il)
                if info.n_swa:
                    continue  # keeps its window by itself
                start = time.perf_counter()
                layer = self._layer_stats(p, il)
                scores = s.preset.score.score(layer)
                p.keep(select.keep(scores, counts[il, : info.n_head_kv], layer.pos, layer.n_seen, s.sink, s.window))
                spent += time.perf_counter() - start
            p.end()
            self.compress_ms = 1e3 * spent + p.score_ms
        self.prefill_ms = 1e3 * (time.perf_counter() - begin)
        self._last = self.store.memory().n_past

    def bound_tail(self, tokens: Sequence[int], n_more: int) -> None:
        """Compress again if `n_more` tokens would make the tail too long.

        tokens: everything the store has seen. The last `window` tokens are read again, because their queries judge the keys.
        """
        info, n = self.store.memory(), min(self.settings.window, len(tokens))
        if info.n_past + n_more - max(info.boundary, self._last) <= max(self.settings.tail, self.settings.window) or n == 0:
            return
        if native.llama_cpp.llama_memory_seq_rm(native.llama_cpp.llama_get_memory(self.ctx), 0, info.n_past - n, -1):
            self.prefill(tokens[len(tokens) - n :])

    def forget(self) -> None:
        """The conversation was cleared."""
        self._last = 0

    def kept(self) -> NDArray[np.int32]:
        """int32 [n_layer, n_head_kv]: rows of each head now."""
        out = np.zeros((len(self.store.layers), self.store.n_head_kv), np.int32)
        for il, info in enumerate(self.store.layers):
            out[il, : info.n_head_kv] = self.store.length(il)
        return out

    @property
    def full_layers(self) -> list[int]:
        """The layers that attend to everything: what budgets are about."""
        return [il for il, info in enumerate(self.store.layers) if not info.n_swa]

    def bytes_full(self, n_tokens: int) -> int:
        """Bytes that llama.cpp's own cache needs for that many tokens (sliding-window layers: for their window)."""
        return sum(x.bytes_row * x.n_head_kv * (min(n_tokens, x.n_swa) if x.n_swa else n_tokens) for x in self.store.layers)

    def _observers(self, n: int) -> list[tuple[int, int, tuple[str, ...]]]:
        """(first token, end, statistics) of the queries that judge n new tokens: the window, then all of them."""
        observe = self.settings.preset.score.observe
        window = tuple(x for x in observe.stats if x != "col_sum")
        found = [(max(n - self.settings.window, 0), n, window)] if window else []
        return found + ([(0, n, ("mean",))] if "col_sum" in observe.stats else [])

    def _layer_stats(self, p: native.Prefill, il: int) -> LayerStats:
        n_old = p.n_old()
        n_rows = int(n_old.max(initial=0)) + p.n_tokens
        first = self.store.memory().n_past
        pos = np.full((len(n_old), n_rows), -1, np.int32)
        for k, n in enumerate(n_old):
            pos[k, :n] = self.store.positions(il, k)
            pos[k, n : n + p.n_tokens] = np.arange(first, first + p.n_tokens)
        wanted = self.settings.preset.score.observe.stats
        stats = {name: p.stat(0, name) for name in wanted if name != "col_sum"}
        if "col_sum" in wanted:
            stats["col_sum"] = p.stat(len(self._observers(p.n_tokens)) - 1, "mean") * np.float32(p.n_tokens)
        return LayerStats(il, len(self.store.layers), len(n_old), n_rows, n_old, p.n_tokens, pos, seed=self.settings.seed, **stats)

    def _counts(self, n_new: int) -> NDArray[np.int32]:
        """int32 [n_layer, n_head_kv]: rows that each head keeps of what it has and the n_new tokens."""
        s, layers, full = self.settings, self.store.layers, self.full_layers
        have = self.kept() + n_new
        if s.table is not None:
            return np.minimum(budget.table(s.table, *have.shape), have)
        n_heads = sum(layers[il].n_head_kv for il in full)
        if n_heads == 0:
            return have
        row = sum(layers[il].bytes_row * layers[il].n_head_kv for il in full) / n_heads
        n_rows = budget.rows_for(self.store.memory().n_past + n_new, s.ratio, s.tokens, s.n_bytes, bytes_per_row_head=row, n_heads=n_heads,
                                 min_tokens=s.min_tokens)
        limit = have[full].astype(np.int64)
        for i, il in enumerate(full):
            limit[i, layers[il].n_head_kv :] = np.iinfo(np.int32).max  # heads that a layer lacks take nothing from the others
        counts = have.copy()
        counts[full] = budget.allocate(s.preset.budget, n_rows, limit)
        return counts


def settings_from(
    *, kv_ratio: float, kv_budget: Any, kv_budget_mb: float | None, kv_method: str, kv_sink: int, kv_window: int, kv_min_tokens: int,
    kv_hidden: str, kv_tail: int, kv_seed: int,
) -> Settings:
    """Settings from the user's words; raises BadInput for what makes no sense."""
    for name, value, least in (("kv_sink", kv_sink, 0), ("kv_window", kv_window, 1), ("kv_min_tokens", kv_min_tokens, 1), ("kv_tail", kv_tail, 1)):
        if not isinstance(value, (int, np.integer)) or value < least:
            raise BadInput(f"{name} {value} must be a whole number, {least} or more")
    if kv_hidden not in native.HIDDEN:
        raise BadInput(f"kv_hidden '{kv_hidden}' is unknown; choose one of: {', '.join(native.HIDDEN)}")
    is_table = kv_budget is not None and np.ndim(kv_budget) > 0
    if kv_budget is not None and not is_table and kv_budget < 1:
        raise BadInput(f"kv_budget {kv_budget} keeps no row; give the rows per head, such as 1024")
    if kv_budget_mb is not None and not kv_budget_mb > 0:
        raise BadInput(f"kv_budget_mb {kv_budget_mb} is no size; give MiB above 0")
    return Settings(
        ratio=budget.check_ratio(kv_ratio), tokens=None if is_table else kv_budget, table=budget.table(kv_budget) if is_table else None,
        n_bytes=None if kv_budget_mb is None else int(kv_budget_mb * 2**20), preset=methods.get(kv_method), sink=kv_sink, window=kv_window,
        min_tokens=kv_min_tokens, tail=kv_tail, hidden=kv_hidden, seed=kv_seed,
    )
