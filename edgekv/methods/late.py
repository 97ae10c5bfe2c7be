"""late: the attention that the last few hundred tokens pay to a row, times the length of its value.

SnapKV (arXiv 2404.14469) looks at the last 32 tokens. They are few: what comes next asks for rows
that none of them happened to need, most of all in a model where few layers attend to everything.
Here LATE tokens are looked at. A row that only some of them see is judged by those. What attention
takes from a row is its value, so a row counts by the length of that, too, as in arXiv 2406.12335.
The pool is a mean over neighbours. This mix is edgekv's own.

Values are taken as stored: llama.cpp's rotations of a quantised cache leave lengths alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgekv.methods.base import LATE, Observe
from edgekv.methods.layer import LayerStats
from edgekv.methods.pooling import by_token, check_kernel, mean_pool

AT_ONCE = 1024
"""Rows that are read together."""


@dataclass(frozen=True)
class LateParams:
    kernel: int = 3
    """Width of the pool in tokens, odd."""

    def __post_init__(self) -> None:
        check_kernel(self.kernel)


class Late:
    name = "late"
    title = f"tokens that the last {LATE} tokens attend to, by the length of their values"
    paper = ""
    observe = Observe(("mean",), "late")
    params = LateParams()

    def score(self, layer: LayerStats, params: LateParams | None = None) -> NDArray[np.float32]:
        assert layer.mean is not None, "late observes the mean"
        n_asking = max(min(LATE, layer.n_new), 1)
        seen_by = np.clip(layer.n_seen - layer.pos, 1, n_asking).astype(np.float32)
        taken = layer.mean * (np.float32(n_asking) / seen_by)
        for k, n in enumerate((~layer.absent).sum(axis=1)):
            for i in range(0, n, AT_ONCE):  # of a long prompt a head's values are large
                some = np.arange(i, min(i + AT_ONCE, n), dtype=np.int32)
                taken[k, some] *= np.linalg.norm(layer.some_rows(k, some, "v"), axis=1)
        kernel = (params or self.params).kernel
        return by_token(taken, layer, mean_pool, kernel, empty=0)
