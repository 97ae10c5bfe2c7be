"""How long a prompt is read: edgekv beside the unpatched library of the same version, and attention
alone.

The demo model's Q4_1 weights have no fast path in llama.cpp, so copies with other weights are made
(in a temporary folder). Every prompt is read in a process of its own through `eval`: the unpatched
library, edgekv at ratio 1 (llama.cpp's own path), and edgekv with a ratio, layer by layer. A round
reads each once; later rounds go backwards; the table gives medians, of ratios too. `--clock
processor` counts processor time instead of wall time, for a machine that has other work; it is for
one thread, because threads that wait for each other spend it too.

--synthetic: a model of Llama-3.2-1B's shape, random q4_0 weights, 16,000 tokens (long).
--attention: attention alone (test-kernels --perf).

--precision: logits against f32 throughout. It is measured on a copy with f32 weights: with
quantised ones llama.cpp rounds activations to 8 bits before every product, and which way they round
changes the logits more than the cache does. The reference is the unpatched library with an f32
cache and without flash attention, which would round it to f16.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from math import comb
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from edgekv.commands.declare import option
from edgekv.commands.values import COUNT
from edgekv.models.demo import demo_path
from edgekv_lab.experiments.checkout import native, stock_environment
from edgekv_lab.experiments.experiment import (
    RATIO,
    THREADS,
    Options,
    experiment,
    many,
    say,
    sheet,
)
from edgekv_lab.experiments.prompts import llama_1b, measured, saved, text_tokens, type_id
from edgekv_lab.sides.reading import Measurement

Array = NDArray[np.float64]
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


@experiment(
    option("--weights", default="q4_0,q8_0", callback=many(str), help="Of the demo's copies."),
    option("--tokens", callback=many(int), help="Lengths of the prompts."),
    option("--types", callback=many(str), help="Cache types."),
    RATIO,
    option("--method", default="streaming", metavar="NAME", help="A method."),
    THREADS,
    option("-r --rounds", type=COUNT, help="Rounds; of --precision: prompts."),
    option(
        "--sides",
        default="stock,whole,edgekv",
        callback=many(str),
        help="Of them; whole: edgekv at ratio 1.",
    ),
    option(
        "--clock", type=click.Choice(("wall", "processor")), default="wall", help="What counts."
    ),
    option("--synthetic", is_flag=True, help="A model of Llama-3.2-1B's shape."),
    option("--attention", is_flag=True, help="Attention alone."),
    option("--precision", is_flag=True, help="Logits instead of seconds."),
)
def command(o: Options) -> None:
    o.tokens = o.tokens or ([16000] if o.synthetic else [128] if o.precision else [512, 2000, 6000])
    o.rounds = o.rounds or (60 if o.precision else 3)
    o.types = o.types or (["f16", "q8_0", "q4_0"] if o.precision else ["f16", "q8_0"])
    if o.attention:
        attention(o)
        return
    with tempfile.TemporaryDirectory() as folder:
        if o.precision:
            precision(o, Path(folder))
            return
        for model in models(o, Path(folder)):
            speed(o, model)


# ---- models and prompts


def models(o: Options, folder: Path) -> list[Model]:
    n_tokens = max(o.tokens)
    if o.synthetic:
        shape, path, random = llama_1b(folder, n_tokens)
        return [Model(f"{shape.name}'s shape, random q4_0 weights", path, saved(folder, random))]
    demo = Path(demo_path())
    tokens = saved(folder, text_tokens(str(demo), n_tokens))
    return [
        Model(
            f"{demo.name.split('.')[0]}, weights as {kind}",
            requantised(demo, folder / f"demo-{kind}.gguf", kind),
            tokens,
        )
        for kind in o.weights
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


NAMES = {"stock": "stock", "whole": "edgekv, ratio 1", "edgekv": "edgekv, ratio {:g}"}


def speed(o: Options, model: Model) -> None:
    clock = {"wall": "prefill_s", "processor": "prefill_cpu_s"}[o.clock]
    names = {side: NAMES[side].format(o.ratio) for side in o.sides}
    others = [side for side in o.sides if side != "stock"]
    columns = [(f"{name}, tokens/s", "{:,.0f}") for name in names.values()]
    columns += [(f"{names[side]}, x stock", "{:.2f}") for side in others]
    about = (
        f"**{model.name}**, method {o.method}, {o.threads} threads, {o.clock} time, {o.rounds}"
        " rounds"
    )
    name = f"speed-{Path(model.path).stem}"
    models = [model.path]
    with sheet(
        ("tokens", "{:,}"), ("cache", ""), *columns, name=name, about=about, models=models
    ) as table:
        for n_prompt in o.tokens:
            for kind in o.types:
                sides = {x: of_side(o, model, n_prompt, kind, x) for x in o.sides}
                what = f"{model.name}, {n_prompt} tokens, {kind}"
                found = [
                    one_round(sides, f"{what}, round {i}", i % 2 == 1) for i in range(o.rounds)
                ]
                s = [{side: result[clock] for side, result in times.items()} for times in found]
                speeds = [median(n_prompt / times[side] for times in s) for side in o.sides]
                ratios = [median(times["stock"] / times[side] for times in s) for side in others]
                table.add(n_prompt, kind, *speeds, *ratios)


def of_side(o: Options, model: Model, n_prompt: int, kind: str, side: str) -> Measurement:
    what = Measurement(
        "stock", model.path, model.tokens, n_prompt, 0, type_id(kind), o.threads, method=o.method
    )
    ratio = o.ratio if side == "edgekv" else 1.0
    return what if side == "stock" else replace(what, side="edgekv", ratio=ratio)


def one_round(
    sides: dict[str, Measurement], what: str, backwards: bool
) -> dict[str, dict[str, Any]]:
    say(what)
    times = {name: measured(sides[name]) for name in (reversed(sides) if backwards else sides)}
    return {name: times[name] for name in sides}


# ---- precision


def precision(o: Options, folder: Path) -> None:
    """As many prompts of each length as there are rounds, one behind the other in the text: one
    token's logits say little.
    """
    o.weights = ["f32"]
    text = text_tokens(str(demo_path()), max(o.tokens) * o.rounds)
    model = replace(models(o, folder)[0], tokens=saved(folder, text))
    about = (
        f"{model.name}: NMSE of the last token's logits against f32 throughout. Geometric means"
        f" over {o.rounds} prompts and their quotient; the interval that it has in 95 % of"
        " 10,000 resamplings of the prompts; the sign test of its being 1."
    )
    with sheet(*PRECISION, name="precision", about=about, models=[model.path]) as table:
        for n_prompt in o.tokens:
            prompts = partial(logits, o, folder, model, n_prompt)
            exact = prompts("f32", "stock", flash=False)
            for kind in o.types:
                say(f"{n_prompt} tokens, {kind}, {o.rounds} prompts")
                stock, ours = (nmse(prompts(kind, side), exact) for side in ("stock", "edgekv"))
                table.add(n_prompt, kind, *paired(stock, ours))


PRECISION = (
    ("tokens", "{:,}"),
    ("cache", ""),
    ("stock", "{:.1e}"),
    ("edgekv", "{:.1e}"),
    ("edgekv / stock", "{:.2f}"),
    ("95 % of resamplings", "{:.2f} to {:.2f}"),
    ("edgekv worse in", "{} of {}"),
    ("chance of that", "{:.2f}"),
)


def logits(
    o: Options, folder: Path, model: Model, n_prompt: int, kind: str, side: str, flash: bool = True
) -> Array:
    """[n_prompts, n_vocab] Of the last token of each prompt."""
    what, file = of_side(o, model, n_prompt, kind, side), folder / "logits.npy"
    measured(replace(what, n_prompts=o.rounds, flash=flash, logits=str(file)))
    found: Array = np.load(file).astype(np.float64)
    return found


def nmse(x: Array, exact: Array) -> Array:
    """[n_prompts]"""
    return ((x - exact) ** 2).sum(axis=1) / (exact**2).sum(axis=1)


def paired(stock: Array, ours: Array) -> list[Any]:
    """Cells of a row. stock, ours: errors [n_prompts] of the same prompts, which differ by far more
    than the sides do.
    """
    n, quotients = len(stock), np.log(ours / stock)
    means = quotients[np.random.default_rng(0).integers(0, n, (10_000, n))].mean(axis=1)
    low, high = np.exp(np.quantile(means, [0.025, 0.975]))
    n_worse = int((quotients > 0).sum())
    p = min(1.0, 2 * sum(comb(n, k) for k in range(max(n_worse, n - n_worse), n + 1)) / 2**n)
    means_of = [float(np.exp(np.log(errors).mean())) for errors in (stock, ours)]
    quotient = means_of[1] / means_of[0]
    return [*means_of, quotient, [float(low), float(high)], [n_worse, n], p]


# ---- attention alone

ATTENTION = (
    ("rows", ""),
    ("head size", "{}"),
    ("heads / KV heads", "{} / {}"),
    ("queries behind rows", "{} behind {:,}"),
    ("stock ms", "{:.1f}"),
    ("edgekv ms", "{:.1f}"),
    ("x stock", "{:.1f}"),
    ("GFLOP/s", "{:.0f}"),
    ("of the peak", "{:.0%}"),
    ("column sums ms", "{:.1f}"),
)


def attention(o: Options) -> None:
    """The native program's cases, with one thread (its processor time) and with the wanted number
    (wall time).
    """
    for n in dict.fromkeys((1, o.threads)):
        done = subprocess.run(
            [native("test-kernels"), "--perf", str(n), str(5 * o.rounds)],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        head, *cases = map(json.loads, done.stdout.splitlines())
        peak, clock = head["peak_gflops"], "processor time" if n == 1 else "wall time"
        about = (
            f"{n} thread{'s' if n > 1 else ''}, {clock}, fastest of {5 * o.rounds}; independent"
            f" multiply-adds in registers reach {peak:.0f} GFLOP/s (f32)."
        )
        with sheet(*ATTENTION, name=f"attention-{n}", about=about) as table:
            for x in cases:
                table.add(
                    *(x["type"], x["d"], [x["n_head"], x["n_head_kv"]]),
                    [x["n_tokens"], x["n_rows"] - x["n_tokens"]],
                    *(x["stock_ms"], x["ours_ms"], x["stock_ms"] / x["ours_ms"]),
                    *(x["ours_gflops"], x["ours_gflops"] / peak, x["columns_ms"]),
                )
