"""How near `auto` comes to the full cache, before and after the contest, on books that no
calibration knows.

    python benchmarks/contest.py measure -m MODEL.gguf --profile NEW.gguf --before OLD.gguf \\
        -f BOOK.txt -f BOOK.txt -n 6 -o NAME.json
    python benchmarks/contest.py tables --commit HASH *.json > tables.json

`measure` reads passages of 2,000 tokens once for each cache type, compresses a copy by each method
and ratio, and feeds the next 128 tokens: the KL divergence to the full f16 cache, the mean over
them. It writes every passage's number. `tables` makes a table from these files.
--prepared says how long the preparation took: seconds, and seconds of processor.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

import edgekv
from edgekv.base.files import anything, replaced
from edgekv.choice.choose import choose
from edgekv.learn.cache_type import store_as
from edgekv.learn.contest import kind
from edgekv.learn.divergence import divergence, log_softmax
from edgekv.learn.reading import Reading, feed
from edgekv.methods import Preset
from edgekv.models.demo import demo_path
from edgekv.native import OUTPUTS

N_TEXT, N_NEXT, RATIOS = 2000, 128, (0.2, 0.1)
Row = tuple[str, float, str, Preset]
"""Name, ratio, cache type and what runs."""


def rows(model: str, profile: str, before: str) -> list[Row]:
    """What is measured, those of a cache type behind one another, f16 first."""
    full = choose("full", model)
    found: list[Row] = [(f"full {t}", 1.0, t, full) for t in ("f16", "q8_0", "q4_0")]
    for ratio in RATIOS:
        after = choose("auto", model, profile, ratio)
        assert after.types, "the profile has no contest"
        found += [
            ("auto after", ratio, kind(*after.types), after),
            ("auto before", ratio, "q8_0", choose("kvzap-summary", model, before)),
            ("snapkv", ratio, "q8_0", choose("snapkv", model)),
            ("random", ratio, "q8_0", choose("random", model)),
        ]
    order = list(dict.fromkeys(row[2] for row in found))
    return sorted(found, key=lambda row: (order.index(row[2]), not row[3].keeps_all))


def passages(llm: Any, books: Sequence[str], n: int) -> Iterator[tuple[str, list[int]]]:
    """n places, spread over the books and within them."""
    for i in range(n):
        path = Path(books[i % len(books)])
        text = path.read_text(encoding="utf-8")
        begin = text.find("\n\n", int(len(text) * (0.1 + 0.8 * (i + 0.5) / n)))
        tokens = llm.tokenize(text[begin : begin + 12 * (N_TEXT + N_NEXT)].encode())
        yield f"{path.stem} {begin}", tokens[: N_TEXT + N_NEXT]


def measure(o: argparse.Namespace) -> None:
    model = str(demo_path()) if o.model == "demo" else o.model
    asked = rows(model, o.profile, o.before)
    llm = edgekv.Llama(
        model,
        kv_ratio=0.5,
        kv_method="snapkv",
        n_ctx=N_TEXT + N_NEXT + 128,
        verbose=False,
        n_threads=2,
        n_threads_batch=2,
    )
    record: dict[str, Any] = {
        "model": Path(model).stem,
        "date": date.today().isoformat(),
        "edgekv": edgekv.__version__,
        "n_text": N_TEXT,
        "n_next": N_NEXT,
        "contest": [asked_row[3].measured for asked_row in asked if asked_row[3].measured],
        "prepared": o.prepared and dict(zip(("seconds", "cpu_seconds"), o.prepared, strict=True)),
        "passages": [],
    }
    for name, tokens in passages(llm, o.books, o.n):
        got = one(llm, asked, tokens[:N_TEXT], tokens[N_TEXT:])
        record["passages"].append({"passage": name, "rows": got})
        with replaced(o.output, anything, "record") as f:
            f.write(json.dumps(record, indent=1).encode())
        print(name, *(f"{x['name']} {x['ratio']:g}: {x['kl']:.4f}" for x in got), sep="\n  ")
    for line in table(record):
        print(*line)


def one(llm: Any, asked: Sequence[Row], text: list[int], fed: list[int]) -> list[dict[str, Any]]:
    """The distances of one passage."""
    found, reading, whole, now, plain = [], None, None, "", False
    for name, ratio, kinds, preset in asked:
        if kinds != now or plain and not preset.keeps_all:
            reading, now = None, kinds  # frees its state
            plain = store_as(llm, kinds, plain=preset.keeps_all)
            here = {row[3].name: row[3] for row in asked if row[2] == kinds}
            reading = Reading(llm, text, list(here.values()))
        assert reading is not None
        reading.compress(preset, replace(llm.settings, preset=preset, ratio=ratio))
        stats = llm.kv_stats()
        parts = [fed[i : i + OUTPUTS] for i in range(0, len(fed), OUTPUTS)]
        said = log_softmax(np.concatenate([feed(llm, part, every=True) for part in parts]))
        whole = said if whole is None else whole
        found.append(
            {
                "name": name,
                "ratio": ratio,
                "types": kinds,
                "method": preset.name,
                "kl": float(divergence(whole, said).mean()),
                "same_top": float((whole.argmax(axis=1) == said.argmax(axis=1)).mean()),
                "bytes": stats.n_bytes_used / stats.n_bytes_full,
                "kept": stats.n_kept / stats.n_seen,
            }
        )
    return found


COLUMNS = [
    ["cache", ""],
    ["types", ""],
    ["method", ""],
    ["of the full f16 cache's bytes", "{:.0f} %"],
    ["tokens kept", "{:.0f} %"],
    ["KL to full f16", "{:.4f}"],
    ["standard error", "{:.4f}"],
    ["same top token", "{:.1f} %"],
]


def table(record: dict[str, Any]) -> list[list[Any]]:
    """Rows of COLUMNS: means over the passages."""
    by_row: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for passage in record["passages"]:
        for row in passage["rows"]:
            by_row.setdefault((row["name"], row["ratio"]), []).append(row)
    found = []
    for (name, ratio), some in sorted(by_row.items(), key=lambda x: (-x[0][1], x[0][0])):
        kl = [row["kl"] for row in some]
        error = float(np.std(kl, ddof=1) / np.sqrt(len(kl))) if len(kl) > 1 else None
        shares = [100 * float(np.mean([r[x] for r in some])) for x in ("bytes", "kept")]
        same = 100 * float(np.mean([row["same_top"] for row in some]))
        label = name + f" at {ratio:g}" * (ratio < 1)
        method = some[0]["method"].replace("_", r"\_") if name.startswith("auto") else None
        numbers = [*(round(x, 1) for x in shares), round(float(np.mean(kl)), 5)]
        found.append([label, some[0]["types"], method, *numbers, error, round(same, 2)])
    return found


def tables(o: argparse.Namespace) -> None:
    """The page's data: a table of each record, and one of what preparing took."""
    records = [json.loads(Path(path).read_text(encoding="utf-8")) for path in o.records]
    prepared = [[r["model"], *r["prepared"].values()] for r in records if r["prepared"]]
    data = {
        "date": date.today().isoformat(),
        "machine": "two cores of a busy AMD EPYC, a plain build",
        "commit": o.commit,
        "command": "python benchmarks/contest.py measure -m MODEL --profile NEW --before OLD ...",
        "tables": {
            **{
                record["model"]: {
                    "columns": COLUMNS,
                    "rows": table(record),
                    "contest": record["contest"],
                    "passages": record["passages"],
                }
                for record in records
            },
            "prepare": {
                "columns": [
                    ["model", ""],
                    ["seconds", "{:.0f}"],
                    ["seconds of processor", "{:.0f}"],
                ],
                "rows": prepared,
            },
        },
    }
    print(json.dumps(data, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    verbs = parser.add_subparsers(required=True)
    m = verbs.add_parser("measure")
    m.add_argument("-m", "--model", required=True)
    m.add_argument("--profile", required=True, help="with a contest")
    m.add_argument("--before", required=True, help="the profile that auto had before")
    m.add_argument("-f", "--books", action="append", required=True)
    m.add_argument("-n", type=int, default=6)
    m.add_argument("-o", "--output", required=True)
    m.add_argument("--prepared", type=float, nargs=2)
    m.set_defaults(run=measure)
    t = verbs.add_parser("tables")
    t.add_argument("records", nargs="+")
    t.add_argument("--commit", required=True)
    t.set_defaults(run=tables)
    o = parser.parse_args()
    o.run(o)


if __name__ == "__main__":
    sys.exit(main())
