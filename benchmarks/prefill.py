"""How long a prompt is read: edgekv beside the unpatched library of the same version, and attention
alone.

    python benchmarks/prefill.py [--weights q4_0,q8_0] [--tokens 512,2000,6000] [--types f16,q8_0]
                                 [--threads 2] [--rounds 3]
    python benchmarks/prefill.py --synthetic [--tokens 16000]
        a model of Llama-3.2-1B's shape, random q4_0 weights (long)
    python benchmarks/prefill.py --attention
        attention alone (test-kernels --perf)
    python benchmarks/prefill.py --precision [--tokens 128] [--types f16,q8_0,q4_0] [--rounds 60]
        logits against f32 throughout

The demo model's Q4_1 weights have no fast path in llama.cpp, so copies with other weights are made
(in a temporary folder). Every prompt is read in a process of its own (measure.py) through `eval`:
the unpatched library, edgekv at ratio 1 (llama.cpp's own path), and edgekv with a ratio, layer by
layer. A round reads each once; later rounds go backwards; the table gives medians, of ratios too.
`--clock processor` counts processor time instead of wall time, for a machine that has other work;
it is for one thread, because threads that wait for each other spend it too.

Precision is measured on a copy with f32 weights: with quantised ones llama.cpp rounds activations
to 8 bits before every product, and which way they round changes the logits more than the cache
does. The reference is the unpatched library with an f32 cache and without flash attention, which
would round it to f16. Markdown goes to standard output, progress to standard error. Nothing here
passes or fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from math import comb
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]
sys.path.append(str(HERE.parent))

import numpy as np  # noqa: E402
from measure import Measurement  # noqa: E402
from process import (  # noqa: E402
    TYPES,
    demo_path,
    heading,
    llama_1b,
    measured,
    saved,
    stock_environment,
    text_tokens,
)

FILE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 7}
"""llama_ftype of the copies."""
QUANTIZE = """
import sys, edgekv.llama_cpp as llama_cpp
params = llama_cpp.llama_model_quantize_default_params()
params.ftype, params.nthread, params.allow_requantize = int(sys.argv[3]), 1, True
sys.exit(llama_cpp.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), params))
"""


@dataclass(frozen=True)
class Model:
    name: str
    path: str
    tokens: str


def main() -> None:
    options = parse()
    print(heading("prefill.py"))
    if options.attention:
        print(attention(options))
        return
    with tempfile.TemporaryDirectory() as folder:
        if options.precision:
            print(precision(options, Path(folder)))
            return
        print(
            f"Ratio {options.ratio:g}, method {options.method}, {options.threads} threads,"
            f" {options.clock} time, {options.rounds} rounds.\n"
        )
        for model in models(options, Path(folder)):
            print(f"**{model.name}**\n\n{table(options, model)}", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=lambda text: text.split(","), default=["q4_0", "q8_0"])
    parser.add_argument("--tokens", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--types", type=lambda text: text.split(","))
    parser.add_argument("--ratio", type=float, default=0.2)
    parser.add_argument("--method", default="streaming")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, help="of --precision: prompts")
    parser.add_argument(
        "--sides",
        type=lambda text: text.split(","),
        default=["stock", "whole", "edgekv"],
        help="whole: edgekv at ratio 1",
    )
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall")
    for part in ("synthetic", "attention", "precision"):
        parser.add_argument(f"--{part}", action="store_true")
    options = parser.parse_args()
    options.tokens = options.tokens or (
        [16000] if options.synthetic else [128] if options.precision else [512, 2000, 6000]
    )
    options.rounds = options.rounds or (60 if options.precision else 3)
    options.types = options.types or (
        ["f16", "q8_0", "q4_0"] if options.precision else ["f16", "q8_0"]
    )
    return options


# ---- models and prompts


def models(options: argparse.Namespace, folder: Path) -> list[Model]:
    n_tokens = max(options.tokens)
    if options.synthetic:
        shape, path, random = llama_1b(folder, n_tokens)
        return [Model(f"{shape.name}'s shape, random q4_0 weights", path, saved(folder, random))]
    demo = demo_path()
    tokens = saved(folder, text_tokens(str(demo), n_tokens))
    return [
        Model(
            f"{demo.name.split('.')[0]}, weights as {kind}",
            requantised(demo, folder / f"demo-{kind}.gguf", kind),
            tokens,
        )
        for kind in options.weights
    ]


def requantised(source: Path, target: Path, kind: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", QUANTIZE, str(source), str(target), str(FILE_TYPES[kind])],
        env=stock_environment(),
        capture_output=True,
    )
    assert done.returncode == 0 and target.exists(), done.stderr.decode()
    return str(target)


# ---- whole prompts


def table(options: argparse.Namespace, model: Model) -> str:
    clock = {"wall": "prefill_s", "processor": "prefill_cpu_s"}[options.clock]
    names = {
        "stock": "stock",
        "whole": "edgekv, ratio 1",
        "edgekv": f"edgekv, ratio {options.ratio:g}",
    }
    columns = [f"{names[side]}, tokens/s" for side in options.sides] + [
        f"{names[side]}, x stock" for side in options.sides if side != "stock"
    ]
    lines = [
        f"| tokens | cache | {' | '.join(columns)} |",
        "| ---: | --- " + "| ---: " * len(columns) + "|",
    ]
    for n_prompt in options.tokens:
        for kind in options.types:
            shared = dict(
                model=model.path,
                tokens=model.tokens,
                n_prompt=n_prompt,
                n_decode=0,
                n_threads=options.threads,
                type=TYPES[kind],
            )
            sides = {
                "stock": Measurement("stock", **shared),
                "whole": Measurement("edgekv", ratio=1.0, **shared),
                "edgekv": Measurement(
                    "edgekv", ratio=options.ratio, method=options.method, **shared
                ),
            }
            sides = {name: sides[name] for name in options.sides}
            what = f"{model.name}, {n_prompt} tokens, {kind}"
            rounds = [
                one_round(sides, f"{what}, round {i + 1}", i % 2 == 1)
                for i in range(options.rounds)
            ]
            lines.append(
                row(
                    n_prompt,
                    kind,
                    [{name: result[clock] for name, result in times.items()} for times in rounds],
                )
            )
    return "\n".join(lines) + "\n"


def one_round(
    sides: dict[str, Measurement], what: str, backwards: bool
) -> dict[str, dict[str, Any]]:
    print(what, file=sys.stderr, flush=True)
    times = {name: measured(sides[name]) for name in (reversed(sides) if backwards else sides)}
    return {name: times[name] for name in sides}


def row(n_prompt: int, kind: str, rounds: list[dict[str, float]]) -> str:
    """rounds: seconds of each side."""
    speeds = [f"{median(n_prompt / times[name] for times in rounds):,.0f}" for name in rounds[0]]
    ratios = [
        f"{median(times['stock'] / times[name] for times in rounds):.2f}"
        for name in rounds[0]
        if name != "stock"
    ]
    return f"| {n_prompt:,} | {kind} | {' | '.join(speeds + ratios)} |"


# ---- precision


def precision(options: argparse.Namespace, folder: Path) -> str:
    """As many prompts of each length as there are rounds, one behind the other in the text: one
    token's logits say little.
    """
    options.weights = ["f32"]
    text = text_tokens(str(demo_path()), max(options.tokens) * options.rounds)
    model = models(options, folder)[0]
    model = replace(model, tokens=saved(folder, text))
    lines = [
        (
            "| tokens | cache | stock | edgekv | edgekv / stock | 95 % of resamplings | edgekv"
            " worse in | chance of that |"
        ),
        "| ---: | --- " + "| ---: " * 6 + "|",
    ]
    for n_prompt in options.tokens:
        shared = dict(
            model=model.path,
            tokens=model.tokens,
            n_prompt=n_prompt,
            n_prompts=options.rounds,
            n_decode=0,
            n_threads=options.threads,
        )
        exact = logits(folder, Measurement("stock", type=TYPES["f32"], flash=False, **shared))
        for kind in options.types:
            print(
                f"{n_prompt} tokens, {kind}, {options.rounds} prompts", file=sys.stderr, flush=True
            )
            stock = logits(folder, Measurement("stock", type=TYPES[kind], **shared))
            ours = logits(
                folder,
                Measurement(
                    "edgekv", type=TYPES[kind], ratio=options.ratio, method=options.method, **shared
                ),
            )
            lines.append(
                f"| {n_prompt:,} | {kind} | {paired(nmse(stock, exact), nmse(ours, exact))} |"
            )
    return (
        f"{model.name}: NMSE of the last token's logits against f32 throughout. Geometric means"
        f" over {options.rounds} prompts and their quotient; the interval that it has in 95 % of"
        " 10,000 resamplings of the prompts; the sign test of its being 1.\n\n"
        + "\n".join(lines)
        + "\n"
    )


def logits(folder: Path, what: Measurement) -> np.ndarray:
    """[n_prompts, n_vocab]"""
    file = folder / "logits.npy"
    measured(replace(what, logits=str(file)))
    return np.load(file).astype(np.float64)


def nmse(x: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """[n_prompts]"""
    return ((x - exact) ** 2).sum(axis=1) / (exact**2).sum(axis=1)


def paired(stock: np.ndarray, ours: np.ndarray) -> str:
    """Cells of a row. stock, ours: errors [n_prompts] of the same prompts, which differ by far more
    than the sides do.
    """
    n, quotients = len(stock), np.log(ours / stock)
    means = quotients[np.random.default_rng(0).integers(0, n, (10_000, n))].mean(axis=1)
    low, high = np.exp(np.quantile(means, [0.025, 0.975]))
    n_worse = int((quotients > 0).sum())
    p = min(1.0, 2 * sum(comb(n, k) for k in range(max(n_worse, n - n_worse), n + 1)) / 2**n)
    stock_mean, ours_mean = (np.exp(np.log(errors).mean()) for errors in (stock, ours))
    return (
        f"{stock_mean:.1e} | {ours_mean:.1e} | {ours_mean / stock_mean:.2f} | {low:.2f} to"
        f" {high:.2f} | {n_worse} of {n} | {p:.2f}"
    )


# ---- attention alone


def attention(options: argparse.Namespace) -> str:
    """The native program's cases, with one thread (its processor time) and with the wanted number
    (wall time).
    """
    parts = []
    for n_threads in dict.fromkeys((1, options.threads)):
        done = subprocess.run(
            [program(), "--perf", str(n_threads), str(5 * options.rounds)],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        head, *cases = map(json.loads, done.stdout.splitlines())
        peak = head["peak_gflops"]
        clock = "processor time" if n_threads == 1 else "wall time"
        parts += [
            (
                f"{n_threads} thread{'s' if n_threads > 1 else ''}, {clock}, fastest of"
                f" {5 * options.rounds}; independent multiply-adds in registers reach {peak:.0f}"
                " GFLOP/s (f32).\n"
            ),
            (
                "| rows | head size | heads / KV heads | queries behind rows | stock ms | edgekv ms"
                " | x stock | GFLOP/s | of the peak | column sums ms |"
            ),
            "| --- " + "| ---: " * 9 + "|",
        ]
        parts += [
            f"| {case['type']} | {case['d']} | {case['n_head']} / {case['n_head_kv']} |"
            f" {case['n_tokens']} behind {case['n_rows'] - case['n_tokens']:,} |"
            f" {case['stock_ms']:.1f} | {case['ours_ms']:.1f} |"
            f" {case['stock_ms'] / case['ours_ms']:.1f} | {case['ours_gflops']:.0f} |"
            f" {case['ours_gflops'] / peak:.0%} | {case['columns_ms']:.1f} |"
            for case in cases
        ]
        parts.append("")
    return "\n".join(parts)


def program() -> str:
    folder = Path(os.environ.get("EDGEKV_NATIVE_TESTS") or HERE.parent / "build" / "native-tests")
    for path in (folder / "test-kernels", folder / "test-kernels.exe"):
        if path.exists():
            return str(path)
    raise SystemExit(
        f"test-kernels is not in {folder}: `python3 cli.py test` builds it, or set"
        " EDGEKV_NATIVE_TESTS to its folder"
    )


if __name__ == "__main__":
    main()
