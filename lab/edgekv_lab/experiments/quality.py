"""Quality at equal bytes on several models: the pages quality, ruler and gsm8k of docs/results.

Calls `edgekv eval` for each model and measure, which takes hours. A call that was stopped goes on
from where it was; what is in --out is not measured again. A measure that a model refuses, for its
context is too small, is said in one line and left out.
"""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgekv.commands.declare import option
from edgekv_lab import record
from edgekv_lab.experiments.experiment import THREADS, Options, experiment, say, sheet
from edgekv_lab.process import edgekv_line

FULL = "f16,q8_0,q5_1,q4_0"
METHODS = "auto;snapkv;adakv;streaming"
RATIOS = "0.5,0.2,0.1,0.05"
RETRIEVAL = "single,multikey,multivalue,multiquery"


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


@experiment(
    option("-m --models", multiple=True, required=True, help="Files; may be repeated."),
    option("--books", multiple=True, required=True, help="Texts; may be repeated."),
    option("--gsm8k", required=True, help="Its problems, in lines of JSON."),
    option("--out", required=True, metavar="FOLDER", help="Where parts and predictions lie."),
    option("--only", default="", help="Measures with this in their name."),
    THREADS,
)
def command(o: Options) -> None:
    folder = Path(o.out)
    folder.mkdir(parents=True, exist_ok=True)
    for name in [name for name in MEASURES if o.only in name]:
        parts = {model: measured(model, name, o) for model in o.models}
        found = [(Path(model).stem, x) for model, one in parts.items() for x in one]
        if not found:
            continue
        columns = [(head, form) for head, form in found[0][1].columns]
        about = f"edgekv eval {' '.join(MEASURES[name].words())}"
        with sheet(("model", ""), *columns, name=name, about=about, models=o.models) as table:
            for model, one in found:
                for row in one.rows:
                    table.add(model, *row)


def measured(model: str, name: str, o: Options) -> list[record.Record]:
    """The record in FOLDER/MODEL.MEASURE.json, which is made if it is not there; none if the model
    refuses."""
    what, done = MEASURES[name], Path(o.out) / f"{Path(model).stem}.{name}.json"
    if not done.exists():
        files = {"ppl": o.books, "gsm8k": [o.gsm8k]}.get(what.task, [])
        words = ["eval", *what.words(), "-m", model, "-t", str(o.threads), "--record", str(done)]
        words += [word for file in files for word in ("-f", file)]
        words += ["--predictions", str(done.with_suffix(".jsonl"))]
        begin = time.monotonic()
        say(f"{done.stem} ...")
        code = subprocess.run(edgekv_line(*words), stdout=subprocess.DEVNULL).returncode
        say(f"{done.stem}: {code or 'done'}, {time.monotonic() - begin:,.0f} s")
    return list(record.read(done).values()) if done.exists() else []
