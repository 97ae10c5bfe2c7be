"""Caches of few bits that keep every token, beside the default: how far answers are from the full
cache's.

As `edgekv-lab recall`, for rivals too: RECIPE:BITS OF KEYS:BITS OF VALUES[+TAIL]. Their rounding
is emulated: once a text was read by llama.cpp's full f16 cache, its rows are rounded by the
published recipe and written back, but for the last TAIL tokens and a tile that is not full. Bytes
are counted as the recipe would store them. A token that follows stays in f16.

turboquant   arXiv 2504.19874, its MSE variant: a row is divided by its norm, rotated (Hadamard with
             random signs), each value rounded to the best levels of a normal distribution; the norm
             in f16, corrected so that the rounded row has it
kvarn        arXiv 2606.03458: tiles of 128 tokens of one head, rotated (Hadamard), divided in turns
             by the deviation of each token and of each channel (16 times, the most even one is
             taken), then rounded between the least and the greatest: of each channel for keys, of
             each token for values; scales in f16
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv import llama_cpp
from edgekv_lab.experiments import recall
from edgekv_lab.experiments.experiment import Options, experiment
from edgekv_lab.experiments.recall import Asker

Rows = NDArray[np.float32]
"""[tokens, values] of one head."""
TILE = 128
CACHES = (
    "q8_0,q4_0,0.2,0.1,turboquant:4:4,turboquant:3:3,turboquant:2:2,kvarn:4:4,kvarn:4:2,kvarn:2:2,"
    "kvarn:3:3+1024,kvarn:2:2+1024"
)


def hadamard(n: int) -> Rows:
    """[n, n] Orthonormal, n a power of two."""
    h = np.ones((1, 1), np.float32)
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return h / np.float32(np.sqrt(n))


def levels(bits: int) -> NDArray[np.float32]:
    """[2**bits] The levels of least squared error for a standard normal distribution."""
    x = np.sort(np.random.default_rng(0).standard_normal(200_000)).astype(np.float32)
    found = np.quantile(x, (np.arange(2**bits) + 0.5) / 2**bits).astype(np.float32)
    for _ in range(100):
        nearest = np.searchsorted((found[1:] + found[:-1]) / 2, x)
        found = np.bincount(nearest, x) / np.bincount(nearest)
    return found.astype(np.float32)


def turboquant(rows: Rows, bits: int, is_key: bool) -> Rows:
    d = rows.shape[1]
    signs = np.random.default_rng(d).choice(np.array([-1, 1], np.float32), d)
    turn = signs[:, None] * hadamard(d)
    norm = np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    turned = rows / norm @ turn * np.float32(np.sqrt(d))
    known = levels(bits)
    rounded = known[np.searchsorted((known[1:] + known[:-1]) / 2, turned)]
    rounded /= np.linalg.norm(rounded, axis=1, keepdims=True)
    return rounded @ turn.T * norm.astype(np.float16).astype(np.float32)


def even(tile: Rows) -> tuple[Rows, Rows, Rows]:
    """The tile divided by (deviations [n, 1] of tokens, [1, d] of channels), and these."""
    n, d = tile.shape
    token, channel = np.ones((n, 1), np.float32), np.ones((1, d), np.float32)
    best, best_by = np.inf, (token, channel)
    for _ in range(16):
        token = token * np.maximum((tile / token / channel).std(axis=1, keepdims=True), 1e-6)
        channel = channel * np.maximum((tile / token / channel).std(axis=0, keepdims=True), 1e-6)
        left = tile / token / channel
        spread = [np.maximum(left.std(axis=axis), 1e-6) for axis in (0, 1)]
        uneven = sum(float(x.max() / x.min()) for x in spread)
        if uneven < best:
            best, best_by = uneven, (token, channel)
    return tile / best_by[0] / best_by[1], *best_by


def kvarn(rows: Rows, bits: int, is_key: bool) -> Rows:
    turn = hadamard(rows.shape[1])
    found = rows.copy()
    for first in range(0, len(rows) - TILE + 1, TILE):
        left, token, channel = even(rows[first : first + TILE] @ turn)
        axis = 0 if is_key else 1
        low, high = left.min(axis=axis, keepdims=True), left.max(axis=axis, keepdims=True)
        step = np.maximum((high - low) / (2**bits - 1), 1e-12)
        rounded = np.round((left - low) / step) * step + low
        found[first : first + TILE] = (rounded * token * channel) @ turn.T
    return found


RECIPES = {"turboquant": turboquant, "kvarn": kvarn}


@dataclass(frozen=True)
class Rounding:
    """What a rival stores, from its name: RECIPE:K:V[+TAIL]."""

    recipe: str
    k: int
    v: int
    tail: int

    @classmethod
    def parse(cls, name: str) -> Rounding:
        what, _, tail = name.partition("+")
        recipe, k, v = what.split(":")
        return cls(recipe, int(k), int(v), int(tail or 0))

    def n_rounded(self, n_tokens: int) -> int:
        n = max(n_tokens - self.tail, 0)
        return n // TILE * TILE if self.recipe == "kvarn" else n

    def rounded(self, rows: Rows, is_key: bool) -> Rows:
        n, bits = self.n_rounded(len(rows)), self.k if is_key else self.v
        done = RECIPES[self.recipe](rows[:n], bits, is_key) if n else rows[:0]
        return np.concatenate([done, rows[n:]])

    def bits(self, d: int, is_key: bool) -> float:
        """Bits of a value, scales among them."""
        bits = self.k if is_key else self.v
        if self.recipe == "turboquant":
            return bits + 16 / d
        # keys: two numbers a channel and one a token; values the other way round
        return bits + (32 / TILE + 16 / d if is_key else 32 / d + 16 / TILE)


class RoundedAsker(Asker):
    """llama.cpp's full f16 cache, whose rows are rounded when a text was read."""

    def __init__(self, llm: Any, rounding: Rounding) -> None:
        super().__init__(llm)
        self.rounding = rounding
        self.share = 1.0
        """Bytes that the recipe would take of the f16 cache's."""

    def read(self, text: Sequence[int]) -> None:
        super().read(text)
        ctx = self.llm.ctx
        data = (ctypes.c_uint8 * llama_cpp.llama_state_seq_get_size(ctx, 0))()
        assert llama_cpp.llama_state_seq_get_data(ctx, data, len(data), 0) == len(data)
        self._round(np.frombuffer(data, np.uint8), len(text))
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(ctx), True)
        assert llama_cpp.llama_state_seq_set_data(ctx, data, len(data), 0) == len(data)

    def n_bytes(self) -> tuple[int, int]:
        full = super().n_bytes()[1]
        return round(full * self.share), full

    def _round(self, data: NDArray[np.uint8], n_tokens: int) -> None:
        """In place. The format is that of edgekv/conversation/whole_state.py; windows stay f16."""
        n_head = llama_cpp.llama_model_n_head_kv(self.llm.model)
        at, n_bits, n_values = 8, 0.0, 0
        while at < len(data):
            n_cells = int(data[at + 4 : at + 8].view("<u4")[0])
            at += 8 + 12 * n_cells  # of each cell its position, sequences (1), sequence
            transposed, n_layers = data[at : at + 8].view("<u4")
            assert not transposed, "flash attention is off"
            at += 8
            for is_key in n_layers * [True] + n_layers * [False]:
                size = int(data[at + 4 : at + 12].view("<u8")[0])
                rows = data[at + 12 : at + 12 + size * n_cells].view("<f2")
                rows = rows.reshape(n_cells, n_head, -1)
                at += 12 + size * n_cells
                n = self.rounding.n_rounded(n_cells) if n_cells == n_tokens else 0
                for head in range(n_head if n else 0):
                    rows[:, head] = self.rounding.rounded(rows[:, head].astype(np.float32), is_key)
                share = n / n_cells
                bits = self.rounding.bits(rows.shape[2], is_key)
                n_bits += rows.size * (share * bits + (1 - share) * 16)
                n_values += rows.size
        self.share = n_bits / (16 * n_values)


def make(o: Options, cache: str) -> Asker:
    if cache.partition(":")[0] not in RECIPES:
        return recall.asker(o, cache)
    return RoundedAsker(recall.asker(o, recall.FULL).llm, Rounding.parse(cache))


@experiment(*recall.asked(CACHES))
def command(o: Options) -> None:
    recall.measure(o, make)
