"""Footprint: the bytes that a cache takes, from shapes alone, before anything is allocated.

    peak while a prompt is read = old rows + kept rows + one layer in full + hidden states + queries
    and inputs

Read all at once ("whole"), layers stand in full without hidden states, and each goes as it is kept.

See docs/architecture.md for the walk; tests/test_footprint.py compares every number with what the
library allocates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from edgekv.base.parallel import OF_HEAD, PAIR
from edgekv.memory.entries import f16_bytes
from edgekv.memory.limit import SWA_SLACK
from edgekv.methods.base import LATE
from edgekv.methods.centroid_merge import KEPT, CentroidMerge, n_looked_at
from edgekv.methods.probe import LEAD, PIECE
from edgekv.model import rotation

if TYPE_CHECKING:
    from edgekv.methods import Preset
    from edgekv.native import LayerInfo

WHOLE = "whole"
"""No hidden states wait: all layers are read at once."""
HIDDEN_BYTES = {"f32": 4, "f16": 2, "disk": 0, "device": 4, WHOLE: 0}
"""In memory, of one value of a waiting hidden state."""
ALIGNMENT = 32
"""Of tensors in CPU memory (ggml); a GPU's is larger by less than 100 bytes for each tensor."""
INPUT_BYTES = 8
"""Of each token that is read: its number and its position."""
SMALL = 16384
"""Inputs that no node reads, and alignment."""
F16 = 1
FLASH_ROWS = 256
"""On a device attention is over a multiple of so many rows, with masked ones in front of a head's.
"""
N_GRAPHS = 3
"""Graphs that take turns in a long prompt: chunks that nobody observes, those that are, the last
one. Where queries are looked at before RoPE there is one more.
"""
MOMENTS_WORK = 9
"""Of a head's covariance, how many times its bytes are taken while it is packed and drawn from."""


@lru_cache
def row_bytes(kind: int, d: int) -> int:
    """Bytes of d values of a ggml type."""
    import gguf

    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
    return d // block * size


def tensor_bytes(layer: LayerInfo, n_rows: int) -> int:
    """K and V of n_rows rows of a layer, with ALiBi tokens' indices too, as buffers hold them."""
    if not layer.n_head_kv:
        return 0
    rows = max(n_rows, 1)  # a tensor has at least one row
    each = (*(row_bytes(kind, d) for kind, d in layer.stored), index_bytes(layer))
    return sum(-(-rows * n // ALIGNMENT) * ALIGNMENT for n in each)


def index_bytes(layer: LayerInfo) -> int:
    """Of a row's token, which ALiBi needs; 0 for other models."""
    return layer.bytes_row - sum(row_bytes(kind, d) for kind, d in layer.stored)


def kept_bytes(layers: Sequence[LayerInfo], n_tokens: int, n_rows: int) -> int:
    """K and V after n_tokens, with n_rows of each head kept, and of sliding windows all."""
    return sum(
        tensor_bytes(
            x,
            x.n_head_kv
            * (min(n_tokens, x.n_swa + SWA_SLACK) if x.n_swa else min(n_rows, n_tokens)),
        )
        for x in layers
    )


def mask_bytes(layers: Sequence[LayerInfo], n_rows: int, n_ubatch: int) -> int:
    """Masks of a prompt on a device (f16), one for layers that see everything and one for windows:
    every chunk's is a part of it.

    n_rows: the longest head while the prompt is read.
    """
    n = min(n_ubatch, n_rows)
    windows = [x.n_swa for x in layers if x.n_swa]
    widths = [n_rows] * any(x.selects for x in layers) + windows[-1:]
    return sum(2 * n * (width + n + FLASH_ROWS - 1) for width in widths)


def converted_bytes(layers: Sequence[LayerInfo], n_rows: int) -> int:
    """K and V of one layer in f16, which CUDA's flash attention makes of rows of other types while
    a prompt is read; the largest layer's.

    n_rows: the longest head while the prompt is read.
    """
    return max(
        2 * n_rows * x.n_head_kv * sum(d for kind, d in x.stored if kind != F16) for x in layers
    )


def in_full(layers: Sequence[LayerInfo], whole: bool) -> list[LayerInfo]:
    """The layers that stand in full at the same time while a prompt is read: one for all of a
    shape, and all that are read together.
    """
    alone = _n_alone(layers, whole)
    together = [x for x in layers[alone:] if x.n_head_kv]
    by_one = sorted((x for x in layers[:alone] if x.n_head_kv), key=lambda x: x.selects)
    shapes = {_shape(x): x for x in by_one}  # of equal ones the one that needs all rows
    found = [x for shape, x in shapes.items() if shape not in map(_shape, together)] + together
    return found if whole else [_in_halves(x) for x in found]


def _in_halves(layer: LayerInfo) -> LayerInfo:
    """The layer as a prompt that is read layer by layer has it."""
    if not layer.rounds_late:
        return layer
    return replace(layer, type_k=F16, type_v=F16, bytes_row=f16_bytes(layer))


def rows_in_full(
    layer: LayerInfo, what: Extent, n_old: int, n_ubatch: int, on_gpu: bool = False
) -> int:
    """Rows of each head of a layer that stands in full; n_old: of the longest head before. A window
    that is shorter than the prompt slides.
    """
    in_front = on_gpu * (FLASH_ROWS - 1)
    n_rows = n_old + what.n_rows + in_front
    has_pieces = what.n_all > what.n_tokens
    if not layer.n_swa or index_bytes(layer) or has_pieces:
        return n_rows
    window = layer.n_swa + SWA_SLACK
    return min(in_front + min(n_old, window) + what.n_rows, in_front + 2 * window + n_ubatch)


def asking(layers: Sequence[LayerInfo], whole: bool) -> list[LayerInfo]:
    """The layers whose queries are kept at once. One that reads another's has heads like it."""
    alone = _n_alone(layers, whole)
    together = [layers[x.reads] if x.reads >= 0 else x for x in layers[alone:]]
    shapes = {_shape(x): x for x in layers[:alone] if x.selects}
    return [*shapes.values(), *(x for x in together if x.selects)]


def _n_alone(layers: Sequence[LayerInfo], whole: bool) -> int:
    """How many layers are read one by one: those before the first that another one reads."""
    sources = [x.reads for il, x in enumerate(layers) if x.reads not in (-1, il)]
    return 0 if whole else min(sources, default=len(layers))


def _shape(layer: LayerInfo) -> tuple[int, ...]:
    return layer.n_head_kv, layer.n_head, layer.d_k, layer.d_v, layer.type_k, layer.type_v


def column_bytes(layer: LayerInfo, what: Extent, n_rows: int) -> int:
    """What the queries' attention to each row of a layer adds up to, in f32."""
    widths = [2 * layer.n_head if stat == "var" else layer.n_head_kv for stat in what.stats]
    return 4 * n_rows * sum(widths)


def scoring_bytes(
    layers: Sequence[LayerInfo], what: Extent, n_rows: int, whole: bool = False
) -> int:
    """On a device with kernels of ours: the observed queries of a chunk, and the columns that
    they add up to, of the layers that stand in full.

    n_rows: the longest head while the prompt is read.
    """
    if not what.stats:
        return 0
    there = in_full(layers, whole)
    columns = [column_bytes(x, what, n_rows) for x in there]
    queries = sum(4 * x.d_k * x.n_head * what.n_observed for x in asking(layers, whole))
    return queries + (sum(columns) if whole else max(columns))


def statistics_bytes(layers: Sequence[LayerInfo], what: Extent, n_rows: int) -> int:
    """In main memory, where all layers are read at once: of each layer whose rows are chosen the
    columns, and the observed queries' covariance.
    """
    return sum(
        column_bytes(x, what, n_rows) + 4 * (what.n_raw > 0) * _moments(x)
        for x in layers
        if x.selects
    )


def query_bytes(layers: Sequence[LayerInfo], what: Extent, whole: bool) -> int:
    """Of a chunk, the queries that are looked at."""
    return sum(
        4 * x.d_k * x.n_head * (what.n_observed + what.n_raw * (not x.v_in_k))
        for x in asking(layers, whole)
    )


def _moments(x: LayerInfo) -> int:
    """Values of the mean and the covariance of a layer's queries before RoPE. A latent layer's are
    not turned by plain RoPE, and nobody looks at them.
    """
    return 0 if x.v_in_k else x.n_head * x.d_k * (x.d_k + 3) // 2


def _centroids(d_k: int, d_v: int, n_queries: int) -> int:
    """Values that edgekv-centroids.cpp works with for one head. Of each query: three for each of 64
    groups, sums over the values of nine parts and of all, and what is arranged four ways. Each
    thread has blocks of 64 rows with their logits, and what it regresses with.
    """
    shared = n_queries * (3 * 64 + 4 * d_k + 10 * d_v) + 6 * d_k**2
    of_thread = n_queries * (64 + 2 * d_k) + 64 * (2 * d_k + d_v) + 3 * d_k**2
    return shared + OF_HEAD * of_thread


def merge_bytes(layers: Sequence[LayerInfo], n_drawn: int, at_once: bool) -> int:
    """What the centroid merge works with in main memory: the queries' covariance, or afterwards the
    entries that it looks at as f32, those of the heads that are summed up beside each other or
    (at_once) of a layer, and what it works with; and the packed covariances of all layers.
    """
    if not n_drawn:
        return 0
    most = packed = 0
    for x in (x for x in layers if x.selects and not x.v_in_k):
        n, square, asked = n_looked_at(2 * x.d_k), x.d_k**2, x.n_head // x.n_head_kv * n_drawn
        moments = _moments(x) + MOMENTS_WORK * square
        work = _centroids(x.d_k, x.d_v, asked)
        look = min(PAIR, x.n_head_kv) * ((n + KEPT) * (x.d_k + x.d_v) + 2 * n + work)
        waiting = at_once * x.n_head_kv * (n + KEPT) * (x.d_k + x.d_v)
        drawn = x.n_head * n_drawn * x.d_k + 2 * square  # and what turned them, f64
        most = max(most, 4 * (max(moments, look) + waiting + drawn))
        packed += x.n_head * (x.d_k + 5) * x.d_k
    return most + packed


def f16_full_bytes(layers: Sequence[LayerInfo], n_tokens: int) -> int:
    """Bytes of a full f16 cache for that many tokens; of sliding-window layers for their window."""
    return sum(
        f16_bytes(x) * x.n_head_kv * (min(n_tokens, x.n_swa) if x.n_swa else n_tokens)
        for x in layers
    )


@dataclass(frozen=True)
class Extent:
    """How much of a prompt goes through a layer.

    n_tokens: the prompt's; n_all: with all pieces of a probe; n_rows: with its longest piece;
    n_observed: tokens of one chunk whose queries are kept; stats: what the scorer makes of them;
    n_raw: tokens of one chunk whose queries are kept as they are before RoPE.
    """

    n_tokens: int
    n_all: int
    n_rows: int
    n_observed: int
    stats: tuple[str, ...] = ()
    n_raw: int = 0
    n_drawn: int = 0
    """Queries of each head that the centroid merge draws; 0: there is none."""


def n_drawn(preset: Preset) -> int:
    """See `Extent`."""
    return preset.merge.params.draws if isinstance(preset.merge, CentroidMerge) else 0


def extent(preset: Preset, n_tokens: int, window: int, n_ubatch: int) -> Extent:
    """What a method reads of a prompt, a few tokens of the probe's instructions more or less."""
    observe = preset.observe
    n_all = n_rows = n_tokens
    if observe.probe:
        instruction = 12 + LEAD
        n_all = 2 * n_tokens + instruction * -(-n_tokens // PIECE)
        n_rows = n_tokens + min(n_tokens, PIECE) + instruction
    wide = observe.probe or observe.sums or (observe.source == "all" and bool(observe.observed))
    n_observed = (
        min(n_ubatch, n_all)
        if wide
        else min(n_ubatch, n_tokens, {"last": 1, "late": LATE}.get(observe.source, window))
    )
    every = preset.query_step(n_tokens)
    return Extent(
        n_tokens,
        n_all,
        n_rows,
        n_observed if observe.stats else 0,
        observe.stats,
        -(-min(n_ubatch, n_tokens) // every) if observe.queries else 0,
        n_drawn(preset),
    )


@dataclass(frozen=True)
class PromptBytes:
    """Bytes while a prompt is read, by what they are for. on_gpu: inputs are in main memory, and
    count elsewhere, and so do hidden states that do not wait on the device.
    """

    kept: int
    beside_hidden: int
    """The most of them that stands while hidden states are still there; read whole, beyond what
    has gone of `layer` by then."""
    old: int
    layer: int
    """In full: one of each shape; read whole, all."""
    hidden: int
    inputs: int
    masks: int = 0
    """With what attention on a device makes of the layer's rows, and what scoring needs there."""
    on_gpu: bool = False
    waits_there: bool = False
    """Hidden states wait where the layers lie."""
    recurrent: int = 0
    """The copy of recurrent layers' state that a cancelled prompt goes back to, in main memory."""
    way: str = "f32"
    """Where hidden states wait, one of HIDDEN_BYTES."""
    statistics: int = 0
    """Of attention to each row, of all layers, if they are read at once (else one layer's, which
    do not count). No part of what the library reports."""
    merge: int = 0
    """What the centroid merge works with in main memory. `kv_stats` adds it to what the library
    reports."""
    words: int = 0
    """Of `inputs`, what products with quantised weights work with."""

    @property
    def unreported(self) -> int:
        """What `peak` has and the library does not report, because it is no cache."""
        return self.statistics + self.merge

    @property
    def peak(self) -> int:
        """The most that stands at the same time, on the device if the layers are on one."""
        elsewhere = self.on_gpu * (
            self.hidden * (not self.waits_there) + self.inputs + self.recurrent + self.unreported
        )
        reading = self.beside_hidden + self.hidden + self.inputs + self.unreported - elsewhere
        end = 0 if self.way == WHOLE else self.kept  # the layers in full have gone then
        return self.old + self.layer + self.masks + self.recurrent + max(reading, end)


@dataclass(frozen=True)
class Surroundings:
    """What a prompt meets when it is read: the model's width, the context, and the conversation
    before it.

    n_old: rows of the longest head before, old_bytes: of all. recurrent: bytes of recurrent layers'
    state, if the conversation has tokens already. on_gpu: all layers are on a device. even: all
    heads keep as many, so all layers but the last stand beside the hidden states. Else those before
    the last may hold all rows.
    """

    n_embd: int
    n_ubatch: int
    n_old: int = 0
    old_bytes: int = 0
    even: bool = False
    on_gpu: bool = False
    recurrent: int = 0


def prompt_bytes(
    layers: Sequence[LayerInfo],
    what: Extent,
    n_rows: int,
    around: Surroundings,
    hidden: str = "f32",
    words: int = 0,
) -> PromptBytes:
    """What reading a prompt takes.

    n_rows: rows per head that stay, the mean; words: bytes that products with quantised weights
    work with.
    """
    n_old, n_ubatch, on_gpu = around.n_old, around.n_ubatch, around.on_gpu
    whole, n_seen = hidden == WHOLE, n_old + what.n_tokens
    kept = kept_bytes(layers, n_seen, n_rows)
    beside = kept_bytes(layers[:-1], n_seen, n_rows) if around.even else kept
    scratch = in_full(layers, whole)
    n_longest = n_old + what.n_rows
    in_front = on_gpu * (FLASH_ROWS - 1)
    full = [
        tensor_bytes(x, x.n_head_kv * rows_in_full(x, what, n_old, n_ubatch, on_gpu))
        for x in scratch
    ]
    if whole:
        stays = [kept_bytes([x], n_seen, n_rows) for x in scratch] if around.even else full
        beside = min(_most_beside(full, stays), kept)
    queries = query_bytes(layers, what, whole)
    merge = merge_bytes(layers, what.n_drawn, on_gpu) if n_rows < n_seen else 0
    if not on_gpu:  # queries and words are free again when a layer is merged
        merge = max(merge - queries - words, min(merge, 4 * max(map(_moments, layers), default=0)))
    n_graphs = min(N_GRAPHS + (what.n_raw > 0), -(-what.n_all // n_ubatch))
    rows = sum(8 * x.n_head_kv for x in scratch) * min(n_ubatch, what.n_all) * n_graphs
    return PromptBytes(
        kept=kept,
        beside_hidden=beside,
        old=around.old_bytes,
        layer=sum(full),
        # f16 states have an exponent for each token
        hidden=(HIDDEN_BYTES[hidden] * around.n_embd + (hidden == "f16")) * what.n_all,
        inputs=words + queries + rows + INPUT_BYTES * what.n_all + _rotations(layers[0]) + SMALL,
        masks=mask_bytes(layers, n_longest, n_ubatch)
        + converted_bytes(layers, n_longest + in_front)
        + scoring_bytes(layers, what, n_longest, whole)
        if on_gpu
        else 0,
        on_gpu=on_gpu,
        waits_there=hidden == "device",
        recurrent=around.recurrent,
        way=hidden,
        statistics=statistics_bytes(layers, what, n_longest) if whole else 0,
        merge=merge,
        words=words,
    )


def _most_beside(full: Sequence[int], stays: Sequence[int]) -> int:
    """The most by which what stays of the first layers exceeds what has gone of them. A layer in
    full goes when its rows have been copied.
    """
    most = beyond = 0
    for n_full, n_stays in zip(full, stays, strict=True):
        beyond += n_stays
        most = max(most, beyond)
        beyond -= n_full
    return most


def _rotations(x: LayerInfo) -> int:
    """The matrices by which llama.cpp turns heads of a multiple of 64 values before it quantises
    them (f32); latent ones it leaves as they are.
    """
    return sum(4 * n * n for n in rotation.blocks(x))
