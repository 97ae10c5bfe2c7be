"""uniform: every KV head of every layer keeps the same number of rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def uniform(n_rows: int, n_layer: int, n_head_kv: int) -> NDArray[np.int32]:
    """int32 [n_layer, n_head_kv], all equal to `n_rows`."""
    assert n_rows >= 0
    return np.full((n_layer, n_head_kv), n_rows, np.int32)
