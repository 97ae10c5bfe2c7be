"""Heads beside each other: numpy leaves the interpreter alone while it sorts, so threads help where rows are many."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

T = TypeVar("T")
MANY = 8192
"""Rows of a head that are worth a thread."""


def each_head(function: Callable[[int], T], n_heads: int, n_rows: int) -> list[T]:
    """[function(0), .. function(n_heads - 1)], in threads if heads of `n_rows` rows are worth it."""
    if n_rows < MANY or n_heads < 2:
        return [function(k) for k in range(n_heads)]
    return list(_pool().map(function, range(n_heads)))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1), "edgekv")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not come along
