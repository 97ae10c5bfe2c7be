"""Writing, one token after the other."""

from __future__ import annotations

import os
import time
from typing import Any

from edgekv_lab.sides.load import llama

TEXT = "Tell a long story about a whale and a captain.\n"


def speed(request: dict[str, Any]) -> float:
    """Tokens a second of n_gen, by `model` with a thread for each processor. is_stock: by the
    unpatched bindings; is_paced: with edgekv's choice of threads, as where nobody names -t."""
    n_threads = os.cpu_count() or 1
    cache = None if request["is_stock"] else {"kv_ratio": 0.2}
    llm = llama(request["model"], 2048, n_threads, cache)
    if cache:
        from edgekv.base.pace import Pace

        llm.pace = Pace(n_threads) if request["is_paced"] else None
    times = []
    for _ in llm.generate(llm.tokenize(TEXT.encode()), temp=0.0):
        times.append(time.perf_counter())
        if len(times) > int(request["n_gen"]):
            break
    return (len(times) - 1) / (times[-1] - times[0])
