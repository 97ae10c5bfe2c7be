"""How far methods are from the full cache on the same samples: mean difference of the scores in pairs, with its 95 % interval.

    python benchmarks/pairs.py PREDICTIONS... [--methods edgekv,kvzap] [--families single,multikey] [--by length,family]

PREDICTIONS are files of `edgekv eval --predictions` (or -o jsonl), of as many calls as there are; a sample counts under the file that it is
in. Scores in percent. The interval is Student's.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from scipy.stats import t as student

sys.path.append(str(Path(__file__).resolve().parent.parent))

from edgekv.eval.perplexity import FULL  # noqa: E402

Record = dict[str, Any]


def main() -> None:
    options = parse()
    records = [record for path in options.predictions for record in read(path)]
    if options.families:
        records = [r for r in records if r.get("family") in options.families]
    full = {sample(r): r for r in records if r["method"] == FULL}
    pairs: dict[tuple[Any, ...], list[tuple[float, float]]] = {}
    for r in records:
        if r["method"] in (options.methods or {r["method"]} - {FULL}) and sample(r) in full:
            group = (r["setting"], r["method"], r["ratio"], *(r.get(key, "") for key in options.by))
            pairs.setdefault(group, []).append((100 * full[sample(r)]["score"], 100 * r["score"]))
    names = ["setting", "method", "ratio kept", *options.by]
    print(f"| {' | '.join(names)} | {FULL} | score | difference | 95 % interval | samples |\n|{' --- |' * len(names)}{' ---: |' * 5}")
    for group in sorted(pairs, key=lambda g: (g[0], g[1], -g[2], *map(str, g[3:]))):
        print(f"| {' | '.join(map(str, group))} | {row(pairs[group])} |")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("predictions", nargs="+", type=Path)
    for name in ("methods", "families", "by"):
        parser.add_argument(f"--{name}", type=lambda text: text.split(","), default=[])
    return parser.parse_args()


def read(path: Path) -> list[Record]:
    """The predictions in a file, each with the file it is from."""
    lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return [{**line, "file": str(path)} for line in lines if "method" in line]


def sample(r: Record) -> tuple[Any, ...]:
    return r["file"], r["setting"], r["id"]


def row(pairs: list[tuple[float, float]]) -> str:
    more = [score - full for full, score in pairs]
    n, mean = len(more), fmean(more)
    half = student.ppf(0.975, n - 1) * stdev(more) / n**0.5 if n > 1 else float("nan")
    return f"{fmean(full for full, _ in pairs):.1f} | {fmean(score for _, score in pairs):.1f} | {mean:+.1f} | {mean - half:.1f} to {mean + half:.1f} | {n}"


if __name__ == "__main__":
    main()
