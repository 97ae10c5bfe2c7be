"""Queries of a prompt before RoPE: their mean and covariance, and a form that takes a quarter of
the bytes, because a conversation keeps them for as long as it lives.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

QueryMoments = tuple[NDArray[np.float32], NDArray[np.float32]]
"""Mean [n_head, d_k] and covariance [n_head, d_k, d_k] of queries, such that a stored key's logits
are its products with them, or before RoPE.
"""
JITTER = 1e-3
"""Added to the variances (relative to their mean) of queries: fewer tokens than dimensions leave
some without any.
"""


def root_of(cov: NDArray[np.float32]) -> NDArray[np.float64]:
    """The lower triangle [d, d] whose product with its transpose is a covariance [d, d] with
    JITTER.
    """
    wide = cov.astype(np.float64)
    wide.flat[:: len(cov) + 1] += JITTER * np.trace(wide) / len(cov) + 1e-12
    return np.linalg.cholesky(wide).astype(np.float64, copy=False)


@dataclass(frozen=True, eq=False)
class PackedMoments:
    """mean: float32 [n_head, d]; root: float16 [n_head, d (d + 1) / 2], row by row the lower
    triangle whose product with its transpose is the covariance, over scale: float32 [n_head].
    Whatever numbers stand in it, they are a covariance.
    """

    mean: NDArray[np.float32]
    root: NDArray[np.float16]
    scale: NDArray[np.float32]

    @classmethod
    def of(cls, moments: QueryMoments) -> PackedMoments:
        mean, cov = moments
        n_head, d = mean.shape
        root = np.empty((n_head, d * (d + 1) // 2), np.float16)
        scale = np.empty(n_head, np.float32)
        lower = np.tri(d, dtype=bool)
        for h in range(n_head):
            exact = root_of(cov[h])[lower]
            scale[h] = np.abs(exact).max()
            root[h] = exact / scale[h]
        return cls(mean, root, scale)

    @property
    def n_bytes(self) -> int:
        return self.mean.nbytes + self.root.nbytes + self.scale.nbytes

    def moments(self) -> QueryMoments:
        n_head, d = self.mean.shape
        cov, lower = np.empty((n_head, d, d), np.float32), np.tri(d, dtype=bool)
        for h in range(n_head):
            root = np.zeros((d, d), np.float32)
            root[lower] = self.scale[h] * self.root[h].astype(np.float32)
            np.matmul(root, root.T, out=cov[h])
        return self.mean, cov
