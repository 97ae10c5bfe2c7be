"""Whether a token is written behind a filled cache (`edgekv bench --fill repeat`) as fast as behind one that was read.

    python benchmarks/fill.py [-m demo] [--depth 4096] [--types f16,q8_0] [--ratio 0.2] [--tokens 64] [--threads 2] [--rounds 2]

Both kinds take turns within a round, every sample in a process of its own; the last column is the median of the ratios taken within rounds.
Markdown goes to standard output, progress to standard error.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(Path(__file__).resolve().parent)]
sys.path.append(str(ROOT))

from process import demo_path, heading  # noqa: E402

from edgekv.bench.runner import Table, run  # noqa: E402
from edgekv.bench.spec import Case  # noqa: E402

METHOD = "snapkv"


def main() -> None:
    options = parse()
    path = str(demo_path()) if options.model == "demo" else options.model
    case = Case(path, 0, options.tokens, options.depth, n_threads=options.threads)
    settings = [x for kind in options.types for x in (case.full(kind), replace(case, type_k=kind, type_v=kind, kv_method=METHOD, kv_ratio=options.ratio))]
    table = run([replace(x, fill=fill) for x in settings for fill in ("read", "repeat")], options.rounds, progress)
    print(heading("fill.py"))
    print(f"{Path(path).stem}, {case.test}, {options.threads} threads, {options.rounds} rounds.\n")
    print(as_md(table))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", default="demo")
    parser.add_argument("--depth", type=int, default=4096)
    parser.add_argument("--types", type=lambda text: text.split(","), default=["f16", "q8_0"])
    parser.add_argument("--ratio", type=float, default=0.2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    return parser.parse_args()


def progress(done: int, total: int, case: Case) -> None:
    print(f"{done} of {total}: {case.setting}, {case.fill}", file=sys.stderr, flush=True)


def as_md(table: Table) -> str:
    """A line for each setting; its rows stand behind one another, the one that was read first."""
    lines = ["| cache | rows of each head at the end | read, tokens/s | filled, tokens/s | filled against read |", "| --- | ---: | ---: | ---: | ---: |"]
    speeds = [[1e9 * case.n_gen / s["ns"] for s in samples] for case, samples in zip(table.cases, table.samples, strict=True)]
    for i in range(0, len(table.cases), 2):
        read, filled = speeds[i], speeds[i + 1]
        kept = [f"{samples[0]['kv_tokens_kept']:,.0f}" for samples in table.samples[i : i + 2]]
        assert kept[0] == kept[1], "the same number of rows, or nothing is compared"
        ratio = median(b / a for a, b in zip(read, filled, strict=True))
        lines.append(f"| {table.cases[i].setting} | {kept[0]} | {median(read):.1f} | {median(filled):.1f} | {ratio:.2f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
