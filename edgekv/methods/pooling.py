"""pool: a row's statistic joined with its neighbours', by token index.

Neighbours are tokens of the same head, wherever their rows are stored. For tokens of one prompt
this is a pooling layer of stride 1 with the same length; rows of an earlier turn are pooled with
those of their neighbours that still exist.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from edgekv.errors import BadInput
from edgekv.methods.base import masked
from edgekv.methods.layer import LayerStats

Pool = Callable[[NDArray[np.float32], int], NDArray[np.float32]]


def by_token(
    values: NDArray[np.float32], layer: LayerStats, pool: Pool, kernel: int, empty: float
) -> NDArray[np.float32]:
    """Scores [n_head_kv, n_rows]: `pool` over `kernel` tokens around; `empty`: without a row."""
    if (layer.pos == np.arange(layer.n_rows)).all():  # a first turn: a row for each token, in order
        return pool(values.astype(np.float32, copy=False), kernel)
    tokens = np.full((layer.n_head_kv, layer.n_seen), empty, np.float32)
    head, row = np.nonzero(~layer.absent)
    token = layer.pos[head, row]
    tokens[head, token] = values[head, row]
    return masked(np.take_along_axis(pool(tokens, kernel), np.maximum(layer.pos, 0), axis=1), layer)


def max_pool(x: NDArray[np.float32], kernel: int) -> NDArray[np.float32]:
    """Maximum over `kernel` (odd) neighbours along the last, non-empty axis; same length."""
    side = kernel // 2
    out = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(side, side)], constant_values=-np.inf)
    width = 1  # out[i] covers `width` values from i on
    while width < kernel:
        step = min(width, kernel - width)
        out = np.maximum(out[..., :-step], out[..., step:])
        width += step
    return out


def mean_pool(x: NDArray[np.float32], kernel: int) -> NDArray[np.float32]:
    """Sum over `kernel` (odd) neighbours along the last axis, zero beyond it, over `kernel`."""
    side = kernel // 2
    padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(side, side)])
    return np.lib.stride_tricks.sliding_window_view(padded, kernel, axis=-1).mean(
        axis=-1, dtype=np.float32
    )


def check_kernel(kernel: int) -> None:
    """Raises BadInput unless the pool has a middle."""
    if kernel < 1 or kernel % 2 == 0:
        raise BadInput(f"kernel {kernel} has no middle; give an odd number such as 5 or 7")
