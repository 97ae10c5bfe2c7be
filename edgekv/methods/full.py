"""full: the baseline that evicts nothing. Every row is worth the same."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.methods.base import Observe, masked
from edgekv.methods.layer import LayerStats


class FullCache:
    name = "full"
    title = "keeps every token (baseline)"
    paper = ""
    observe = Observe()
    params = None

    def score(self, layer: LayerStats, params: Any = None) -> NDArray[np.float32]:
        return masked(np.zeros(layer.pos.shape, np.float32), layer)
