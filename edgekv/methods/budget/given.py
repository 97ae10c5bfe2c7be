"""table: a budget given row by row."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edgekv.errors import BadInput


def table(
    counts: ArrayLike, n_layer: int | None = None, n_head_kv: int | None = None
) -> NDArray[np.int32]:
    """`counts` as int32 [n_layer, n_head_kv].

    Raises BadInput if they are no whole numbers >= 0 or not of the model's shape (where that is
    given).
    """
    array = np.asarray(counts)
    if array.ndim != 2 or not np.issubdtype(array.dtype, np.number):
        raise BadInput("a budget table has one row of numbers per layer and one number per KV head")
    if n_layer is not None and array.shape != (n_layer, n_head_kv):
        raise BadInput(
            f"the budget table is {array.shape[0]} x {array.shape[1]}, the model needs {n_layer} x"
            f" {n_head_kv} (layers x KV heads)"
        )
    if not ((array >= 0) & (array <= np.iinfo(np.int32).max) & (array % 1 == 0)).all():
        raise BadInput("a budget table holds whole numbers of tokens, 0 or more, never shares")
    return array.astype(np.int32)
