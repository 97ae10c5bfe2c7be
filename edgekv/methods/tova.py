"""tova: the attention that the very last token pays to a row.

Paper: Oren et al., Transformers are Multi-State RNNs, arXiv 2401.06104, section 3.2.

Differences: one score per KV head (mean over its query heads); the paper averages over all heads of
a layer, so that they keep the same tokens. It evicts one row per new token; here the prompt's rows
go at once. Sinks and window stay here, the paper protects nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.methods.base import Observe, masked
from edgekv.methods.layer import LayerStats


class TOVA:
    name = "tova"
    title = "tokens that the last token attends to"
    paper = "TOVA, arXiv 2401.06104"
    observe = Observe(("mean",), "last")
    params = None

    def score(self, layer: LayerStats, params: Any = None) -> NDArray[np.float32]:
        assert layer.mean is not None, "tova observes the mean"
        return masked(layer.mean, layer)
