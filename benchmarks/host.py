"""What Python does for one finished layer, whatever device has the rows: scores of statistics, budgets, choosing rows, summaries.

    python benchmarks/host.py [--tokens 32768] [--heads 8] [--layers 32] [--ratio 0.2] [--runs 9]

A layer of Llama-3-8B's shape by default; statistics are random numbers, kernels and the moving of rows are left out. Markdown goes to
standard output: medians over the runs, and what they come to for all layers.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(Path(__file__).resolve().parent)]
sys.path.append(str(ROOT))

from process import heading  # noqa: E402

from edgekv import methods, select  # noqa: E402
from edgekv.budget import Plan  # noqa: E402
from edgekv.budget.profile import Profile  # noqa: E402
from edgekv.methods import LayerStats, Preset  # noqa: E402
from edgekv.methods.kvzap import KVzap, Surrogate  # noqa: E402
from edgekv.stats import StageClock  # noqa: E402
from edgekv.summary import Summary, look  # noqa: E402

STAGES = ("score", "budget", "select", "merge")
GROUP, D = 4, 128
"""Query heads on a KV head, and values of a head: Llama-3-8B's."""


def main() -> None:
    options = parse()
    rng = np.random.default_rng(1)
    layer, plan = layer_of(options, rng), plan_of(options)
    print(heading("host.py"))
    print(f"{options.tokens:,} tokens, {options.heads} KV heads, ratio {options.ratio:g}.\n")
    print(f"| method | {' | '.join(f'{stage}, ms' for stage in STAGES)} | together | {options.layers} layers, s |\n| --- " + "| ---: " * (len(STAGES) + 2) + "|")
    for preset in presets(options, rng):
        ms = stages(preset, layer, plan, options.runs)
        print(f"| {preset.name} | {' | '.join(f'{x:.1f}' for x in ms)} | {sum(ms):.1f} | {sum(ms) * options.layers / 1e3:.2f} |", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--ratio", type=float, default=0.2)
    parser.add_argument("--runs", type=int, default=9)
    return parser.parse_args()


def layer_of(options: argparse.Namespace, rng: np.random.Generator) -> LayerStats:
    n, n_heads = options.tokens, options.heads
    stats = {name: rng.random((n_heads, n), dtype=np.float32) for name in ("mean", "var", "max", "col_entropy", "col_sum")}
    foretold = rng.standard_normal((2, n), dtype=np.float32)
    pos = np.tile(np.arange(n, dtype=np.int32), (n_heads, 1))
    rows = rng.standard_normal((2, n, D), dtype=np.float32)
    asked = 0.1 * rng.standard_normal((GROUP * n_heads, D), dtype=np.float32), np.tile(0.01 * np.eye(D, dtype=np.float32), (GROUP * n_heads, 1, 1))
    return LayerStats(0, options.layers, n_heads, n, np.zeros(n_heads, np.int32), n, pos, foretell=lambda *_: (foretold[0], foretold[1]),
                      rows=lambda _, some=slice(None): (rows[0][some], rows[1][some]), future=lambda _: asked, **stats)


def plan_of(options: argparse.Namespace) -> Plan:
    have = np.full((options.layers, options.heads), options.tokens, np.int32)
    return Plan(int(options.ratio * options.tokens), have, tuple(range(options.layers)), options.tokens, 4, 32, options.ratio)


def presets(options: argparse.Namespace, rng: np.random.Generator) -> list[Preset]:
    """Methods whose score needs neither rows nor queries, and what `auto` is with a profile: made up here."""
    shares = rng.random((options.layers, options.heads)) ** 3
    by_profile = Profile("profile", "", shares=lambda _: shares)
    surrogate = Surrogate(np.zeros((options.layers, options.heads, 1), np.float32), "halves")  # what it foretells is made up too
    snapkv = methods.get("snapkv").score
    return [Preset("auto", KVzap(surrogate), by_profile, "", merge=Summary()), Preset("snapkv, profile", snapkv, by_profile, ""),
            *(methods.get(name) for name in ("snapkv", "adakv", "cake", "dynamickv", "h2o", "streaming"))]


def stages(preset: Preset, layer: LayerStats, plan: Plan, n_runs: int) -> list[float]:
    """Milliseconds of each of STAGES, for the first layer of a prompt."""
    clocks = [one_run(preset, layer, plan) for _ in range(n_runs + 1)][1:]
    return [median(clock.ms[stage] for clock in clocks) for stage in STAGES]


def one_run(preset: Preset, layer: LayerStats, plan: Plan) -> StageClock:
    if isinstance(preset.merge, Summary):
        plan = replace(plan, window=preset.merge.window(plan.n_rows, plan.window))
    clock, spending = StageClock(), preset.budget.start(plan)
    with clock("score"):
        scores = preset.score.score(layer, preset.params)
    with clock("budget"):
        counts = spending.update(0, select.protect(scores, layer.pos, layer.n_seen, plan.sink, plan.window), layer)
    with clock("select"):
        keep = select.keep(scores, counts[0], layer.pos, layer.n_seen, plan.sink, plan.window)
    with clock("merge"):
        if isinstance(preset.merge, Summary):
            assert layer.rows is not None and layer.future is not None
            losses = preset.merge.losses(keep, layer.pos, layer.n_seen, plan.sink, plan.window)
            preset.merge.sum_up(losses, look(layer.rows, losses), layer.future(preset.merge.params.later))
    return clock


if __name__ == "__main__":
    main()
