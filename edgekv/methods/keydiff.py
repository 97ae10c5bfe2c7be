"""keydiff: rows whose key points away from the others. Nobody judges the keys.

Paper: Park et al., KeyDiff: Key Similarity-Based KV Cache Eviction, arXiv 2504.15364, section 3: score -cos(k, mean of the normalised
keys of the head).

Differences: the paper evicts while it reads, block by block; here all rows of a finished layer are compared at once. Keys are taken as
stored: rotations leave cosines alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.methods.base import LayerStats, Observe, by_head

TINY = np.float32(1e-12)


class KeyDiff:
    name = "keydiff"
    title = "rows with the most unusual keys"
    paper = "KeyDiff, arXiv 2504.15364"
    observe = Observe()
    params = None

    def score(self, layer: LayerStats, params: Any = None) -> NDArray[np.float32]:
        return by_head(layer, _unlike_the_mean)


def _unlike_the_mean(keys: NDArray[np.float32]) -> NDArray[np.float32]:
    """-cosine of each key [n, d] with the mean direction."""
    unit = keys / np.maximum(np.linalg.norm(keys, axis=1, keepdims=True), TINY)
    mean = unit.mean(axis=0)
    return -(unit @ mean) / max(np.linalg.norm(mean), TINY)
