"""The loop: prompt -> prefill -> score -> budget -> select -> merge -> evict, layer by layer.

`Engine` belongs to one llama.cpp context with a ragged store. It knows no text, no sampling and no
chat: tokens go in, the cache is what the method left of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from ctypes import POINTER
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv import native
from edgekv.base.files import made_folder
from edgekv.base.machine import lies_in_memory
from edgekv.base.stats import Progress, StageClock
from edgekv.choice.settings import Settings
from edgekv.engine.observer import QueryObserver
from edgekv.engine.past import Past
from edgekv.engine.prompt_centroids import PromptCentroids
from edgekv.engine.turn import EngineTurn
from edgekv.errors import BadInput, EdgeKVError, StepFailed, Unsupported
from edgekv.memory.entries import entries_per_f16
from edgekv.memory.footprint import WHOLE, PromptBytes, Surroundings, f16_full_bytes
from edgekv.memory.hidden import AUTO, DEVICE, EXACT, definite, planned, where_offloaded
from edgekv.memory.limit import APPEND_MAX, growth, rows_within
from edgekv.memory.recall_index import bits_for, index_bytes
from edgekv.memory.room import check_prompt
from edgekv.methods import budget, select
from edgekv.methods.budget import Fixed, Plan, Spending
from edgekv.methods.budget.profile import from_shares
from edgekv.methods.centroid_merge import CentroidMerge
from edgekv.methods.merge import D2O, Folding

log = logging.getLogger("edgekv")

MANY = 2**31 - 1
"""Tokens: more than a context has."""

_TOKENS = POINTER(native.llama_cpp.llama_token)


class Engine:
    """Reads prompts into the ragged store of one context."""

    def __init__(
        self, ctx: Any, settings: Settings, tokenize: Callable[[str], list[int]] | None = None
    ) -> None:
        store = native.Store.of(ctx)
        assert store is not None, "the context was created within native.next_context(True)"
        self.ctx, self.store, self.settings, self.tokenize = ctx, store, settings, tokenize
        self.offloaded = False
        """Rows lie in another memory than the CPU's; inputs never do, hidden states may."""
        self.recurs = store.memory().bytes_recurrent > 0
        """Some layers are recurrent."""
        self.can_cut = True
        """No prompt has shown yet that the model's graph cannot be cut into layers."""
        self.archives: tuple[bool, float] = (False, 0.0)
        """Whether conversations that begin have an archive, and the share that is recalled."""
        self._index_bits: int | None = None
        self.turn = self.fresh_turn()
        if (folder := settings.archive_folder) is not None:
            self.begin_archive(folder)
            if lies_in_memory(folder):
                log.warning(
                    "edgekv: the archive takes memory, because %s is a tmpfs: name a folder on a"
                    " disk (--kv-archive)",
                    folder,
                )

    def begin_archive(self, folder: str) -> None:
        """Conversations that begin from now on have an archive, and recall what the settings say.

        Raises Unsupported for a model that cannot, BadInput where there can be no file or the index
        alone is too large.
        """
        index, full = self.index_bytes(4096), self.bytes_full(4096)
        if self.settings.ratio < 1 and index >= self.settings.ratio * full:
            raise BadInput(
                f"the index of kv_recall alone takes {100 * index / full:.1f} % of a full cache:"
                " give a larger kv_ratio, or leave kv_recall out"
            )
        made_folder(Path(folder), "name another folder")
        try:
            self.store.archive(folder, self.settings.recall, self.index_bits)
        except Unsupported:
            raise
        except EdgeKVError as error:
            raise BadInput(f"{error}; name another folder with --kv-archive") from None
        self.archives, self._index_bits = (True, self.settings.recall), self.index_bits

    def prefill(
        self, tokens: Sequence[int], progress: Progress | None = None, recent: bool = False
    ) -> None:
        """Read `tokens` behind what the store holds and compress all of it to the budget.

        recent: they are the end of what the model wrote, not a prompt; then each head's share stays
        what the prompt made it (in CAKE: its number of rows), because a few tokens of an answer say
        little about heads. Afterwards llama_get_logits_ith(ctx, -1) has the last token's logits.
        Raises BadInput if they fit neither the context nor the machine's memory (nothing has been
        allocated then), Cancelled or whatever `progress` raised if it was stopped; the store is
        then as before.
        """
        had_archive, is_empty = self.store.memory().has_archive, not self.kept().any()
        try:
            self._prefill(tokens, progress, recent)
        except EdgeKVError as error:
            if not had_archive or self.store.memory().has_archive:
                raise
            if is_empty:  # memory has nothing to go on with
                native.clear(self.ctx)
                raise StepFailed(f"{error}; the conversation is lost: send it again") from None
            self._prefill(tokens, progress, recent)  # behind what memory has
        why = self.settings.archive_folder and self.store.why_no_archive()
        if why and not self.turn.lost_archive:
            log.warning(
                "edgekv: this conversation has no archive (%s); it goes on with what memory has",
                why,
            )
            self.turn.lost_archive = True

    def _prefill(self, tokens: Sequence[int], progress: Progress | None, recent: bool) -> None:
        """Read the prompt and keep what its plan leaves of it, which is then the conversation."""
        observer, plan = QueryObserver(self.settings, tokens, self.tokenize), self.plan(len(tokens))
        need = None if recent else self._check_room(observer, plan)
        hidden = need.way if need else definite(self.settings.hidden)
        before, peak = self.turn.hidden, self.store.memory().bytes_peak
        with self._start_centroids(plan) as centroids:
            with self.layers(
                tokens,
                observer.ranges,
                pieces=observer.pieces,
                progress=progress,
                hidden=hidden,
                most_work=need.words if need else None,
            ) as layers:
                spending, folding = self.start(plan, recent), self._start_merge()
                self.turn.clock = clock = StageClock()
                kept: NDArray[np.int32] = np.zeros((0, self.store.n_head_kv), np.int32)
                for p in layers:
                    kept = self._compress(p, observer, plan, spending, folding, centroids, kept)
                    clock.ms["observe"], clock.work = p.score_ms, p.work
            self.turn.past.folding = folding
            if not recent:
                shares = self.kept() / plan.n_tokens
                self.turn.past.spread = shares if plan.n_rows < plan.n_tokens else None
            with self.turn.clock("merge"):
                centroids.end(self.store)
        self.turn.past.queries = centroids.moments
        self.turn.past.ratio = min(plan.ratio / float(self.per_f16), 1.0)
        self.turn.past.compressed_at = self.store.memory().n_past
        if need:
            self.turn.excess = self._excess(plan, peak, need.merge)
            self.turn.working = max(self.turn.working, need.merge)
        else:
            self.turn.hidden = before

    def _excess(self, plan: Plan, before: int, merge: int) -> tuple[int, int] | None:
        """See `Turn.excess`; before: the conversation's peak before the prompt; merge: what the
        centroid merge worked with. None for a short prompt, which is kept whole and small anyway.
        """
        peak, full = self.store.memory().bytes_peak + merge, self.bytes_full(plan.n_tokens)
        is_above = peak > max(before, full) and plan.n_tokens > self.settings.min_tokens
        return (peak, full) if is_above else None

    @contextmanager
    def layers(
        self,
        tokens: Sequence[int],
        observers: list[native.Observer],
        *,
        pieces: Sequence[Sequence[int]] = (),
        logits: NDArray[np.float32] | None = None,
        progress: Progress | None = None,
        stays: bool = True,
        hidden: str | None = None,
        most_work: int | None = None,
    ) -> Iterator[Iterator[native.Prefill]]:
        """Read `tokens` behind the conversation, in a `with` block around a loop over layers.

        The loop yields every layer that attends to everything, once it has been read: the Prefill
        has its statistics and entries, and its `keep` must be called before the next layer. Layers
        with a sliding window keep their window by themselves. When the loop has ended, the kept
        entries are the conversation. It is as before if `stays` is False, or if the block is left
        earlier. hidden: where hidden states wait; without it as the settings say, and f32 if they
        leave it open; most_work: where the settings say nothing of it. Other arguments and errors:
        see `native.Prefill`.
        """

        def each_layer(p: native.Prefill) -> Iterator[native.Prefill]:
            for il, info in enumerate(self.store.layers):
                p.run(il)
                if info.selects:
                    yield p
            self.turn.hidden_states = p.hidden()
            if stays:
                p.end()

        hidden = hidden or definite(self.settings.hidden)
        with native.Prefill(
            self.ctx,
            tokens,
            observers,
            pieces=pieces,
            logits=logits,
            hidden=hidden,
            most_work=self.settings.prefill_memory or most_work,
            progress=progress,
        ) as p:
            self.can_cut = self.can_cut and (p.by_layer or hidden == WHOLE)
            self.turn.hidden = self._used(hidden) if p.by_layer else WHOLE
            before, self.turn.reading = self.turn.reading, p
            try:
                yield each_layer(p)
            finally:
                self.turn.reading = before

    def _used(self, hidden: str) -> str:
        """Where hidden states wait that were meant to wait there."""
        there = hidden != DEVICE or native.device_free(self.ctx) > 0
        return hidden if there else EXACT

    @property
    def by_layer(self) -> bool:
        """Whether the last prompt was read layer by layer, or one would be."""
        return self.can_cut and self.turn.hidden != WHOLE

    def _compress(
        self,
        p: native.Prefill,
        observer: QueryObserver,
        plan: Plan,
        spending: Spending,
        folding: Folding | None,
        centroids: PromptCentroids,
        before: NDArray[np.int32],
    ) -> NDArray[np.int32]:
        """score, budget, select, merge, evict for the layer in work; finished layers are cut to
        what the budget leaves them.

        before: int32 [i, n_head_kv], rows that the finished layers hold; returns the same with this
        layer.
        """
        s, i, clock = self.settings, len(before), self.turn.clock
        n_head_kv = self.store.layers[p.il].n_head_kv
        with clock("score"):
            layer = observer.layer_stats(self.store, p)
            scores = s.preset.score.score(layer, s.preset.params)
        with clock("budget"):
            counts = spending.update(
                i, select.protect(scores, layer.pos, layer.n_seen, plan.sink, plan.window), layer
            )
        with clock("select"):
            keep = select.keep(
                scores, counts[i, :n_head_kv], layer.pos, layer.n_seen, plan.sink, plan.window
            )
        for j in np.flatnonzero((counts[:i] < before).any(axis=1)):
            il = plan.layers[j]
            n = counts[j, : self.store.layers[il].n_head_kv]
            with clock("merge"):
                _fold(
                    folding, p, il, before[j, : len(n)], [np.arange(x, dtype=np.int32) for x in n]
                )
            with clock("evict"):
                p.shrink(il, n)
        with clock("merge"):
            _fold(folding, p, p.il, layer.n_old + layer.n_new, keep)
            keep = centroids.add(
                p, layer, keep, partial(observer.queries, p), partial(observer.drop_queries, p)
            )
        with clock("evict"):
            p.keep(keep)  # last, when the others have made room
        return counts

    def _recent_begin(self, info: native.MemoryInfo) -> int:
        """Tokens in front of the recent buffer."""
        return max(info.boundary, min(self.turn.past.compressed_at, info.n_past))

    def is_prompt(self, n_tokens: int) -> bool:
        """Whether so many tokens are read as a prompt, not appended: many are, and with an archive
        all but those that are written one by one.
        """
        if n_tokens > APPEND_MAX:
            return True
        info = self.store.memory()
        return bool(info.went_back or (n_tokens > 1 and info.has_archive))

    def recent_is_full(self, n_more: int, n_beside: int = 0) -> bool:
        """Whether `n_more` tokens would make the recent buffer too long, so that it has to be
        compressed. n_beside: bytes outside the store that count against a limit.
        """
        info, s = self.store.memory(), self.settings
        begin = self._recent_begin(info)
        return (
            s.compresses
            and info.n_past > 0
            and info.n_past + n_more - begin > max(s.tail, s.window)
            and not self._has_room(info.bytes_now + n_beside)
        )

    def n_alike(self) -> int:
        """Tokens that the next step may have so that the recent buffer is compressed and rounded
        behind the same tokens as if each had a step of its own.
        """
        info = self.store.memory()
        if info.has_archive or info.went_back:
            return 1
        return max(min(info.n_alike, self.n_to_append()), 1)

    def n_to_append(self) -> int:
        """Tokens to append before the recent buffer is compressed, or `mark_recent` acts."""
        info, s = self.store.memory(), self.settings
        if not s.compresses or self._has_room(info.bytes_now):
            return MANY
        is_marked = not self.recurs or info.n_mark >= self._marked_at(info)
        most = max(s.tail, s.window) + self._recent_begin(info)
        return (most if is_marked else self._marked_at(info)) - info.n_past

    def _marked_at(self, info: native.MemoryInfo) -> int:
        """Tokens behind which a mark is wanted: a window before the recent buffer is full."""
        s = self.settings
        return self._recent_begin(info) + max(s.tail, s.window) - s.window

    def _has_room(self, n_bytes: int) -> bool:
        """Whether a limit for the cache, of which n_bytes are taken, lets the recent buffer grow.
        Not with another limit, which may be smaller, and not with recurrent layers, whose mark
        would be far back.
        """
        s = self.settings
        others = (s.tokens, s.n_bytes, s.table)
        if s.memory is None or s.ratio < 1 or any(x is not None for x in others) or self.recurs:
            return False
        return n_bytes + growth(self.store.layers) <= s.memory

    def mark_recent(self, n_more: int) -> None:
        """Before `n_more` tokens: copy the state of recurrent layers, if the recent buffer has not
        many tokens to go. `compress_recent` reads the last ones again, and there is no other way
        back.
        """
        info, s = self.store.memory(), self.settings
        if not self.recurs or not s.compresses:
            return
        least = self._marked_at(info)
        if info.n_past + n_more > least and info.n_mark < min(least, info.n_past):
            self.store.mark()

    def compress_recent(self, tokens: NDArray[np.intc]) -> None:
        """Compress the recent buffer.

        tokens: everything the store has seen. The last `window` tokens are read again, because
        their queries are observed; with recurrent layers all since `mark_recent`, once they are as
        many.
        """
        info, n = self.store.memory(), min(self.settings.window, len(tokens))
        if self.recurs:
            if info.n_mark < 0 or info.n_past - info.n_mark < n:
                return
            n = info.n_past - info.n_mark
        if not native.llama_cpp.llama_memory_seq_rm(
            native.llama_cpp.llama_get_memory(self.ctx), 0, info.n_past - n, -1
        ):
            return
        again = tokens[len(tokens) - n :].tolist()
        try:
            self.prefill(again, recent=True)
        except BaseException:
            self._append(again)
            raise

    def _append(self, tokens: list[int]) -> None:
        """Put tokens that `compress_recent` took back behind the store, without compressing."""
        lib = native.llama_cpp
        step = min(lib.llama_n_batch(self.ctx), len(tokens))
        for i in range(0, len(tokens), step):
            part = np.array(tokens[i : i + step], np.int32)  # the batch holds no reference to it
            status = lib.llama_decode(
                self.ctx, lib.llama_batch_get_one(part.ctypes.data_as(_TOKENS), len(part))
            )
            if status != 0:  # they stood there a moment ago: a device that fails goes on failing
                raise EdgeKVError(
                    f"{native.context_error()}; the last {len(tokens)} tokens are lost: reset the"
                    " conversation"
                )

    def forget(self) -> None:
        """The conversation was cleared."""
        self.turn = self.fresh_turn()

    def fresh_turn(self) -> EngineTurn:
        """The turn of an empty conversation."""
        return EngineTurn(Past(ratio=self.settings.ratio))

    def kept(self) -> NDArray[np.int32]:
        """int32 [n_layer, n_head_kv]: rows of each head now."""
        out = np.zeros((len(self.store.layers), self.store.n_head_kv), np.int32)
        for il, info in enumerate(self.store.layers):
            out[il, : info.n_head_kv] = self.store.length(il)
        return out

    def before(self) -> NDArray[np.int32]:
        """int32 [n_layer, n_head_kv]: rows of each head that a prompt is read behind. By the
        archive that are those of all tokens.
        """
        out, info = self.kept(), self.store.memory()
        if info.has_archive:
            for il in self.full_layers:
                out[il, : self.store.layers[il].n_head_kv] = info.n_past
        return out

    @property
    def full_layers(self) -> list[int]:
        """The layers that attend to everything: what budgets are about."""
        return [il for il, info in enumerate(self.store.layers) if info.selects]

    def bytes_full(self, n_tokens: int) -> int:
        """Of a full f16 cache for that many tokens; of sliding-window layers for their window."""
        return f16_full_bytes(self.store.layers, n_tokens)

    @property
    def per_f16(self) -> Fraction:
        """KV entries of this cache's types that take the bytes of one in f16."""
        return entries_per_f16([self.store.layers[il] for il in self.full_layers])

    @property
    def index_bits(self) -> int:
        """Bits of the recall index for each 64 values of a key: by the archive's first ratio."""
        return self._index_bits or bits_for(min(self.settings.ratio, 1.0))

    def index_bytes(self, n_tokens: int) -> int:
        """Bytes of that index; 0 if there is none."""
        layers = (self.store.layers[il] for il in self.full_layers)
        return index_bytes(layers, n_tokens, self.index_bits) if self.settings.recall else 0

    @property
    def least_with_index(self) -> int:
        """Tokens that stay beside an index, however much of the bytes that takes."""
        return self.settings.min_tokens // 2

    def plan(self, n_new: int) -> Plan:
        """What may stay of what the heads hold and n_new tokens more."""
        s, layers, full = self.settings, self.store.layers, self.full_layers
        there = np.array(
            [[k < layers[il].n_head_kv for k in range(self.store.n_head_kv)] for il in full]
        ).reshape(len(full), self.store.n_head_kv)
        have = np.where(there, self.before()[full] + n_new, 0).astype(np.int32)
        n_tokens, n_heads = self.store.memory().n_past + n_new, max(int(there.sum()), 1)
        row = sum(layers[il].bytes_row * layers[il].n_head_kv for il in full) / n_heads
        n_rows = (
            n_tokens
            if s.table is not None or not full
            else budget.rows_for(
                n_tokens,
                s.ratio,
                s.tokens,
                s.n_bytes,
                per_f16=self.per_f16,
                bytes_per_row_head=row,
                n_heads=n_heads,
                min_tokens=s.min_tokens,
            )
        )
        index = self.index_bytes(n_tokens)
        if s.memory is not None:
            n_rows = min(n_rows, rows_within(layers, s.memory - index, s.tail, s.window, s.sink))
        elif s.tokens is None and s.table is None:
            least = min(n_rows, self.least_with_index if index else s.min_tokens)
            n_rows = max(n_rows - int(-(-index // max(row * n_heads, 1))), least)
        merge = s.preset.merge if s.table is None else None
        window = merge.window(n_rows, s.window) if isinstance(merge, CentroidMerge) else s.window
        return Plan(n_rows, have, tuple(full), n_tokens, s.sink, window, n_rows / n_tokens)

    def prompt_bytes(self, observer: QueryObserver, plan: Plan) -> PromptBytes:
        """What a prompt is going to take, on top of what the process has, and by which way."""
        wish = self.settings.hidden
        if not self.can_cut:
            wish = WHOLE
        elif self.offloaded and wish == AUTO:
            there = self._planned(DEVICE, observer, plan, on_gpu=True)
            wish = where_offloaded(there, native.device_free(self.ctx))
        return self._planned(wish, observer, plan)

    def _planned(
        self, wish: str, observer: QueryObserver, plan: Plan, on_gpu: bool = False
    ) -> PromptBytes:
        """What reading takes if hidden states are to wait there; on_gpu: see `Surroundings`."""
        lib, preset, memory = native.llama_cpp, self.settings.preset, self.store.memory()
        even = self.settings.table is None and preset.budget.name == "uniform"
        model, n_ubatch = lib.llama_get_model(self.ctx), lib.llama_n_ubatch(self.ctx)
        what = observer.extent(n_ubatch)
        longest = max(what.n_tokens, what.n_rows - what.n_tokens)  # a probe's pieces stand alone
        products = native.product_bytes(
            model, min(longest, n_ubatch), what.n_all > n_ubatch, self.settings.prefill_memory
        )
        if what.n_tokens < min(longest, n_ubatch):  # the first chunk says what is left for weights
            products = native.ProductBytes(sum(products))
        return planned(
            wish,
            self.store.layers,
            what,
            plan.n_rows,
            Surroundings(
                n_embd=native.hidden_width(model),
                n_ubatch=n_ubatch,
                n_old=int(self.before().max(initial=0)),
                old_bytes=memory.bytes_now,
                even=even,
                on_gpu=on_gpu,
                recurrent=memory.bytes_recurrent * (memory.n_past > 0),
            ),
            plan.n_tokens,
            native.ProductBytes() if self.offloaded else products,
        )

    def _check_room(self, observer: QueryObserver, plan: Plan) -> PromptBytes:
        """What reading the prompt takes. Raises BadInput if the machine has not the memory."""
        need = self.prompt_bytes(observer, plan)
        check_prompt(need, plan.n_tokens, self.offloaded)
        return need

    def _start_merge(self) -> Folding | None:
        """A copy of what the merge remembers: a prompt that is cancelled leaves no trace."""
        merge = self.settings.preset.merge
        if not isinstance(merge, D2O):
            return None
        return deepcopy(self.turn.past.folding) or merge.start()

    def _start_centroids(self, plan: Plan) -> PromptCentroids:
        merge = self.settings.preset.merge
        return PromptCentroids(
            merge if isinstance(merge, CentroidMerge) else None,
            self.turn.past.queries,
            plan.sink,
            plan.window,
            self.offloaded,
        )

    def start(self, plan: Plan, recent: bool = False) -> Spending:
        if not plan.layers:  # all have windows, or no attention: there is nothing to spend
            return Fixed(plan.have)
        if self.settings.table is None:
            spending = self.settings.preset.budget.start(plan)
            spread = self.turn.past.spread
            if recent and spread is not None and not isinstance(spending, Fixed):
                return Fixed(from_shares(spread[list(plan.layers)], plan))
            return spending
        table = budget.table(self.settings.table, len(self.store.layers), self.store.n_head_kv)
        return Fixed(np.minimum(table[list(plan.layers)], plan.have))


def _fold(
    folding: Folding | None,
    p: native.Prefill,
    il: int,
    n_rows: NDArray[np.int32],
    keep: list[NDArray[np.int32]],
) -> None:
    """merge: heads of n_rows [n_head_kv] rows fold what they will lose into the rows `keep`."""
    if folding is None:
        return
    for k, rows in enumerate(keep):
        folding.fold(p, il, k, int(n_rows[k]), rows)
