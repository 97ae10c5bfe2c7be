"""Cost of each method: what compressing adds to reading a prompt, stage by stage, beside reading it in full and `streaming`.

    python benchmarks/cost.py [-m demo] [--tokens 4000] [--ratio 0.2] [--methods "snapkv;kvzip"] [--types f16] [--threads 2] [--rounds 3]

Every measurement is a process of its own (measure.py); a round measures every method once. The table gives medians over the rounds, and
medians of ratios taken within a round. Markdown goes to standard output, progress to standard error.
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

from engine import Plan, plan_of  # noqa: E402
from measure import Measurement  # noqa: E402
from process import heading, measured  # noqa: E402

from edgekv.choose import choose  # noqa: E402
from edgekv.errors import BadInput  # noqa: E402
from edgekv.methods import REGISTRY  # noqa: E402
from edgekv.stats import STAGES  # noqa: E402

FULL, BASE = "full", "streaming"
PROFILED = ["score=keydiff,budget=profile", "score=expected,budget=profile"]
ROUND = dict[str, dict[str, Any]]


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as folder:
        plan = plan_of(options, Path(folder))
        methods = [name for name in options.methods if usable(name, plan.model.path)]
        print(heading("cost.py"))
        for kind in options.types:
            rounds = [one_round(plan, kind, methods, number) for number in range(options.rounds)]
            print(f"{plan.model.name}, {plan.n_prompt:,} tokens, {kind} cache, ratio {plan.ratio:g}, {plan.n_threads} threads, {options.rounds} rounds.\n")
            print(table(methods, rounds), flush=True)


def parse() -> argparse.Namespace:
    every = [FULL, BASE, *(name for name in REGISTRY if name not in (FULL, BASE)), *PROFILED]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", default="demo")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--ratio", type=float, default=0.2)
    parser.add_argument("--methods", type=lambda text: list(dict.fromkeys([FULL, BASE, *text.split(";")])), default=every, help="separated by ;")
    parser.add_argument("--types", type=lambda text: text.split(","), default=["f16"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.set_defaults(decode=1, hidden=("f32",), method="")
    return parser.parse_args()


def usable(method: str, model: str) -> bool:
    """False, with a line on standard error, if the model has no profile that the method needs."""
    try:
        choose(method, model)
    except BadInput as error:
        print(f"{method} is left out: {error}", file=sys.stderr)
        return False
    return True


def one_round(plan: Plan, kind: str, methods: list[str], number: int) -> ROUND:
    """Every method once. Later rounds go backwards, so that none is always first."""
    results = {}
    for method in methods if number % 2 == 0 else reversed(methods):
        print(f"round {number + 1}, {kind}: {method}", file=sys.stderr, flush=True)
        results[method] = measured(measurement(plan, kind, method))
    return results


def measurement(plan: Plan, kind: str, method: str) -> Measurement:
    what = plan.measurements(kind)["f32"]
    return Measurement(**{**vars(what), "method": method, "ratio": 1.0 if method == FULL else plan.ratio})


def table(methods: list[str], rounds: list[ROUND]) -> str:
    lines = [f"| method | prefill s | x {FULL} | x {BASE} | {' | '.join(f'{stage} s' for stage in STAGES)} | compressing, share of the prefill |",
             "| --- " + "| ---: " * (4 + len(STAGES)) + "|"]
    for method in methods:
        stages = ["" if method == FULL else f"{middle(rounds, lambda r: r[method]['stage_ms'][stage]) / 1e3:.2f}" for stage in STAGES]
        share = middle(rounds, lambda r: r[method]["compress_ms"] / r[method]["prefill_s"] / 1e3)
        against = [f"{middle(rounds, lambda r: r[method]['prefill_s'] / r[other]['prefill_s']):.2f}" for other in (FULL, BASE)]
        lines.append(" | ".join([f"| {method}", f"{middle(rounds, lambda r: r[method]['prefill_s']):.2f}", *against, *stages, f"{100 * share:.1f} % |"]))
    return "\n".join(lines) + "\n"


def middle(rounds: list[ROUND], value: Any) -> float:
    return median(value(one) for one in rounds)


if __name__ == "__main__":
    main()
