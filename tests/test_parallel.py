"""Heads side by side. And threads of numpy's BLAS: lowered while somebody multiplies small
matrices, and put back by the last one who does.
"""

from __future__ import annotations

import threading

import pytest
from threadpoolctl import ThreadpoolController

from edgekv.base.parallel import one_thread_for_products, pairs_of_heads


def n_threads() -> int:
    """The largest number of threads of any BLAS in the process."""
    return max(x["num_threads"] for x in ThreadpoolController().info() if x["user_api"] == "blas")


@pytest.fixture
def two_threads():
    with ThreadpoolController().limit(limits=2, user_api="blas"):
        if n_threads() < 2:
            pytest.skip("this BLAS has one thread")
        yield


def test_who_comes_first_may_leave_first(two_threads):
    first, second = one_thread_for_products(), one_thread_for_products()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert n_threads() == 1
    second.__exit__(None, None, None)
    assert n_threads() == 2


def test_threads_that_come_and_go_leave_the_number_as_it_was(two_threads):
    seen = []

    def work() -> None:
        for _ in range(200):
            with one_thread_for_products():
                seen.append(n_threads())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(seen) == {1} and n_threads() == 2


@pytest.mark.parametrize("n_heads", [0, 1, 2, 3, 8])
@pytest.mark.parametrize("n_threads", [1, 2, 3, 8, 32])
def test_heads_side_by_side_share_the_threads(n_heads, n_threads):
    """Two heads at a time, each by two threads at most; the last of an odd number is alone, as each
    is if there is but one thread.
    """
    found = pairs_of_heads(lambda k, n: (k, n), n_heads, n_threads)
    n_paired = n_heads // 2 * 2 if n_threads > 1 else 0
    assert found == [
        (k, min(2, n_threads // 2 if k < n_paired else n_threads)) for k in range(n_heads)
    ]
