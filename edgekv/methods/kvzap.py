"""kvzap: rows by the attention that the repeat probe would pay to them, predicted from the row
alone.

Paper: Jeblick and Jegou, KVzap: Fast, Adaptive, and Faithful KV Cache Pruning, arXiv 2601.07891:
for each KV head a linear map predicts the logarithm of KVzip's score (arXiv 2505.23416), so that
no text needs to be read twice. The maps (a `Surrogate`) are learned once per model with the probe
profile, see `edgekv.learn.surrogate`; `edgekv.choice.choose` puts them in.

Differences: the map sees the row as it is stored, not the layer's hidden state, so that rows of
earlier turns can be scored again. What
turns with the position does not go into it: of the key only the lengths of the pairs that RoPE
turns, and KeyDiff's score. The target is KVzip's score, the most attention, not weighted by the
value's length. Rows are ranked within the budgets; the paper has one threshold. Half of KeyDiff's
rank is added to the rank of what is predicted (`novelty`): maps from a few thousand tokens misjudge
what they have not seen, and what is unlike the rest is what KeyDiff finds. On the demo model more
of it is better at 0.2 and less at 0.1. Quantised caches are turned back first
(`edgekv.model.rotation`), so one profile serves all cache types.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from edgekv.base.parallel import each_head
from edgekv.errors import BadInput, EdgeKVError
from edgekv.methods.base import Observe
from edgekv.methods.keydiff import key_diversity
from edgekv.methods.layer import LayerStats
from edgekv.model import rotation

PAIRS = ("neighbours", "halves")
"""Which two values of a key RoPE turns together: 2 i and 2 i + 1, or i and i + d_k / 2."""
TINY = np.float32(1e-6)
BLOCK = 4096
"""Rows that are looked at together: what is made of them is as large as they are."""


@dataclass(frozen=True, eq=False)
class Surrogate:
    """A linear map for each KV head. weights: float32 [n_layer, n_head_kv, n_features + 1], the
    last one a constant; pairs: one of PAIRS.
    """

    weights: NDArray[np.float32]
    pairs: str

    def __post_init__(self) -> None:
        assert self.pairs in PAIRS and self.weights.ndim == 3


@dataclass(frozen=True)
class KVzapParams:
    novelty: float = 0.5
    """Weight of KeyDiff's rank beside the prediction's; 0: the latter alone, as in the paper."""

    def __post_init__(self) -> None:
        if not 0 <= self.novelty < np.inf:
            raise BadInput(
                f"novelty {self.novelty:g} is not 0 or more; 1 counts KeyDiff's rank as much as the"
                " map's"
            )


@dataclass(frozen=True)
class KVzap:
    name: ClassVar[str] = "kvzap"
    title: ClassVar[str] = "tokens that repeating the text would need most, as predicted from each"
    paper: ClassVar[str] = "KVzap, arXiv 2601.07891"
    observe: ClassVar[Observe] = Observe()
    params: ClassVar[KVzapParams] = KVzapParams()
    surrogate: Surrogate | None = None
    """The maps of the model at hand; None: not yet looked up."""

    def score(self, layer: LayerStats, params: KVzapParams | None = None) -> NDArray[np.float32]:
        if self.surrogate is None:
            raise EdgeKVError(
                "the score 'kvzap' needs a model's profile: choose the method with the model"
            )
        novelty = np.float32((params or self.params).novelty)
        heads = [self._of_head(layer, k) for k in range(layer.n_head_kv)]
        out = np.full(layer.pos.shape, -np.inf, np.float32)
        for k, scores in enumerate(
            each_head(lambda k: _together(*heads[k], novelty), *layer.pos.shape)
        ):
            out[k, : len(scores)] = scores
        return out

    def _of_head(
        self, layer: LayerStats, k: int
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """[n] each: what is predicted, and KeyDiff's score."""
        assert self.surrogate is not None
        weights, pairs = self.surrogate.weights[layer.il, k], self.surrogate.pairs
        if layer.predicted_scores is not None:
            return layer.predicted_scores(k, weights, pairs == PAIRS[0], layer.blocks)
        assert layer.rows is not None, "this method reads the rows"
        keys, values = layer.rows(k)
        diversity = key_diversity(keys)
        return predicted_scores(keys, values, diversity, layer.blocks, weights, pairs), diversity


def predicted_scores(
    keys: NDArray[np.float32],
    values: NDArray[np.float32],
    diversity: NDArray[np.float32],
    blocks: tuple[int, int],
    weights: NDArray[np.float32],
    pairs: str,
) -> NDArray[np.float32]:
    """[n]: the logarithm of what the probe would pay to the rows of one head; some rows at a time.
    The native library does the same faster.
    """
    out = np.empty(len(keys), np.float32)
    for i in range(0, len(keys), BLOCK):
        rows = slice(i, i + BLOCK)
        plain_k, plain_v = (
            rotation.undo(x[rows], size) for x, size in zip((keys, values), blocks, strict=True)
        )
        out[rows] = features(plain_k, plain_v, diversity[rows], pairs) @ weights[:-1] + weights[-1]
    return out


def _together(
    predicted: NDArray[np.float32], diversity: NDArray[np.float32], novelty: np.float32
) -> NDArray[np.float32]:
    """[n]. With novelty the weighted sum of the ranks (0..1), without it what is predicted."""
    return predicted if novelty == 0 else rank(predicted) + novelty * rank(diversity)


def rank(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """[n]: the share of the values that are lower; NaN counts as the lowest."""
    x = np.where(np.isnan(x), np.float32(-np.inf), x)
    order = np.argsort(x)
    ascending = x[order]
    place = np.arange(len(x), dtype=np.int32)
    place[1:][ascending[1:] == ascending[:-1]] = 0  # equal ones have the place of the first
    out = np.empty(len(x), np.float32)
    out[order] = np.maximum.accumulate(place).astype(np.float32) / np.float32(len(x))
    return out


def n_features(d_k: int, d_v: int) -> int:
    """Length of what `features` says of a row."""
    return d_v + d_k // 2 + 3


def features(
    keys: NDArray[np.float32],
    values: NDArray[np.float32],
    diversity: NDArray[np.float32],
    pairs: str,
) -> NDArray[np.float32]:
    """float32 [n, n_features]: a row's value without its length [d_v], the logarithms of the key's
    pairs [d_k / 2], of the key's and of the value's length, and KeyDiff's score. keys [n, d_k],
    values [n, d_v], diversity [n]: that score.
    """
    half = keys.shape[1] // 2
    first, second = (
        (keys[:, 0 : 2 * half : 2], keys[:, 1 : 2 * half : 2])
        if pairs == "neighbours"
        else (keys[:, :half], keys[:, half : 2 * half])
    )
    k, v = (np.linalg.norm(x, axis=1, keepdims=True) for x in (keys, values))
    return np.concatenate(
        [
            values / np.maximum(v, TINY),
            _log(np.hypot(first, second)),
            _log(k),
            _log(v),
            diversity[:, None],
        ],
        axis=1,
    )


def _log(x: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.log(x + np.float32(1e-3))
