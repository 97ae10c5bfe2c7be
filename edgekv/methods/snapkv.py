"""snapkv: the attention that the last tokens of the prompt pay to a row, and to its neighbours.

Paper: Li et al., SnapKV: LLM Knows What You are Looking for Before Generation, arXiv 2404.14469, section 4.

Differences: one score per KV head (mean over its query heads) instead of one per query head; the pool runs over the
observing tokens' own rows too (the authors cut them off first; they stay anyway). The pool is taken over token
indices: a row at token t gets the largest mean among the head's rows at tokens t-3 .. t+3. For tokens of one prompt
this is the paper's pool (stride 1, same padding); a row kept from an earlier turn whose neighbours were evicted is
pooled with those that still exist.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgekv.methods.base import LayerStats, Observe, masked


@dataclass(frozen=True)
class SnapKVParams:
    kernel: int = 7
    """Width of the pool in tokens, odd."""

    def __post_init__(self) -> None:
        assert self.kernel > 0 and self.kernel % 2 == 1, "the pool has a middle: kernel is odd"


class SnapKV:
    name = "snapkv"
    title = "rows that the end of the prompt attends to, pooled over neighbours"
    paper = "SnapKV, arXiv 2404.14469"
    observe = Observe(window=True, stats=("mean",))
    params = SnapKVParams()

    def score(self, layer: LayerStats, params: SnapKVParams | None = None) -> NDArray[np.float32]:
        assert layer.mean is not None, "snapkv observes the mean"
        kernel = (params or self.params).kernel
        by_token = np.full((layer.n_head_kv, layer.n_seen), -np.inf, np.float32)
        head, row = np.nonzero(~layer.absent)
        token = layer.pos[head, row]
        by_token[head, token] = layer.mean[head, row]
        return masked(np.take_along_axis(max_pool(by_token, kernel), np.maximum(layer.pos, 0), axis=1), layer)


def max_pool(x: NDArray[np.float32], kernel: int) -> NDArray[np.float32]:
    """Maximum over `kernel` (odd) neighbours along the last axis, stride 1, same length. x is at least 1 long."""
    side = kernel // 2
    out = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(side, side)], constant_values=-np.inf)
    width = 1  # out[i] covers `width` values from i on
    while width < kernel:
        step = min(width, kernel - width)
        out = np.maximum(out[..., :-step], out[..., step:])
        width += step
    return out
