"""streaming: the most recent rows; with the sinks that selection protects this is StreamingLLM.

Paper: Xiao et al., Efficient Streaming Language Models with Attention Sinks, arXiv 2309.17453.
Different from it, keys keep the rotation of their own token index and are not moved to a position
inside the cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.methods.base import Observe, masked
from edgekv.methods.layer import LayerStats


class Streaming:
    name = "streaming"
    title = "the sinks and the most recent tokens (baseline)"
    paper = "StreamingLLM, arXiv 2309.17453"
    observe = Observe()
    params = None

    def score(self, layer: LayerStats, params: Any = None) -> NDArray[np.float32]:
        return masked(layer.pos.astype(np.float32), layer)  # exact up to 2^24 tokens
