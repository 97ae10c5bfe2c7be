"""What reading a prompt takes of a process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgekv_lab.sides.load import llama

RATIO, N_WARM_UP = 0.2, 700
FULL = "full"


def profile(request: dict[str, Any]) -> None:
    """Make the profile of a model: what that takes is no part of what follows."""
    import edgekv

    edgekv.make_profile(request["model"])


def memory(request: dict[str, Any]) -> dict[str, Any]:
    """Bytes of reading one prompt of `tokens` tokens with a method, in this process."""
    from edgekv import native
    from edgekv.base.machine import rss_now, rss_peak

    method = request["method"]
    plain = {"kv_ratio": 1.0, "swa_full": False}
    cache = plain if method == FULL else {"kv_ratio": RATIO, "kv_method": method}
    n_ctx, n_threads = request["tokens"] + 256, request["threads"]
    llm = llama(request["model"], n_ctx, n_threads, cache, use_mmap=False)
    llm.eval(tokens(llm, N_WARM_UP, 1))
    llm.reset()
    native.trim_heap()
    prompt = tokens(llm, request["tokens"], 2)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = rss_now()
    llm.eval(prompt)
    stats, peak = llm.kv_stats(), rss_peak() or 0
    return {
        "method": FULL if method == FULL else stats.method,
        "type": stats.type_k,
        "full": stats.n_bytes_full,
        "kept": stats.n_bytes,
        "reported": stats.n_bytes_peak,
        "measured": peak - before,
        "process": peak,
        "recurrent": stats.n_bytes_recurrent,
    }


def tokens(llm: Any, n: int, seed: int) -> list[int]:
    import numpy as np

    return np.random.default_rng(seed).integers(259, llm.n_vocab(), n).tolist()
