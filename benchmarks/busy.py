"""Tokens a second beside other processes that want the cores.

    python benchmarks/busy.py -m MODEL.gguf [--busy 0,1,2] [--n-gen 150] [--rounds 3]

For each number of busy processes, in turns: the unpatched library and edgekv with as many threads
as there are cores, and edgekv as `chat`, `run` and `serve` have it where no -t is given. Medians,
each in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from statistics import median

from process import heading, python, stock_environment

SIDES = ("unpatched, f16", "edgekv", "edgekv without -t")
TEXT = "Tell a long story about a whale and a captain.\n"


def main() -> None:
    options = parse()
    if options.child:
        print(json.dumps(written(json.load(sys.stdin))))
        return
    print(heading("busy.py"))
    print("| busy processes | side | tokens/s | x alone |")
    print("| ---: | --- | ---: | ---: |")
    alone: dict[str, float] = {}
    for n_busy in map(int, options.busy.split(",")):
        busy = [multiprocessing.Process(target=spin, daemon=True) for _ in range(n_busy)]
        for process in busy:
            process.start()
        rounds = [{side: measured(options, side) for side in SIDES} for _ in range(options.rounds)]
        for process in busy:
            process.kill()
        for side in SIDES:
            speed = median(found[side] for found in rounds)
            x = speed / alone.setdefault(side, speed)
            print(f"| {n_busy} | {side} | {speed:.1f} | {x:.2f} |", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-m", "--model")
    parser.add_argument("--busy", default="0,1,2")
    parser.add_argument("--n-gen", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", action="store_true")
    return parser.parse_args()


def spin() -> None:
    while True:
        pass


def measured(options: argparse.Namespace, side: str) -> float:
    request = json.dumps({"model": options.model, "n_gen": options.n_gen, "side": side})
    environment = stock_environment() if side == SIDES[0] else dict(os.environ)
    return float(json.loads(python([__file__, "--child"], request, environment)))


def written(request: dict[str, str | int]) -> float:
    n_threads = os.cpu_count() or 1
    arguments = dict(n_ctx=2048, n_threads=n_threads, flash_attn=True, verbose=False)
    model, side = str(request["model"]), request["side"]
    if side == SIDES[0]:
        from edgekv.llama_cpp import Llama

        llm = Llama(model, **arguments)
    else:
        from edgekv import Llama
        from edgekv.llama.pace import Pace

        llm = Llama(model, kv_ratio=0.2, **arguments)
        llm.pace = Pace(n_threads) if side == SIDES[2] else None
    times = []
    for _ in llm.generate(llm.tokenize(TEXT.encode()), temp=0.0):
        times.append(time.perf_counter())
        if len(times) > int(request["n_gen"]):
            break
    return (len(times) - 1) / (times[-1] - times[0])


if __name__ == "__main__":
    main()
