"""Quality at equal bytes on several models: the pages quality, ruler and gsm8k of docs/results.

    python benchmarks/quality.py run -m demo -m QWEN.gguf -m GEMMA.gguf --book BOOK.txt \\
        --gsm8k TEST.jsonl --out FOLDER [--only ruler]
    python benchmarks/quality.py tables FOLDER --commit HASH > tables.json

`run` calls `edgekv eval` for each model and measure, which takes hours. A call that was stopped
goes on from where it was; what is there is not measured again. A measure that a model refuses, for
its context is too small, is said in one line and left out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from process import machine

FULL = "f16,q8_0,q5_1,q4_0"
METHODS = "auto;snapkv;adakv;streaming"
RATIOS = "0.5,0.2,0.1,0.05"
RETRIEVAL = "single,multikey,multivalue,multiquery"
SCORES = {
    "score": ("right", "{:.0%}"),
    "kl": ("KL to full f16", "{:.4f}"),
    "same_top": ("same top token", "{:.1%}"),
}
"""Names in the records, in the tables, and their form."""


@dataclass(frozen=True)
class Measure:
    """`edgekv eval TASK`: n samples of n_tokens (0: the task's own), of each book or family."""

    task: str
    n: int
    n_tokens: int = 0
    setting: str = ""
    seed: int = 0
    methods: str = "auto"
    ratios: str = "0.2,0.1"
    full: str = "f16"
    more: tuple[str, ...] = ()

    def words(self) -> list[str]:
        lengths = ["--lengths", str(self.n_tokens)] if self.n_tokens else []
        setting = ["--setting", self.setting] if self.setting else []
        n_ctx = max(4096, self.n_tokens + 1408)
        return [self.task, "-c", str(n_ctx), "-n", str(self.n), "--seed", str(self.seed)] + [
            *lengths,
            *setting,
            *("--methods", self.methods, "--ratios", self.ratios, "--full", self.full),
            *self.more,
        ]


WIDE: dict[str, Any] = {"methods": METHODS, "ratios": RATIOS, "full": FULL}
NEXT, FAMILIES = ("--next", "128"), ("--families", RETRIEVAL)
MEASURES = {
    "kl-2000": Measure("ppl", 1, 2000, more=NEXT, **WIDE),
    "kl-more": Measure("ppl", 4, 2000, seed=1, full="f16,q8_0", more=NEXT),
    "ruler-16000-agnostic": Measure("ruler", 5, 16000, "agnostic", 205, more=FAMILIES),
    "ruler-16000-aware": Measure("ruler", 5, 16000, "aware", 206, more=FAMILIES),
    "needle-4000-agnostic": Measure("needle", 20, 4000, "agnostic", 207, **WIDE),
    "needle-4000-aware": Measure("needle", 20, 4000, "aware", 208, **WIDE),
    "gsm8k-aware": Measure("gsm8k", 300, 0, "aware", 301, ratios="0.2", full="f16,q8_0"),
    "gsm8k-agnostic": Measure("gsm8k", 100, 0, "agnostic", 203, ratios="0.2"),
    "kl-16000": Measure("ppl", 1, 16000, full="f16,q8_0", more=NEXT),
    "ruler-4000-agnostic": Measure("ruler", 10, 4000, "agnostic", 209, more=FAMILIES),
    "ruler-4000-aware": Measure("ruler", 10, 4000, "aware", 210, more=FAMILIES),
    "needle-16000-agnostic": Measure("needle", 10, 16000, "agnostic", 211),
    "needle-16000-aware": Measure("needle", 10, 16000, "aware", 212),
}
"""In the order in which they are made; short ones first."""


def main() -> None:
    options = parse()
    if options.what == "tables":
        print(json.dumps(tables(Path(options.folder), options.commit), indent=1))
        return
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    names = [name for name in MEASURES if options.only in name]
    for name in names:
        for model in options.model:
            measure(model, name, options, folder)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="what", required=True)
    run = commands.add_parser("run")
    run.add_argument("-m", "--model", action="append", required=True)
    run.add_argument("--book", action="append", required=True)
    run.add_argument("--gsm8k", required=True)
    run.add_argument("--out", required=True)
    run.add_argument("--only", default="", help="measures with this in their name")
    run.add_argument("-t", "--threads", default="2")
    made = commands.add_parser("tables")
    made.add_argument("folder")
    made.add_argument("--commit", required=True)
    return parser.parse_args()


def measure(model: str, name: str, options: argparse.Namespace, folder: Path) -> None:
    """One table, into FOLDER/MODEL.MEASURE.json, if it is not there."""
    what, done = MEASURES[name], folder / f"{Path(model).stem}.{name}.json"
    if done.exists():
        return
    files = {"ppl": options.book, "gsm8k": [options.gsm8k]}.get(what.task, [])
    words = ["eval", *what.words(), "-m", model, "-t", options.threads, "-o", "json"]
    words += [word for file in files for word in ("-f", file)]
    words += ["--predictions", str(done.with_suffix(".jsonl"))]
    begin = time.monotonic()
    print(f"{done.stem} ...", file=sys.stderr, flush=True)
    found = subprocess.run(
        [sys.executable, "-m", "edgekv", *words], stdout=subprocess.PIPE, text=True
    )
    if found.returncode == 0:
        part = done.with_suffix(".part")
        part.write_text(found.stdout, encoding="utf-8")
        part.replace(done)
    took = time.monotonic() - begin
    print(f"{done.stem}: {found.returncode or 'done'}, {took:,.0f} s", file=sys.stderr, flush=True)


def tables(folder: Path, commit: str) -> dict[str, Any]:
    """The data of the page: a table for each measure, models behind one another."""
    found: dict[str, Any] = {}
    for name in MEASURES:
        files = sorted(folder.glob(f"*.{name}.json"))
        records = [
            (f.name.removesuffix(f".{name}.json"), json.loads(f.read_text(encoding="utf-8")))
            for f in files
        ]
        if records:
            found[name] = {
                "commit": commit,
                "command": f"edgekv eval {' '.join(MEASURES[name].words())} -m MODEL.gguf",
                "columns": columns(records[0][1][0]),
                "rows": [row for model, some in records for row in rows(model, some)],
            }
    return {"date": date.today().isoformat(), "machine": machine(), "tables": found}


def scores(record: dict[str, Any]) -> list[str]:
    return [name for name in SCORES if name in record]


def columns(record: dict[str, Any]) -> list[list[str]]:
    head = [["model", ""], ["cache", ""], ["type", ""], ["ratio", ""]]
    head += [["of the full f16 cache's bytes", "{:.0%}"]]
    for name in scores(record):
        head += [[*SCORES[name]], ["95 % interval", ""]]
    return [*head, ["samples", "{:,}"]]


def rows(model: str, records: Sequence[dict[str, Any]]) -> Iterator[list[Any]]:
    for x in records:
        cells: list[Any] = [model, x["method"], x["type"], f"{x['ratio']:g}"]
        cells.append(x["kv_bytes"] / x["kv_bytes_full"])
        for name in scores(x):
            ends = [x.get(f"{name}_{end}") for end in ("low", "high")]
            form = SCORES[name][1]
            between = "" if None in ends else " to ".join(form.format(end) for end in ends)
            cells += [x[name], between]
        yield [*cells, x["samples"]]


if __name__ == "__main__":
    main()
