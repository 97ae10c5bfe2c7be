"""A model that is larger than the memory of a control group."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from edgekv_lab.sides.load import llama

N_WRITTEN = 8


def measured(request: dict[str, Any]) -> dict[str, float]:
    """Seconds and bytes of the first word behind `tokens` tokens and of each further one, in the
    control group `group`. cache: as of `load.llama`."""
    (Path(request["group"]) / "cgroup.procs").write_text(str(os.getpid()))
    import edgekv.llama_cpp.llama as bindings

    class Unpatched(bindings.Llama):
        @property
        def model_params(self) -> Any:
            return self._params

        @model_params.setter
        def model_params(self, params: Any) -> None:
            self._params = params
            params.use_extra_bufts = False

    n, threads = request["tokens"], request["threads"]
    if request["cache"] is None:
        shared = dict(n_ctx=n + 64, n_threads=threads, n_threads_batch=threads, flash_attn=True)
        llm: Any = Unpatched(request["model"], **shared, verbose=False)
    else:
        llm = llama(request["model"], n + 64, threads, request["cache"])
    assert not llm.model_params.use_extra_bufts, "the model fits into the group's memory"
    tokens = [(7 * i * i + i) % (llm.n_vocab() - 10) + 10 for i in range(n)]
    times, read = [time.perf_counter()], [bytes_read()]
    for _ in llm.generate(tokens, temp=0.0):
        times.append(time.perf_counter())
        read.append(bytes_read())
        if len(times) == N_WRITTEN + 2:
            break
    return {
        "first": times[1] - times[0],
        "prompt_bytes": read[1] - read[0],
        "each": (times[-1] - times[1]) / N_WRITTEN,
        "each_bytes": (read[-1] - read[1]) / N_WRITTEN,
        "peak": int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024,
    }


def bytes_read() -> int:
    """From the disk, by this process, its page faults included."""
    return int(Path("/proc/self/io").read_text().split("\nread_bytes: ")[1].split()[0])
