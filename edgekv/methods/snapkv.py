"""snapkv: the attention that the last tokens of the prompt pay to a row, and to its neighbours.

Paper: Li et al., SnapKV: LLM Knows What You are Looking for Before Generation, arXiv 2404.14469,
section 4.

Differences: one score per KV head (mean over its query heads) instead of one per query head; the
pool runs over the observing tokens' own rows too (the authors cut them off first; they stay
anyway). The pool is taken over token
indices: a row at token t gets the largest mean among the head's rows at tokens t-3 .. t+3.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgekv.methods.base import Observe
from edgekv.methods.layer import LayerStats
from edgekv.methods.pooling import by_token, check_kernel, max_pool


@dataclass(frozen=True)
class SnapKVParams:
    kernel: int = 7
    """Width of the pool in tokens, odd."""

    def __post_init__(self) -> None:
        check_kernel(self.kernel)


class SnapKV:
    name = "snapkv"
    title = "tokens that the end of the prompt attends to, pooled over neighbours"
    paper = "SnapKV, arXiv 2404.14469"
    observe = Observe(("mean",))
    params = SnapKVParams()

    def score(self, layer: LayerStats, params: SnapKVParams | None = None) -> NDArray[np.float32]:
        assert layer.mean is not None, "snapkv observes the mean"
        return by_token(layer.mean, layer, max_pool, (params or self.params).kernel, empty=-np.inf)
