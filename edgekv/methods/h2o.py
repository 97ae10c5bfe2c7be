"""h2o: heavy hitters, the rows that all tokens of the prompt together attend to most.

Paper: Zhang et al., H2O: Heavy-Hitter Oracle for Efficient Generative Inference, arXiv 2306.14048,
section 4: the sum over all queries of the attention that a row gets. D2O's token eviction (arXiv
2406.13035, eq. 6 to 8) uses the same sum.

Differences: one score per KV head (mean over its query heads). The sum is taken once, when the
prompt was read, and not kept up while writing; a later turn's sum is over that turn's tokens. The
recent half that the paper keeps is only the window here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.methods.base import Observe, masked
from edgekv.methods.layer import LayerStats


class H2O:
    name = "h2o"
    title = "tokens that the whole prompt attends to"
    paper = "H2O, arXiv 2306.14048"
    observe = Observe(("col_sum",))
    params = None

    def score(self, layer: LayerStats, params: Any = None) -> NDArray[np.float32]:
        assert layer.col_sum is not None, "h2o observes the column sums"
        return masked(layer.col_sum, layer)
