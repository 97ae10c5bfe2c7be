"""Seconds until the first word, words a second, and memory: edgekv beside the unpatched library and
OpenVINO GenAI, which reads the same GGUF.

Each prompt is the beginning of the text, in a process of its own that has loaded the model. A round
has every side once; the sides take turns in it, backwards in every second round. First word: from
the prompt's tokens to the first token. Process: the largest resident size, weights and all, from
the start. For `auto` a profile is made before, if there is none. Medians; x: of the quotients to
the unpatched library's of the same round.
"""

from __future__ import annotations

import json
import subprocess
from statistics import median
from typing import Any

import edgekv
from edgekv.commands.declare import option
from edgekv.commands.values import COUNT
from edgekv_lab.experiments import checkout
from edgekv_lab.experiments.experiment import (
    AUTO,
    MODEL,
    RATIO,
    ROUNDS,
    THREADS,
    Options,
    experiment,
    many,
    say,
    sheet,
    text,
)
from edgekv_lab.sides import first_word

STOCK, OURS, OPENVINO = "unpatched, f16", "edgekv", "OpenVINO GenAI"


@experiment(
    MODEL,
    option("-f --file", required=True, help="A text."),
    option("--tokens", default="2000,4000", callback=many(int), help="Lengths of the prompts."),
    RATIO,
    AUTO,
    option("--n-gen", type=COUNT, default=32, help="Tokens to write."),
    THREADS,
    ROUNDS,
    option("--openvino", metavar="PYTHON", help="Of an environment that has openvino-genai."),
)
def command(o: Options) -> None:
    if not edgekv.has_profile(o.model):
        edgekv.make_profile(o.model)
    sides = [STOCK, OURS, *[OPENVINO] * bool(o.openvino)]
    columns = ("tokens", "{:,}"), ("side", ""), ("first word, s", "{:.2f}"), ("x", "{:.2f}")
    more = ("tokens/s", "{:.1f}"), ("process, MiB", "{:,.0f}")
    with sheet(*columns, *more) as table:
        for n in o.tokens:
            rounds = []
            for i in range(o.rounds):
                order = sides[:: -1 if i % 2 else 1]
                rounds.append({side: measured(o, side, n) for side in order})
            for side in sides:
                got = [found[side] for found in rounds]
                table.add(
                    n,
                    side,
                    median(x["first"] for x in got),
                    median(r[STOCK]["first"] / r[side]["first"] for r in rounds),
                    median(x["speed"] for x in got),
                    max(x["process"] for x in got) / 2**20,
                )


def measured(o: Options, side: str, n: int) -> dict[str, float]:
    request: dict[str, Any] = {
        "model": o.model,
        "text": text(o.file)[: 12 * n],
        "n": n,
        "n_gen": o.n_gen,
        "threads": o.threads,
        "cache": {"kv_ratio": o.ratio, "kv_method": o.method} if side == OURS else None,
    }
    if side == OPENVINO:
        done = subprocess.run(
            [o.openvino, first_word.__file__],
            input=json.dumps(request),
            text=True,
            stdout=subprocess.PIPE,
            check=True,
        )
        got = json.loads(done.stdout.splitlines()[-1])
    else:
        got = checkout.side("first_word:with_llama", request, side == STOCK)
    say(n, side, got)
    return got
