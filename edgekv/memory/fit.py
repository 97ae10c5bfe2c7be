"""Fit: which contexts fit into how much memory, at which ratio and cache type.

The context is kept first, then the ratio is lowered. A ratio is a share of the full f16 cache's
bytes, so another cache type saves nothing at the same ratio: other types are offered as full
caches, and taken where the model cannot be compressed. Hidden states wait where `auto` puts them,
or in f16 or in a file before the ratio falls, because that costs little. Nothing is ever moved to
another device: what does not fit where it was wanted does not fit.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from edgekv import native
from edgekv.base.defaults import CTX_STEP, MIN_TOKENS, N_UBATCH, SINK, TAIL, WINDOW, whole_ctx
from edgekv.base.sizes import MIB, size_text
from edgekv.errors import BadInput
from edgekv.memory import dense
from edgekv.memory.entries import entries_per_f16
from edgekv.memory.footprint import WHOLE, Surroundings, extent, f16_full_bytes
from edgekv.memory.hidden import AUTO, DEVICE, EXACT, planned
from edgekv.memory.limit import reserve, rows_within
from edgekv.memory.recall_index import bits_for, index_bytes
from edgekv.methods import KEEPS_ALL, Preset
from edgekv.methods.budget import rows_for
from edgekv.model.blueprint import Blueprint, Context
from edgekv.model.facts import cache_types

RATIOS = (1.0, 0.5, 0.3, 0.2, 0.1)
TYPES = ("f16", "q8_0", "q4_0")
PICKED = ("auto", "auto")
"""No types named: f16, and where rows are evicted what `auto` picks."""
HIDDEN = (AUTO, "f16", "disk")
CTX_MIN = 512


@dataclass(frozen=True)
class Wish:
    """What to fit. n_bytes: without the margin; types: (K, V) names, the best first."""

    n_bytes: int
    n_ctx: int
    ratios: Sequence[float] = RATIOS
    types: Sequence[tuple[str, str]] = tuple((t, t) for t in TYPES)
    hidden: Sequence[str] = HIDDEN
    tail: int = TAIL
    window: int = WINDOW
    sink: int = SINK
    min_tokens: int = MIN_TOKENS
    process: int = 0
    """Bytes of the process without model and cache."""
    prefill_memory: int | None = None
    """Bytes that products with weights may work with while a prompt is read; None: any."""
    fast_prefill: bool = False
    """At ratio 1 prompts are read into a store, too."""
    memory: int | None = None
    """Bytes that the cache never exceeds between prompts; None: any."""
    archive: str = "off"
    recall: float | str = 0.0
    """'auto': where the preset of a ratio gains by it."""
    parallel: int = 1
    """Answers of a server under way at once, each of a conversation that fills the context."""


@dataclass(frozen=True)
class Point:
    """One way to run: a context filled by one prompt. All sizes in bytes.

    kv: kept rows, or llama.cpp's whole cache where there is no store; tail: what new tokens may
    take behind them; layer, hidden, inputs, masks: while the prompt is read (masks: with the layer
    as f16, on a GPU); compute: llama.cpp's buffers; process: the rest. peak: the most that stands
    at the same time, on a GPU if the layers are on one: hidden states, inputs and host_weights are
    in main memory then, and no part of it.
    """

    n_ctx: int
    n_kept: int
    ratio: float
    type_k: str
    type_v: str
    hidden: str
    weights: int
    kv: int
    kv_full: int
    tail: int
    layer: int
    hidden_bytes: int
    inputs: int
    compute: int
    process: int
    peak: int
    masks: int = 0
    host_weights: int = 0
    picked: bool = False
    """The types are what `auto` picks (`edgekv.memory.dense`)."""
    chosen: bool = False
    """`hidden` is what `auto` chooses (`edgekv.memory.hidden`)."""
    index: int = 0
    """Of `kv`, by which tokens are recalled: in main memory, and on a GPU no part of the peak."""
    archive: int = 0
    """In a file: no part of the peak."""
    stores: bool = False
    """The cache is a store: rows are evicted, or the prompt is read into one at ratio 1, too."""
    limited: bool = False
    """`ratio` is what the limit for the cache leaves."""
    draft: int = 0
    """The draft model with its cache, at its own peak, or what the model's own heads take."""
    others: int = 0
    """Of the other answers under way: their cache while they wait, which is in main memory on a GPU
    too, and cells of recurrent layers in the context.
    """

    @property
    def is_whole(self) -> bool:
        """Whether all layers are read at once."""
        return self.stores and self.hidden == WHOLE

    def fits(self, n_bytes: int) -> bool:
        return self.peak <= n_bytes

    def command(self, model: str, on_gpu: bool, has_gpu: bool = True, verb: str = "chat") -> str:
        """What to type. has_gpu: the build knows a GPU, so it has to be told where layers go."""
        words = [f"edgekv {verb}", "-m", shlex.quote(model), "-c", str(self.n_ctx)]
        words += ["--kv-ratio", f"{self.ratio:g}"] if self.ratio < 1 and not self.limited else []
        named = not self.picked and (self.ratio < 1 or (self.type_k, self.type_v) != ("f16", "f16"))
        words += ["-ctk", self.type_k, "-ctv", self.type_v] if named else []
        words += ["--kv-fast-prefill"] if self.stores and self.ratio >= 1 else []
        words += ["--kv-hidden", self.hidden] if self.stores and not self.chosen else []
        return " ".join([*words, *(["-ngl", "all" if on_gpu else "0"] if has_gpu else [])])


class Planner:
    """Points of one model. on_gpu: its layers and cache are there, and buffers reserved in full."""

    def __init__(
        self,
        blueprint: Blueprint,
        preset: Preset,
        wish: Wish,
        n_ubatch: int = N_UBATCH,
        on_gpu: bool = False,
        auto: Callable[[float], Preset] | None = None,
        draft: Callable[[int, float], int] | None = None,
    ) -> None:
        """auto: what `auto` runs at a ratio where it picks the cache types too, at 1 where a limit
        for the cache decides; without it `preset`. draft: bytes of what drafts, by context and
        ratio.
        """
        self._draft = draft
        self.auto = cache(auto or (lambda ratio: preset))
        self.dense = PICKED in wish.types and dense.fits(blueprint.shape)
        self.blueprint, self.preset, self.wish = blueprint, preset, wish
        self._n_ubatch, self._on_gpu = n_ubatch, on_gpu
        self.n_ctx = min(wish.n_ctx, whole_ctx(blueprint.n_ctx_train))
        """What is planned: no more than the model was trained with."""
        if all(self._is_refused(ratio) for ratio in wish.ratios):
            raise BadInput(
                "the index of --kv-recall alone takes more than these ratios of a full cache: give"
                " larger --ratios, or leave --kv-recall out"
            )

    def point(self, n_ctx: int, ratio: float, types: tuple[str, str], hidden: str) -> Point:
        """The cost of one way to run. types: names, or PICKED for what `auto` picks; hidden: where
        hidden states wait, AUTO for where `auto` puts them. Raises BadInput if the model cannot
        have these cache types.
        """
        picked = types == PICKED and self.dense and self._evicts(ratio)
        b, stores = self.blueprint, self._stores(ratio)
        if picked:
            types = dense.best(b.shape, self.auto(ratio).types, self._on_gpu)
        elif types == PICKED:
            types = ("f16", "f16")
        kinds = self._check_types(types)
        n_seq_max = self._n_seq_max(stores)
        n_outputs = (native.OUTPUTS if stores else 2048) if self._on_gpu else n_seq_max
        context = b.context(stores, n_ctx, *kinds, n_outputs, n_seq_max)
        host = b.on_host if self._on_gpu else 0
        cost = self._stored if stores else self._full
        found = partial(
            cost,
            context,
            n_ctx=n_ctx,
            ratio=ratio,
            type_k=types[0],
            type_v=types[1],
            weights=b.weights - host,
            compute=context.compute,
            process=self.wish.process,
            draft=self._draft(n_ctx, ratio) if self._draft else 0,
            host_weights=host,
            picked=picked,
            stores=stores,
        )
        if self._on_gpu and hidden == AUTO:  # there where they fit, as the engine does
            there = replace(found(DEVICE), chosen=True)
            return there if there.fits(self.wish.n_bytes) else replace(found(EXACT), chosen=True)
        return found(hidden)

    def _n_seq_max(self, stores: bool) -> int:
        """Of a context as `Llama.write_together` makes it; 1 where answers are written alone."""
        n = self.wish.parallel
        is_alone = n < 2 or self._on_gpu or not stores or not self.blueprint.rows_alike
        return 1 if is_alone else min(n, native.OUTPUTS) + 1

    def _others(self, n_bytes: int, recurrent: int = 0, n_seq_max: int = 1) -> int:
        """Bytes of the other answers under way. Each waits with n_bytes and a recurrent state, and
        the context has a state more for each sequence but the first.
        """
        return (self.wish.parallel - 1) * (n_bytes + recurrent) + (n_seq_max - 1) * recurrent

    def beside(self, n_ctx: int, ratio: float) -> int:
        """Bytes of this model beside another one: a cache of the same share and the first type."""
        share = 1.0 if self.blueprint.why else ratio
        return self.point(n_ctx, share, self._possible_types()[0], AUTO).peak

    def _evicts(self, ratio: float) -> bool:
        """Whether tokens may go, as `Settings.compresses` says."""
        return ratio < 1 or (self.wish.memory is not None and not self.blueprint.why)

    def _stores(self, ratio: float) -> bool:
        """Whether the cache is a store at this ratio, as `Settings.stores` says."""
        return self._evicts(ratio) or (self.wish.fast_prefill and not self.blueprint.why)

    def _full(self, context: Context, hidden: str, **shared: Any) -> Point:
        """llama.cpp's whole cache."""
        others = self._others(context.cache)
        standing = sum(shared[x] for x in ("weights", "compute", "process", "draft"))
        return Point(
            n_kept=shared["n_ctx"],
            hidden=EXACT,
            chosen=True,
            kv=context.cache,
            kv_full=context.cache,
            tail=0,
            layer=0,
            hidden_bytes=0,
            inputs=0,
            others=others,
            peak=standing + context.cache + (not self._on_gpu) * others,
            **shared,
        )

    def _stored(self, context: Context, hidden: str, **shared: Any) -> Point:
        """A prompt that fills the context, and what stays of it in a store."""
        b, w, n_ctx = self.blueprint, self.wish, shared["n_ctx"]
        preset = self.auto(shared["ratio"]) if shared["picked"] else self.preset
        if not self._evicts(shared["ratio"]):
            preset = KEEPS_ALL
        products = b.product_bytes(n_ctx, self._n_ubatch, w.prefill_memory)
        per_f16 = entries_per_f16([x for x in context.layers if x.selects])
        n_rows = rows_for(n_ctx, shared["ratio"], per_f16=per_f16, min_tokens=w.min_tokens)
        index = archive = 0
        recalls = self._recalls(shared["ratio"], preset)
        if (recalls or w.archive != "off") and (shared["ratio"] < 1 or w.memory is not None):
            full = [x for x in context.layers if x.selects]
            archive = f16_full_bytes(full, n_ctx)
            index = index_bytes(full, n_ctx, bits_for(shared["ratio"])) if recalls else 0
        if w.memory is not None:
            most = rows_within(context.layers, w.memory - index, w.tail, w.window, w.sink)
            if most < n_rows:
                ratio = min(float(most / per_f16) / n_ctx, 1.0)
                n_rows, shared = most, {**shared, "ratio": ratio, "limited": True}
        elif index:
            n_rows = max(n_rows - int(-(-index * per_f16 * n_ctx // archive)), 1)
        read = planned(
            hidden,
            context.layers,
            extent(preset, n_ctx, w.window, self._n_ubatch),
            n_rows,
            Surroundings(
                b.n_embd, self._n_ubatch, even=preset.budget.name == "uniform", on_gpu=self._on_gpu
            ),
            n_ctx,
            native.ProductBytes() if self._on_gpu else products,
        )
        tail = reserve(context.layers, w.tail, w.window)
        standing = sum(shared[x] for x in ("weights", "compute", "process", "draft"))
        others = self._others(read.kept + tail + index, context.recurrent, self._n_seq_max(True))
        standing += (not self._on_gpu) * others
        moving = context.recurrent + (not self._on_gpu) * index + max(read.peak, read.kept + tail)
        return Point(
            n_kept=n_rows,
            hidden=read.way,
            chosen=hidden == AUTO,
            kv=read.kept + context.recurrent + index,
            index=index,
            archive=archive,
            kv_full=b.context(False, n_ctx, *self._check_types(("f16", "f16"))).cache,
            tail=tail,
            layer=read.layer,
            hidden_bytes=read.hidden,
            inputs=read.inputs,
            masks=read.masks,
            others=others,
            peak=standing + moving,
            **shared,
        )

    def _check_types(self, types: tuple[str, str]) -> tuple[int, int]:
        """Numbers of the cache types. Raises BadInput if this model cannot have them."""
        shape = self.blueprint.shape
        if shape["v_in_k"] and types[0] != types[1]:
            raise BadInput("this model's V is part of its K; give the same -ctk and -ctv")
        for name, d in zip(types, (shape["d_head_k"], shape["d_head_v"]), strict=True):
            if d % cache_types[name][1]:
                raise BadInput(
                    f"this model's heads of {d} values cannot have a {name} cache; give another"
                    " -ctk and -ctv"
                )
        return cache_types[types[0]][0], cache_types[types[1]][0]

    def ways(self, n_ctx: int, only: tuple[str, str] | None = None) -> Iterator[Point]:
        """What may be tried at one context, what is given up least first; only: of these types."""
        possible = self._possible_types()
        for types in [only] if only else possible:
            compress = types == possible[0] and not self.blueprint.why
            for ratio in self.wish.ratios if compress else [r for r in self.wish.ratios if r >= 1]:
                if self._is_refused(ratio):
                    continue
                for hidden in self.wish.hidden if self._stores(ratio) else (AUTO,):
                    yield self.point(n_ctx, ratio, types, hidden)

    def _recalls(self, ratio: float, preset: Preset) -> bool:
        """Whether tokens are recalled at this ratio, as the engine would decide it."""
        if self.wish.recall != AUTO:
            return bool(self.wish.recall)
        return preset.gains_by_recall and not self._on_gpu and not self._is_all_index(ratio)

    def _is_refused(self, ratio: float) -> bool:
        """Whether a share was named that cannot be recalled at this ratio."""
        return self.wish.recall not in (0, AUTO) and self._is_all_index(ratio)

    def _is_all_index(self, ratio: float) -> bool:
        """Whether the index of what is recalled alone takes that share."""
        if ratio >= 1:
            return False
        layers = self.blueprint.context(True, CTX_MIN, *self._check_types(("f16", "f16"))).layers
        index = index_bytes((x for x in layers if x.selects), 4096, bits_for(ratio))
        return index >= ratio * f16_full_bytes(layers, 4096)

    def _possible_types(self) -> list[tuple[str, str]]:
        """Those that the model can have. Raises BadInput if there is none."""
        found, why = [], None
        for types in self.wish.types:
            try:
                self._check_types(("f16", "f16") if types == PICKED else types)
                found.append(types)
            except BadInput as error:
                why = error
        if not found and why:
            raise why
        return found

    def best(self, n_ctx: int) -> Point | None:
        """The first way that fits this context, None if none does."""
        return next((p for p in self.ways(n_ctx) if p.fits(self.wish.n_bytes)), None)

    def row(self, n_ctx: int) -> list[Point | None]:
        """The best way at this context for each cache type."""
        return [
            next((p for p in self.ways(n_ctx, types) if p.fits(self.wish.n_bytes)), None)
            for types in self._possible_types()
        ]

    def largest(self) -> Point | None:
        """The longest context that fits at all, at most the planned one: the last resort."""
        low, high = 0, self.n_ctx // CTX_STEP
        while low < high:  # a longer context always takes more
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.best(middle * CTX_STEP) else (low, middle - 1)
        return self.best(low * CTX_STEP) if low * CTX_STEP >= CTX_MIN else None

    def contexts(self) -> list[int]:
        """Contexts for a table: powers of two up to twice the wished one or the trained one."""
        top = max(self.n_ctx, min(self.blueprint.n_ctx_train, 2 * self.n_ctx))
        powers = [2**k for k in range(11, 24) if 2**k < top]
        return sorted({*powers, self.n_ctx, top})

    def refusal(self) -> str:
        """Why nothing fits, and what to do."""
        least = min(self.ways(max(CTX_MIN, CTX_STEP)), key=lambda p: p.peak)
        return (
            f"nothing fits into {size_text(self.wish.n_bytes)}: even a context of {least.n_ctx}"
            f" tokens takes {size_text(least.peak)}, of which the weights are"
            f" {size_text(least.weights)}; give more --memory, a smaller --margin, or a smaller"
            " model"
        )

    def margin(self, margin: int) -> int | None:
        """The largest margin, in bytes, with which the wished context fits; None if none does.

        margin: bytes that are left alone now, too many.
        """
        left = self.wish.n_bytes + margin - min(point.peak for point in self.ways(self.n_ctx))
        return left // MIB * MIB if left >= 0 else None
