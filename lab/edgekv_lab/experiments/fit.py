"""The plan of `edgekv fit` beside the peak that a process then has, for the demo model and a
synthetic one.

A point is ratio:cache type:context. `edgekv fit --json` plans it in a process of its own; another
one loads the model and reads a prompt that fills the context, and its largest resident size (VmHWM)
is compared. Weights that llama.cpp repacks for the processor (q4_0 on most) stand in memory twice
while a model is loaded, once as pages of the file that the system can take back; the plan does not
count those. With -ngl 99 the memory is that of the GPU, which holds all layers: the peak is what it
had less than before the model was loaded, looked at every 10 ms (`edgekv_lab.bench.lowest`).
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgekv.commands.declare import option
from edgekv.errors import EdgeKVError
from edgekv_lab.bench import synthetic
from edgekv_lab.bench.runner import sample
from edgekv_lab.bench.spec import Case
from edgekv_lab.experiments.experiment import (
    LAYERS,
    MODEL,
    THREADS,
    Options,
    experiment,
    many,
    say,
    sheet,
)
from edgekv_lab.process import edgekv_line

MIB = 2**20
POINTS = (
    "1:f16:4096,1:q8_0:4096,0.5:f16:4096,0.2:f16:4096,0.2:q8_0:4096,"
    "0.1:q4_0:4096,1:f16:8192,0.2:f16:8192,0.2:q8_0:8192"
)
METHOD = "snapkv"
COLUMNS = (
    ("model", ""),
    ("kept", "{:g}"),
    ("cache", ""),
    ("context", "{:,}"),
    ("weights, MiB", "{:,.1f}"),
    ("planned peak, MiB", "{:,.1f}"),
    ("measured peak, MiB", "{:,.1f}"),
    ("of that after loading, MiB", "{:,.1f}"),
    ("measured against planned", "{:+.1f} %"),
)


@dataclass(frozen=True)
class Point:
    ratio: float
    kind: str
    n_ctx: int

    @staticmethod
    def parse(text: str) -> Point:
        ratio, kind, n_ctx = text.split(":")
        return Point(float(ratio), kind, int(n_ctx))


@experiment(
    MODEL,
    option("--synthetic", metavar="SHAPE[:TYPE]", help="As of `edgekv bench`; instead of -m."),
    option("--points", default=POINTS, callback=many(Point.parse), help="RATIO:TYPE:CONTEXT."),
    THREADS,
    LAYERS,
)
def command(o: Options) -> None:
    where = "the GPU" if o.ngl else "the whole process"
    about = f"Memory of {where}; method {METHOD}. The plan is within 5 % if the last column is."
    with model_file(o) as (name, path), sheet(*COLUMNS, about=about, models=[path]) as table:
        for point in o.points:
            say(f"{name}, {point.ratio:g} of {point.kind}, {point.n_ctx} tokens")
            cells = row(point, planned(path, point, o.ngl), measured(path, point, o))
            table.add(name, *cells)


@contextmanager
def model_file(o: Options) -> Iterator[tuple[str, str]]:
    """What to call the model, and its file."""
    if not o.synthetic:
        yield Path(o.model).stem, o.model
        return
    shape, kind = synthetic.parse(o.synthetic)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "synthetic.gguf"
        synthetic.write(path, shape, kind)
        yield f"{shape.name}'s shape, random {kind}", str(path)


def planned(path: str, point: Point, ngl: int) -> dict[str, Any]:
    """The point as `edgekv fit --json` describes it."""
    kept = f"-ctk {point.kind} --ratios {point.ratio:g} --kv-method {METHOD}"
    line = f"fit -c {point.n_ctx} {kept} --memory 1024GiB --json{'' if ngl else ' --device CPU'}"
    words = edgekv_line(*line.split(), "-m", path)
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise EdgeKVError("edgekv fit failed; what it said stands above")
    best: dict[str, Any] = json.loads(done.stdout)["best"]
    return best


def measured(path: str, point: Point, o: Options) -> dict[str, Any]:
    """A sample of `edgekv bench`: a fresh process that reads one prompt."""
    types = point.kind, point.kind
    case = Case(path, point.n_ctx, 0, 0, *types, METHOD, point.ratio)
    return sample(replace(case, n_threads=o.threads, n_gpu_layers=o.ngl))


def row(point: Point, plan: dict[str, Any], got: dict[str, Any]) -> list[Any]:
    on_gpu = got["mem_peak_device"] > 0
    peak = got["mem_peak_device"] if on_gpu else got["mem_peak_host"]
    after = None if on_gpu else (peak - got["peak_loaded"]) / MIB
    sizes = plan["weights"] / MIB, plan["peak"] / MIB, peak / MIB
    cells = [point.ratio, point.kind, point.n_ctx, *sizes, after]
    return [*cells, 100 * (peak / plan["peak"] - 1)]
