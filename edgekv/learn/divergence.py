"""How far predictions are from those with the full cache."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def divergence(whole: NDArray[np.float32], got: NDArray[np.float32]) -> NDArray[np.float64]:
    """KL divergence in nats of each token [n]; log-probabilities [n, n_vocab] each."""
    found = [(np.exp(a) * (a - b)).sum(dtype=np.float64) for a, b in zip(whole, got, strict=True)]
    return np.maximum(found, 0.0)


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """logits [n, n_vocab] as log-probabilities."""
    shifted = np.empty_like(logits)
    for row, to in zip(logits, shifted, strict=True):  # a row at a time stays in the cache
        np.subtract(row, row.max(), out=to)
        to -= np.log(np.exp(to).sum())
    return shifted
