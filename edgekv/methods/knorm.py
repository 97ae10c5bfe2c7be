"""knorm: rows whose key is short. No queries are observed.

Paper: Devoto et al., A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression, arXiv
2406.11430, section 3: score -||k||.

Differences: the paper leaves the first two layers whole; here no layer is special. Keys are taken
as stored: rotations leave the norm.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.methods.base import Observe, by_head
from edgekv.methods.layer import LayerStats


class Knorm:
    name = "knorm"
    title = "tokens with the shortest keys"
    paper = "arXiv 2406.11430"
    observe = Observe()
    params = None

    def score(self, layer: LayerStats, params: Any = None) -> NDArray[np.float32]:
        return by_head(layer, lambda keys: -np.sqrt(np.einsum("nd,nd->n", keys, keys)))
