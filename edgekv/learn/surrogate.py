"""Learning KVzap's linear maps: regression of the repeat probe's logarithmic attention on what a
row is (arXiv 2601.07891).

Each text gives `moments` for every KV head, which is all that least squares needs; `solve` takes
their mean over the texts. What differs
between texts as a whole is taken out: a row is compared with the rows of its own text, as when it
is ranked. Different from the paper: the texts are those of the probe profile, some thousand tokens,
so the regression is ridged; it is solved outright, not trained.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgekv.methods.kvzap import Surrogate

FLOOR = np.float32(1e-4)
"""Attention below this counts as this: such rows are not needed, and how little they get is noise.
"""
RIDGE = 0.005
"""Added to the variances (which are 1) of what the map sees."""


def target(attention: NDArray[np.float32]) -> NDArray[np.float32]:
    """What is predicted. attention: the most that a row gets from the probe."""
    return np.log(np.maximum(attention, FLOOR))


def moments(x: NDArray[np.float32], y: NDArray[np.float32]) -> NDArray[np.float32]:
    """float32 [f + 2, f + 1]: covariances of the features x [n, f] and the target y [n] within a
    text, and behind them their means.
    """
    joined = np.concatenate([x, y[:, None]], axis=1)
    mean = joined.mean(axis=0)
    joined -= mean
    return np.concatenate([joined.T @ joined / np.float32(len(x)), mean[None]])


def solve(joined: NDArray[np.floating], pairs: str) -> Surrogate:
    """The maps for all heads. joined: [n_layer, n_head_kv, f + 2, f + 1], the mean of the texts'
    `moments`; zeros for heads that take no part.
    """
    n_layer, n_head_kv, f = *joined.shape[:2], joined.shape[3] - 1
    weights = np.zeros((n_layer, n_head_kv, f + 1))
    for il, k in np.argwhere(joined[:, :, :-1].any(axis=(2, 3))):
        cov, mean = joined[il, k, :-1].astype(np.float64), joined[il, k, -1].astype(np.float64)
        scale = np.sqrt(np.maximum(np.diag(cov)[:f], 1e-12))
        map_ = (
            np.linalg.solve(
                cov[:f, :f] / np.outer(scale, scale) + RIDGE * np.eye(f), cov[:f, f] / scale
            )
            / scale
        )
        weights[il, k] = [*map_, mean[f] - map_ @ mean[:f]]
    return Surrogate(weights.astype(np.float32), pairs)
