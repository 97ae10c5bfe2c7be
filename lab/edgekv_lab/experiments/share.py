"""Share: what scoring, selecting and moving rows takes of reading a prompt, stage by stage, on a
GPU or the CPU.

Tokens are random numbers, so that a model with random weights does. Each measurement is a process
of its own that reads two prompts, each into an empty cache, and the second one counts: the first
also loads kernels and tries ours. The table gives medians over the rounds, in milliseconds.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from edgekv.base.stats import STAGES
from edgekv.commands.declare import option
from edgekv_lab.experiments.experiment import (
    LAYERS,
    MODEL,
    RATIO,
    ROUNDS,
    THREADS,
    Options,
    experiment,
    many,
    say,
    sheet,
    tokens,
)
from edgekv_lab.experiments.prompts import measured, saved, type_id
from edgekv_lab.sides.reading import Measurement

FULL = "full"
COUNTED = ("observe", "score", "select", "evict")
"""Of STAGES: attention's statistics and the scores made of them, choosing rows, moving them."""
N_VOCAB = 500
"""Every model knows so many tokens."""
COLUMNS = (
    ("method", ""),
    ("reading, all in all", "{:,.1f}"),
    ("beside full", "{:.2f} x"),
    *((name, "{:.1f}") for name in STAGES),
    (" + ".join(COUNTED), "{:.1f}"),
    ("of the reading", "{:.2f} %"),
)


@experiment(
    MODEL,
    tokens(32768, "a prompt"),
    LAYERS,
    option(
        "--methods",
        default=f"{FULL};snapkv",
        callback=many(str, ";"),
        help="Methods, with semicolons between them.",
    ),
    option("--hidden", default="f32", callback=many(str), help="Where hidden states wait."),
    RATIO,
    option("--type", default="f16", help="Cache type."),
    THREADS,
    ROUNDS,
)
def command(o: Options) -> None:
    about = f"{o.tokens:,} tokens, {o.type} cache, {o.ratio:g} kept, {o.ngl} layers on a GPU"
    with tempfile.TemporaryDirectory() as folder, sheet(*COLUMNS, about=about) as table:
        random = np.random.default_rng(0).integers(3, N_VOCAB, 2 * o.tokens)
        file = saved(Path(folder), random.tolist())
        full = 0.0
        for method in o.methods:
            for hidden in o.hidden if method != FULL else ["f32"]:
                rounds = [one(o, method, hidden, file, number) for number in range(o.rounds)]
                full = median(r["prefill_ms"] for r in rounds) if method == FULL else full
                name = method + f", --kv-hidden {hidden}" * (hidden != "f32")
                table.add(name, *cells(rounds, full))


def one(o: Options, method: str, hidden: str, file: str, number: int) -> dict[str, Any]:
    say(f"{method}, {hidden}, round {number + 1} of {o.rounds}")
    return measured(
        Measurement(
            "edgekv",
            o.model,
            file,
            o.tokens,
            0,
            type_id(o.type),
            o.threads,
            ratio=1.0 if method == FULL else o.ratio,
            method=method,
            hidden=hidden,
            n_prompts=2,
            n_gpu_layers=o.ngl,
        )
    )


def cells(rounds: list[dict[str, Any]], full: float) -> list[float | None]:
    """full: milliseconds that reading takes with the full cache; 0: not measured."""
    reading = median(r["prefill_ms"] for r in rounds)
    read = [reading, reading / full if full else None]
    if not rounds[0]["stage_ms"]:
        return [*read, *[None] * (len(STAGES) + 2)]
    stages = {name: median(r["stage_ms"][name] for r in rounds) for name in STAGES}
    shares = [sum(r["stage_ms"][name] for name in COUNTED) / r["prefill_ms"] for r in rounds]
    counted = sum(stages[name] for name in COUNTED)
    return [*read, *stages.values(), counted, 100 * median(shares)]
