"""Threads. Heads beside each other: numpy leaves the interpreter alone while it sorts, so threads
help where rows are many. And products
without threads: those of numpy's BLAS wait for the next product in a loop, on the cores that are
about to read the next layer.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, TypeVar, cast

T = TypeVar("T")
MANY = 8192
"""Rows of a head that are worth a thread."""
PAIR = 2
"""Heads whose work stands in memory side by side."""
OF_HEAD = 2
"""Threads that share one of these heads, at most: each works in memory of its own."""


def each_head(function: Callable[[int], T], n_heads: int, n_rows: int) -> list[T]:
    """[function(0), .. function(n_heads - 1)], in threads if heads of n_rows rows are worth it."""
    if n_rows < MANY or n_heads < 2:
        return [function(k) for k in range(n_heads)]
    return list(_pool(min(8, os.cpu_count() or 1)).map(function, range(n_heads)))


def pairs_of_heads(function: Callable[[int, int], T], n_heads: int, n_threads: int) -> list[T]:
    """[function(0, n), ...] of work that takes much memory and can itself use n threads: PAIR heads
    at a time, which share n_threads, or what is left alone. No head has more than OF_HEAD.
    """
    n_paired = n_heads // PAIR * PAIR if n_threads >= PAIR else 0
    each, alone = (min(OF_HEAD, n) for n in (n_threads // PAIR, n_threads))
    paired = list(_pool(PAIR).map(lambda k: function(k, each), range(n_paired)))
    return paired + [function(k, alone) for k in range(n_paired, n_heads)]


class _OneThread:
    """Counts who is inside: the number of BLAS threads is one for the whole process, so the first
    who comes lowers it and the last who goes puts it back, whatever threads they are."""

    def __init__(self) -> None:
        self._lock, self._n_inside, self._limit = threading.Lock(), 0, cast(Any, None)

    def __enter__(self) -> None:
        with self._lock:
            if self._n_inside == 0:
                _take_over()
                self._limit = _blas().limit(limits=1, user_api="blas")
            self._n_inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._n_inside -= 1
            if self._n_inside == 0:
                _take_over()
                self._limit.restore_original_limits()


@cache
def _blas() -> Any:
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


def _take_over() -> None:
    """threadpoolctl lets only the first thread change the number; here the lock's holder may."""
    from threadpoolctl import OpenBLASController

    if hasattr(OpenBLASController, "clear_controlling_thread"):
        OpenBLASController.clear_controlling_thread(force=True)


_one_thread = _OneThread()


def one_thread_for_products() -> AbstractContextManager[None]:
    """A `with` block in which numpy's BLAS has one thread: for many small products."""
    return _one_thread


@cache
def _pool(n_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(n_threads, "edgekv")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not come along
