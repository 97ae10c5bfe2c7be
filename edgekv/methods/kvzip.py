"""kvzip: rows that are needed to repeat the prompt, whatever will be asked about it.

Paper: Kim et al., KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction, arXiv
2505.23416, section 3: the maximum over the queries of a repeat probe (`edgekv.methods.probe`) and
over a KV head's query heads of the attention that a row gets.

Differences: attention is normalised over the whole prompt and the piece that is being read; the
authors normalise over the part of the prompt that the piece repeats and the piece.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.methods.base import Observe, masked
from edgekv.methods.layer import LayerStats


class KVzip:
    name = "kvzip"
    title = "tokens that repeating the prompt needs; reads the prompt twice"
    paper = "KVzip, arXiv 2505.23416"
    observe = Observe(("max",), "probe")
    params = None

    def score(self, layer: LayerStats, params: Any = None) -> NDArray[np.float32]:
        assert layer.max is not None, "kvzip observes the maximum"
        return masked(layer.max, layer)
