"""Queries of a prompt before RoPE: their mean and covariance, and a form that takes a quarter of
the bytes, because a conversation keeps them for as long as it lives.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

QueryMoments = tuple[NDArray[np.float32], NDArray[np.float32]]
"""Mean [n_head, d_k] and covariance [n_head, d_k, d_k] of queries, such that a stored key's logits
are its products with them, or before RoPE. Of one head: [d_k] and [d_k, d_k].
"""
JITTER = 1e-3
"""Added to the variances (relative to their mean): few tokens leave some dimensions without."""


def root_of(cov: NDArray[np.float32]) -> NDArray[np.float64]:
    """The lower triangle L [d, d] with L L^T the covariance [d, d] with JITTER."""
    wide = cov.astype(np.float64)
    wide.flat[:: len(cov) + 1] += JITTER * np.trace(wide) / len(cov) + 1e-12
    return np.linalg.cholesky(wide).astype(np.float64, copy=False)


@dataclass(frozen=True, eq=False)
class PackedMoments:
    """Mean and covariance of a layer's queries, in a quarter of the bytes.

    mean: float32 [n_head, d]; root: float16 [n_head, d (d + 1) / 2], row by row the lower
    triangle whose product with its transpose is the covariance, over scale: float32 [n_head].
    Whatever numbers stand in it, they are a covariance.
    """

    mean: NDArray[np.float32]
    root: NDArray[np.float16]
    scale: NDArray[np.float32]

    @classmethod
    def of(cls, heads: Iterable[QueryMoments]) -> PackedMoments:
        """heads: one after the other, because a wide head's covariance is a megabyte."""
        means, roots, scales = [], [], []
        for mean, cov in heads:
            exact = root_of(cov)[np.tri(len(mean), dtype=bool)]
            scale = np.abs(exact).max().astype(np.float32)
            exact /= scale
            means.append(mean)
            roots.append(exact.astype(np.float16))
            scales.append(scale)
        return cls(np.stack(means), np.stack(roots), np.array(scales, np.float32))

    @property
    def n_bytes(self) -> int:
        return self.mean.nbytes + self.root.nbytes + self.scale.nbytes

    def of_head(self, head: int) -> QueryMoments:
        d = self.mean.shape[1]
        root = np.zeros((d, d), np.float32)
        root[np.tri(d, dtype=bool)] = self.scale[head] * self.root[head].astype(np.float32)
        return self.mean[head], np.matmul(root, root.T)
