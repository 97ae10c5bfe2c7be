"""keydiff: rows whose key points away from the others. No queries are observed.

Paper: Park et al., KeyDiff: Key Similarity-Based KV Cache Eviction, arXiv 2504.15364, section 3:
score -cos(k, mean of the normalised keys of the head).

Differences: the paper evicts while it reads, block by block; here all rows of a finished layer are
compared at once. Keys are taken as
stored: rotations leave cosines alone. A pool over neighbouring tokens, which the paper has not, can
be asked for (`kernel`): a fact is several tokens long, and of no use without one of them. The
default, 1, is the paper's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgekv.methods.base import Observe, by_head
from edgekv.methods.layer import LayerStats
from edgekv.methods.pooling import by_token, check_kernel, max_pool

TINY = np.float32(1e-12)


@dataclass(frozen=True)
class KeyDiffParams:
    kernel: int = 1
    """Width of the pool in tokens, odd."""

    def __post_init__(self) -> None:
        check_kernel(self.kernel)


class KeyDiff:
    name = "keydiff"
    title = "tokens with the most unusual keys"
    paper = "KeyDiff, arXiv 2504.15364"
    observe = Observe()
    params = KeyDiffParams()

    def score(self, layer: LayerStats, params: KeyDiffParams | None = None) -> NDArray[np.float32]:
        kernel, scores = (params or self.params).kernel, by_head(layer, key_diversity)
        return by_token(scores, layer, max_pool, kernel, empty=-np.inf) if kernel > 1 else scores


def key_diversity(keys: NDArray[np.float32]) -> NDArray[np.float32]:
    """-cosine of each key [n, d] with the mean direction."""
    unit = keys / np.maximum(np.linalg.norm(keys, axis=1, keepdims=True), TINY)
    mean = unit.mean(axis=0)
    return -(unit @ mean) / max(np.linalg.norm(mean), TINY)
