"""clip: a budget cut to the rows that heads really have, without losing a row."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def clip(counts: ArrayLike, have: ArrayLike) -> NDArray[np.int32]:
    """`counts` cut to `have`; what is cut off goes evenly to heads with room. Ints of one shape."""
    wish, limit = np.asarray(counts, np.int64), np.asarray(have, np.int64)
    assert wish.shape == limit.shape and (wish >= 0).all() and (limit >= 0).all()
    fits = np.minimum(wish, limit)
    excess = int((wish - fits).sum())
    return (fits + _spread(excess, limit - fits)).astype(np.int32)


def _spread(total: int, room: NDArray[np.int64]) -> NDArray[np.int64]:
    """As even a share of `total` as `room` allows for each place, the sum exact (or all the room
    there is).

    What is left after equal shares goes, one each, to the first places with room, so in order of
    the layers.
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
