"""How many rows each KV head of each layer keeps: integers, never a ratio.

`rows_for` turns the user's wish into a mean number of rows per head; a budget (`uniform`, `pyramid`) spreads it over
layers and heads, or a `table` gives it outright; `clip` fits it to the rows that heads really have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edgekv.budget.pyramid import pyramid
from edgekv.budget.rows import check_ratio, rows_for
from edgekv.budget.table import table
from edgekv.budget.uniform import uniform

if TYPE_CHECKING:
    from edgekv.methods.base import Budget

__all__ = ["allocate", "check_ratio", "clip", "pyramid", "rows_for", "table", "uniform"]


def allocate(budget: Budget, n_rows: int, have: ArrayLike) -> NDArray[np.int32]:
    """The budget for heads that hold `have` rows.

    n_rows: mean rows per head (see `rows_for`). have: int [n_layer, n_head_kv].
    Returns int32 [n_layer, n_head_kv], nowhere above `have`, its sum n_rows * n_layer * n_head_kv, or that of `have`
    if that is less.
    """
    n_layer, n_head_kv = np.shape(have)
    return clip(budget(n_rows, n_layer, n_head_kv), have)


def clip(counts: ArrayLike, have: ArrayLike) -> NDArray[np.int32]:
    """`counts` cut to `have`; what is cut off goes evenly to the heads that still have room. Both int, same shape."""
    wish, limit = np.asarray(counts, np.int64), np.asarray(have, np.int64)
    assert wish.shape == limit.shape and (wish >= 0).all() and (limit >= 0).all()
    fits = np.minimum(wish, limit)
    excess = int((wish - fits).sum())
    return (fits + _spread(excess, limit - fits)).astype(np.int32)


def _spread(total: int, room: NDArray[np.int64]) -> NDArray[np.int64]:
    """As even a share of `total` as `room` allows for each place, the sum exact (or all the room there is).

    What is left after equal shares goes, one each, to the first places with room, so in order of the layers.
    """
    if total >= room.sum():
        return room
    low, high = 0, int(room.max())  # the largest level at which everybody's min(room, level) fits
    while low < high:
        level = (low + high + 1) // 2
        if np.minimum(room, level).sum() <= total:
            low = level
        else:
            high = level - 1
    share = np.minimum(room, low)
    first = np.flatnonzero(room > low)[: total - int(share.sum())]
    share.flat[first] += 1
    return share
