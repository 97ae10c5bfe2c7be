"""cake: rows that the end of the prompt attends to steadily, or now and then but strongly.

Paper: Qin et al., CAKE: Cascading and Adaptive KV Cache Eviction with Layer Preferences, ICLR 2025,
section 4.3, eq. 11: I[n] = Mean(A[-w:, n]) + gamma * Var(A[-w:, n]) over the window's queries, then
a pooling layer.

Differences: the paper leaves the pool open; this is the authors' code's, a mean over 5 tokens.
Their code takes the unbiased variance (a factor w/(w-1), 1.03 for 32 queries), and cuts the
window's own columns off before the pool, which changes the two rows next to the window only. The
mean over a KV head's query heads is taken first, which is the same. The window's infinite score is
selection's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgekv.errors import BadInput
from edgekv.methods.base import Observe
from edgekv.methods.layer import LayerStats
from edgekv.methods.pooling import by_token, check_kernel, mean_pool


@dataclass(frozen=True)
class CakeParams:
    gamma: float = 200.0
    """Weight of the variance."""
    kernel: int = 5
    """Width of the pool in tokens, odd."""

    def __post_init__(self) -> None:
        if not 0 <= self.gamma < float("inf"):
            raise BadInput(f"gamma {self.gamma:g} is no weight; give a number, 0 or more")
        check_kernel(self.kernel)


class Cake:
    name = "cake"
    title = "tokens that the end of the prompt attends to steadily or in bursts"
    paper = "CAKE, arXiv 2503.12491"
    # the entropy is for the budget of the same paper
    observe = Observe(("mean", "var", "col_entropy"))
    params = CakeParams()

    def score(self, layer: LayerStats, params: CakeParams | None = None) -> NDArray[np.float32]:
        assert layer.mean is not None and layer.var is not None, "cake observes mean and variance"
        p = params or self.params
        return by_token(
            layer.mean + np.float32(p.gamma) * layer.var, layer, mean_pool, p.kernel, empty=0.0
        )
