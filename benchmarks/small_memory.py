"""A prompt with a model that is larger than memory: seconds, and what is read from the disk.

    GROUP=/sys/fs/cgroup/memory/small
    mkdir $GROUP && echo 450M > $GROUP/memory.limit_in_bytes
    python benchmarks/small_memory.py -m MODEL.gguf --group $GROUP [--tokens 4000]

Each side is a process in that control group, after the system has dropped its cached files (so it
is for root). Neither side repacks weights: both are ended by the system if they do. The prompt's
tokens are any.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from process import heading, python, stock_environment

N_WRITTEN = 8
SIDES = ("unpatched, f16", "edgekv")


def main() -> None:
    options = parse()
    if options.child:
        print(json.dumps(measured(json.load(sys.stdin))))
        return
    print(heading("small_memory.py"))
    print(
        "| side | first word, s | read from disk, MiB | s a token | read a token, MiB | peak, MiB |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for side in SIDES:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")
        environment = stock_environment() if side == SIDES[0] else dict(os.environ)
        request = {**vars(options), "side": side}
        got = json.loads(python([__file__, "--child"], json.dumps(request), environment))
        cells = (
            f"{got['first']:.1f}",
            f"{got['prompt_bytes'] / 2**20:,.0f}",
            f"{got['each']:.2f}",
            f"{got['each_bytes'] / 2**20:,.0f}",
            f"{got['peak'] / 2**20:,.0f}",
        )
        print(f"| {side} | {' | '.join(cells)} |", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-m", "--model")
    parser.add_argument("--group", help="folder of a control group with a limit")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--method", default="snapkv")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--child", action="store_true")
    return parser.parse_args()


def measured(request: dict[str, Any]) -> dict[str, float]:
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

    kind: type[Any] = Unpatched
    more: dict[str, Any] = {}
    if request["side"] != SIDES[0]:
        from edgekv import Llama

        kind, more = Llama, {"kv_ratio": 0.2, "kv_method": request["method"]}
    n, threads = request["tokens"], request["threads"]
    llm = kind(
        request["model"],
        n_ctx=n + 64,
        n_threads=threads,
        n_threads_batch=threads,
        flash_attn=True,
        verbose=False,
        **more,
    )
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


if __name__ == "__main__":
    main()
