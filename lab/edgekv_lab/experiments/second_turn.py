"""A later turn of a model with recurrent layers, beside the unpatched library.

A conversation of --tokens tokens is read, and then turns of 30 tokens, with the seconds until the
first token of the answer, and the tokens that `eval` was given until then. Each side has processes
of its own (unpatched: llama-cpp-python of the same version on $EDGEKV_STOCK_LIB), and the sides
take turns; the least of the rounds counts. Weights are random.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from edgekv.commands.declare import option
from edgekv_lab.bench import synthetic
from edgekv_lab.experiments.checkout import side
from edgekv_lab.experiments.experiment import (
    RATIO,
    ROUNDS,
    THREADS,
    Options,
    experiment,
    say,
    sheet,
    tokens,
)
from edgekv_lab.sides.second_turn import TURNS


@experiment(
    option("--shape", default="qwen3.5-0.8b", help="As of `edgekv bench --synthetic`."),
    tokens(4000, "the conversation"),
    ROUNDS,
    RATIO,
    THREADS,
)
def command(o: Options) -> None:
    kinds = ["first turn", *TURNS]
    heads = [(f"{x}: seconds", "{:.2f}") for x in kinds], [(f"{x}: read", "{:,}") for x in kinds]
    sides = {"unpatched": None} | {
        f"edgekv at {ratio:g}": {"kv_ratio": ratio, "kv_method": "snapkv"} for ratio in (1, o.ratio)
    }
    found: dict[str, list[dict[str, list[float]]]] = {name: [] for name in sides}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        synthetic.write(path, *synthetic.parse(o.shape))
        for _ in range(o.rounds):
            for name, cache in sides.items():
                request = {"model": str(path), "tokens": o.tokens, "threads": o.threads}
                got = side("second_turn:turns", request | {"cache": cache}, cache is None)
                say(name, got)
                found[name].append(got)
    columns = [x for pair in zip(*heads, strict=True) for x in pair]
    with sheet(("cache", ""), *columns) as table:
        for name, rounds in found.items():
            least = [min((got[kind] for got in rounds), key=lambda x: x[0]) for kind in kinds]
            table.add(name, *(x for seconds, read in least for x in (seconds, int(read))))
