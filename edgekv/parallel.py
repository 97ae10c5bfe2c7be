"""Threads. Heads beside each other: numpy leaves the interpreter alone while it sorts, so threads help where rows are many. And products
without threads: those of numpy's BLAS wait for the next product in a loop, on the cores that are about to read the next layer."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, ContextManager, TypeVar

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController

T = TypeVar("T")
MANY = 8192
"""Rows of a head that are worth a thread."""


def each_head(function: Callable[[int], T], n_heads: int, n_rows: int) -> list[T]:
    """[function(0), .. function(n_heads - 1)], in threads if heads of `n_rows` rows are worth it."""
    if n_rows < MANY or n_heads < 2:
        return [function(k) for k in range(n_heads)]
    return list(_pool().map(function, range(n_heads)))


def one_thread_for_products() -> ContextManager[object]:
    """A `with` block in which numpy's BLAS has one thread: for many small products."""
    return _blas().limit(limits=1, user_api="blas")


@cache
def _blas() -> ThreadpoolController:
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1), "edgekv")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not come along
