"""random: the baseline that any method has to beat. No queries are observed.

The score is drawn from (seed, layer) for every token index and KV head, so it does not change when
more tokens are
read: compressing turn after turn keeps what compressing everything at once would keep.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.methods.base import Observe, masked
from edgekv.methods.layer import LayerStats


class Random:
    name = "random"
    title = "tokens drawn at random, the same ones for the same seed (baseline)"
    paper = ""
    observe = Observe()
    params = None

    def score(self, layer: LayerStats, params: Any = None) -> NDArray[np.float32]:
        rng = np.random.default_rng([layer.seed & 0xFFFFFFFF, layer.il])
        # token first: more only append
        drawn = rng.random((max(layer.n_seen, 1), layer.n_head_kv), dtype=np.float32)
        return masked(np.take_along_axis(drawn.T, np.maximum(layer.pos, 0), axis=1), layer)
