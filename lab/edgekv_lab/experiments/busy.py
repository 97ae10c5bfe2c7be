"""Tokens a second beside other processes that want the cores.

For each number of busy processes, in turns: the unpatched library and edgekv with as many threads
as there are cores, and edgekv as `chat`, `run` and `serve` have it where no -t is given. Medians,
each in a process of its own.
"""

from __future__ import annotations

import multiprocessing
from statistics import median

from edgekv.commands.declare import option
from edgekv.commands.values import COUNT
from edgekv_lab.experiments.checkout import side
from edgekv_lab.experiments.experiment import MODEL, ROUNDS, Options, experiment, many, sheet

SIDES = ("unpatched, f16", "edgekv", "edgekv without -t")


@experiment(
    MODEL,
    option("--busy", default="0,1,2", callback=many(int), help="Numbers of busy processes."),
    option("--n-gen", type=COUNT, default=150, help="Tokens to write."),
    ROUNDS,
)
def command(o: Options) -> None:
    columns = ("busy processes", "{}"), ("side", ""), ("tokens/s", "{:.1f}"), ("x alone", "{:.2f}")
    alone: dict[str, float] = {}
    with sheet(*columns) as table:
        for n_busy in o.busy:
            busy = [multiprocessing.Process(target=spin, daemon=True) for _ in range(n_busy)]
            for process in busy:
                process.start()
            rounds = [{side: measured(o, side) for side in SIDES} for _ in range(o.rounds)]
            for process in busy:
                process.kill()
            for name in SIDES:
                speed = median(found[name] for found in rounds)
                table.add(n_busy, name, speed, speed / alone.setdefault(name, speed))


def spin() -> None:
    while True:
        pass


def measured(o: Options, name: str) -> float:
    is_stock = name == SIDES[0]
    request = {"model": o.model, "n_gen": o.n_gen}
    request |= {"is_stock": is_stock, "is_paced": name == SIDES[2]}
    return float(side("writing:speed", request, is_stock))
