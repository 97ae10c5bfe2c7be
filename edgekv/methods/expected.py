"""expected: rows that later queries will attend to, with values that carry weight.

Paper: Devoto et al., Expected Attention: KV Cache Compression by Estimating Attention from Future
Queries Distribution, arXiv 2510.00636,
section 3: queries are taken for normally distributed before RoPE; over the next n_future positions
the expected attention of key k is softmax(k . mu + k . C k / 2), mu and C turned by the mean
rotation of these positions; a row is worth (that + epsilon) * ||v||, the attention averaged over
the query heads of a KV head.

Differences: mean and covariance come from all queries of the turn but its first `sink` tokens', not
from calibration data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.methods.base import Observe
from edgekv.methods.layer import LayerStats


@dataclass(frozen=True)
class ExpectedParams:
    """Parameters of Expected Attention.

    n_future: later positions that count; epsilon: added to each row's share of the attention;
    sink: first tokens, which attract so much that the others' shares would vanish beside them; they
    take no part, and get the highest score.
    """

    n_future: int = 512
    epsilon: float = 0.02
    sink: int = 4


class Expected:
    name = "expected"
    title = "tokens that the distribution of queries lets expect attention for"
    paper = "Expected Attention, arXiv 2510.00636"
    observe = Observe(queries=True)
    params = ExpectedParams()

    def score(self, layer: LayerStats, params: Any = None) -> NDArray[np.float32]:
        p: ExpectedParams = params or self.params
        assert layer.rows is not None and layer.future is not None, (
            "expected attention reads the keys and the queries' distribution"
        )
        mean, cov = layer.future(p.n_future)
        group = len(mean) // layer.n_head_kv
        out = np.full(layer.pos.shape, -np.inf, np.float32)
        for k in range(layer.n_head_kv):
            keys, values = layer.rows(k)
            others = layer.pos[k, : len(keys)] >= p.sink
            heads = slice(k * group, (k + 1) * group)
            worth = (attention(keys[others], mean[heads], cov[heads]) + p.epsilon) * np.linalg.norm(
                values[others], axis=1
            )
            out[k, : len(keys)] = worth.max(initial=0)
            out[k, : len(keys)][others] = worth
        return out


def attention(
    keys: NDArray[np.float32], mean: NDArray[np.float32], cov: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Expected share of each key [n, d]: float32 [n], the mean over the query heads (mean [n_head,
    d], cov [n_head, d, d]).
    """
    logits = np.stack(
        [keys @ m + 0.5 * ((keys @ c) * keys).sum(axis=1) for m, c in zip(mean, cov, strict=True)]
    )
    shares = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
    return (shares / shares.sum(axis=1, keepdims=True)).mean(axis=0, dtype=np.float32)
