"""How fast this machine reads its main memory, in a process of its own (as `measure`).

Each thread looks for the largest number of an array of its own, which takes hardly any arithmetic.
The best pass counts: whatever else the machine does makes the others slower.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

N_BYTES = 2**29
"""Of all arrays together: far more than the caches of processors hold."""
N_PASSES = 4


def answer(request: dict[str, Any]) -> float:
    """As `measured`, of as many threads as the request names."""
    return measured(request["n_threads"])


def measured(n_threads: int, n_bytes: int | None = None) -> float:
    """Bytes per second that n_threads read together. n_bytes: of the arrays; None: as many as make
    sense."""
    from edgekv.base.machine import memory_free

    n_bytes = min(N_BYTES, memory_free() // 4) if n_bytes is None else n_bytes
    parts = [np.ones(max(n_bytes // n_threads // 4, 1), np.int32) for _ in range(n_threads)]
    total = sum(part.nbytes for part in parts)
    best = 0.0
    with ThreadPoolExecutor(n_threads) as threads:
        for _ in range(N_PASSES):
            begin = time.perf_counter()
            list(threads.map(np.max, parts))
            best = max(best, total / (time.perf_counter() - begin))
    return best
