"""The plan of `edgekv fit` beside the peak that a process then has, for the demo model and a
synthetic one.

    python benchmarks/fit.py [--points 1:f16:4096,0.2:q8_0:8192] [-m demo] [--synthetic
    llama-1b:q8_0] [--threads 2] python benchmarks/fit.py -ngl 99 [...]     memory of the GPU, which
    holds all layers

A point is ratio:cache type:context. `edgekv fit --json` plans it in a process of its own; another
one loads the model and reads a prompt that fills the context, and its largest resident size (VmHWM)
is compared. Weights that llama.cpp repacks for the processor (q4_0 on most) stand in memory twice
while a model is loaded, once as pages of the file that the system can take back; the plan does not
count those. Of a GPU the peak is what it had less than before the model was loaded, looked at every
10 ms (`edgekv_lab.bench.lowest`). Markdown goes to standard output, progress to standard error.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(Path(__file__).resolve().parent)]
sys.path.append(str(ROOT))

from process import demo_path, heading  # noqa: E402

from edgekv_lab.bench import synthetic  # noqa: E402
from edgekv_lab.bench.runner import sample  # noqa: E402
from edgekv_lab.bench.spec import Case  # noqa: E402

MIB = 2**20
POINTS = (
    "1:f16:4096,1:q8_0:4096,0.5:f16:4096,0.2:f16:4096,0.2:q8_0:4096,"
    "0.1:q4_0:4096,1:f16:8192,0.2:f16:8192,0.2:q8_0:8192"
)
METHOD = "snapkv"


@dataclass(frozen=True)
class Point:
    ratio: float
    kind: str
    n_ctx: int

    @staticmethod
    def parse(text: str) -> Point:
        ratio, kind, n_ctx = text.split(":")
        return Point(float(ratio), kind, int(n_ctx))


def main() -> None:
    options = parse()
    print(heading("fit.py"))
    print(
        f"MiB of {'the GPU' if options.ngl else 'the whole process'}; method {METHOD}. The plan is"
        " within 5 % if the last column is.\n"
    )
    print(
        "| model | kept | cache | context | weights | planned peak | measured peak | of that after"
        " loading | measured against planned |"
    )
    print("| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |", flush=True)
    with model_file(options) as (name, path):
        for point in options.points:
            print(
                f"{name}, {point.ratio:g} of {point.kind}, {point.n_ctx} tokens",
                file=sys.stderr,
                flush=True,
            )
            print(
                row(name, point, planned(path, point, options.ngl), measured(path, point, options)),
                flush=True,
            )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", default="demo")
    parser.add_argument("--synthetic", metavar="SHAPE[:TYPE]")
    parser.add_argument(
        "--points",
        type=lambda text: [Point.parse(part) for part in text.split(",")],
        default=POINTS,
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("-ngl", type=int, default=0)
    return parser.parse_args()


@contextmanager
def model_file(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """What to call the model, and its file."""
    if not options.synthetic:
        path = demo_path() if options.model == "demo" else Path(options.model)
        yield path.stem, str(path)
        return
    shape, kind = synthetic.parse(options.synthetic)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "synthetic.gguf"
        synthetic.write(path, shape, kind)
        yield f"{shape.name}'s shape, random {kind}", str(path)


def planned(path: str, point: Point, ngl: int) -> dict[str, Any]:
    """The point as `edgekv fit --json` describes it."""
    kept = f"-ctk {point.kind} --ratios {point.ratio:g} --kv-method {METHOD}"
    line = f"fit -c {point.n_ctx} {kept} --memory 1024GiB --json{'' if ngl else ' --device CPU'}"
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; sys.path.append({str(ROOT)!r}); from edgekv.commands import main; main()",
            *line.split(),
            "-m",
            path,
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        raise SystemExit("edgekv fit failed; what it said stands above")
    return json.loads(done.stdout)["best"]


def measured(path: str, point: Point, options: argparse.Namespace) -> dict[str, Any]:
    """A sample of `edgekv bench`: a fresh process that reads one prompt."""
    return sample(
        Case(
            path,
            point.n_ctx,
            0,
            0,
            point.kind,
            point.kind,
            METHOD,
            point.ratio,
            n_threads=options.threads,
            n_gpu_layers=options.ngl,
        )
    )


def row(name: str, point: Point, plan: dict[str, Any], got: dict[str, Any]) -> str:
    on_gpu = got["mem_peak_device"] > 0
    peak = got["mem_peak_device"] if on_gpu else got["mem_peak_host"]
    after = "" if on_gpu else mib(peak - got["peak_loaded"])
    return (
        f"| {name} | {point.ratio:g} | {point.kind} | {point.n_ctx:,} | {mib(plan['weights'])} |"
        f" {mib(plan['peak'])} | {mib(peak)} | {after} | {100 * (peak / plan['peak'] - 1):+.1f} % |"
    )


def mib(n_bytes: int) -> str:
    return f"{n_bytes / MIB:,.1f}"


if __name__ == "__main__":
    main()
