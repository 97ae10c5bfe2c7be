"""What two texts or rows of tokens have in common at their beginning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Row = Sequence[int] | NDArray[Any]


def n_shared(a: Row, b: Row) -> int:
    """Length of what two rows of numbers have in common at the beginning; bytes are numbers, too.
    Where they part early, no more of them is looked at.
    """
    n, begin, size = min(len(a), len(b)), 0, 64
    while begin < n:
        end = min(begin + size, n)
        differ = _numbers(a[begin:end]) != _numbers(b[begin:end])
        first = int(differ.argmax())
        if differ[first]:
            return begin + first
        begin, size = begin + size, 8 * size
    return n


def _numbers(row: Row) -> NDArray[Any]:
    return np.frombuffer(row, np.uint8) if isinstance(row, bytes) else np.asarray(row)
