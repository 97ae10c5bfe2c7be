"""Share: what scoring, selecting and moving rows takes of reading a prompt, stage by stage, on a
GPU or the CPU.

    python benchmarks/share.py -m FILE [--tokens 32768] [-ngl 99] [--methods "full;snapkv"]
                               [--hidden f32,device] [--ratio 0.2] [--type f16] [--threads 2]
                               [--rounds 3]

Tokens are random numbers, so that a model with random weights does. Each measurement is a process
of its own that reads two prompts, each into an empty cache, and the second one counts: the first
also loads kernels and tries ours. The table gives medians over the rounds. Markdown goes to
standard output, progress to standard error.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(Path(__file__).resolve().parent)]
sys.path.append(str(ROOT))

import numpy as np  # noqa: E402
from measure import Measurement  # noqa: E402
from process import TYPES, heading, measured, saved  # noqa: E402

from edgekv.base.stats import STAGES  # noqa: E402

FULL = "full"
COUNTED = ("observe", "score", "select", "evict")
"""Of STAGES: attention's statistics and the scores made of them, choosing rows, moving them."""
N_VOCAB = 500
"""Every model knows so many tokens."""


def main() -> None:
    options = parse()
    print(heading("share.py"))
    print(
        f"{options.tokens:,} tokens, {options.type} cache, {options.ratio:g} kept, {options.ngl}"
        f" layers on a GPU, median of {options.rounds}; milliseconds.\n"
    )
    print(
        f"| method | reading, all in all | beside full | {' | '.join(STAGES)} |"
        f" {' + '.join(COUNTED)} | of the reading |"
    )
    print("| --- | ---: | ---: |" + " ---: |" * (len(STAGES) + 2), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        random = np.random.default_rng(0).integers(3, N_VOCAB, 2 * options.tokens)
        tokens = saved(Path(folder), random.tolist())
        full = 0.0
        for method in options.methods:
            for hidden in options.hidden if method != FULL else ["f32"]:
                rounds = [
                    one(options, method, hidden, tokens, number) for number in range(options.rounds)
                ]
                full = median(r["prefill_ms"] for r in rounds) if method == FULL else full
                print(
                    row(method + f", --kv-hidden {hidden}" * (hidden != "f32"), rounds, full),
                    flush=True,
                )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("-ngl", type=int, default=0)
    parser.add_argument(
        "--methods",
        type=lambda text: text.split(";"),
        default=[FULL, "snapkv"],
        help="separated by ;",
    )
    parser.add_argument(
        "--hidden",
        type=lambda text: text.split(","),
        default=["f32"],
        help="where hidden states wait, separated by commas",
    )
    parser.add_argument("--ratio", type=float, default=0.2)
    parser.add_argument("--type", choices=TYPES, default="f16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def one(
    options: argparse.Namespace, method: str, hidden: str, tokens: str, number: int
) -> dict[str, Any]:
    print(
        f"{method}, {hidden}, round {number + 1} of {options.rounds}", file=sys.stderr, flush=True
    )
    return measured(
        Measurement(
            "edgekv",
            options.model,
            tokens,
            options.tokens,
            0,
            TYPES[options.type],
            options.threads,
            ratio=1.0 if method == FULL else options.ratio,
            method=method,
            hidden=hidden,
            n_prompts=2,
            n_gpu_layers=options.ngl,
        )
    )


def row(name: str, rounds: list[dict[str, Any]], full: float) -> str:
    """full: milliseconds that reading takes with the full cache; 0: not measured."""
    reading = median(r["prefill_ms"] for r in rounds)
    read = f"| {name} | {reading:,.1f} | {f'{reading / full:.2f} x' if full else ''} |"
    if not rounds[0]["stage_ms"]:
        return read + " |" * (len(STAGES) + 2)
    stages = {name: median(r["stage_ms"][name] for r in rounds) for name in STAGES}
    shares = [sum(r["stage_ms"][name] for name in COUNTED) / r["prefill_ms"] for r in rounds]
    return (
        f"{read} {' | '.join(f'{x:.1f}' for x in stages.values())} |"
        f" {sum(stages[name] for name in COUNTED):.1f} | {100 * median(shares):.2f} % |"
    )


if __name__ == "__main__":
    main()
