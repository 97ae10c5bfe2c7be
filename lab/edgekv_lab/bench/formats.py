"""A table of rows as md, csv, json, jsonl or sql, in llama-bench's form."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from typing import Any

from edgekv.base import markdown
from edgekv.base.sizes import MIB, mib, percent, share
from edgekv_lab.bench.fields import DEFAULTS, LLAMA_BENCH, OURS, SAMPLES
from edgekv_lab.bench.spec import FILL_FIRST, test_name

Record = dict[str, Any]
GIB = 2**30
SHOWN = {
    "n_gpu_layers": "ngl",
    "n_threads": "threads",
    "n_batch": "n_batch",
    "n_ubatch": "n_ubatch",
    "flash_attn": "fa",
    "n_cpu_moe": "n_cpu_moe",
    "split_mode": "sm",
    "main_gpu": "mg",
    "tensor_split": "ts",
    "tensor_buft_overrides": "ot",
    "load_mode": "load",
}
"""Settings with a column of their own if they differ from llama-bench's defaults, by its
heading."""
USUAL = {**DEFAULTS, "n_batch": 2048, "n_ubatch": 512, "flash_attn": None, "n_gpu_layers": None}
CACHE = ["KV used", "tokens kept", "KV allocated MiB", "KV peak MiB", "process MiB"]
NEEDLE = ["needles found"]
WORDS = {"model", "backend", "sm", "ts", "ot", "load", "type_k", "type_v", "kv_method", *NEEDLE}
"""Columns that hold no numbers."""
FILLED = (
    f"Depths above {FILL_FIRST} are filled with the rows of their first {FILL_FIRST} tokens, again "
    "and again (--fill repeat): they were not read, so no peak was measured.\n\n"
)


def as_md(records: Sequence[Record]) -> str:
    """llama-bench's table, with the cache's columns between test and speed."""
    shown = [name for name in SHOWN if _is_shown(name, records)]
    has_needles = "eval_needle" in records[0]
    head = [
        "model",
        "size",
        "params",
        "backend",
        *(SHOWN[name] for name in shown),
        "type_k",
        "type_v",
        "kv_method",
        "kv_ratio",
        "test",
        "t/s",
        *CACHE,
        *NEEDLE[:has_needles],
    ]
    rows = [
        [
            r["model_type"],
            _size(r["model_size"]),
            _params(r["model_n_params"]),
            r["backends"],
            *(str(r[name]) for name in shown),
            r["type_k"],
            r["type_v"],
            r["kv_method"],
            f"{r['kv_ratio']:g}",
            _test(r),
            f"{r['avg_ts']:.2f} ± {r['stddev_ts']:.2f}",
            share(r["kv_bytes_used"], r["kv_bytes_full"]),
            percent(r["kv_tokens_kept"], r["kv_tokens_full"]),
            mib(r["kv_bytes_allocated"]),
            "" if is_filled(r) else mib(r["kv_bytes_peak"]),
            _memory(r),
            *([r["eval_needle"]] if has_needles else []),
        ]
        for r in records
    ]
    lines = [
        markdown.table(head, rows, WORDS),
        "KV used: of the bytes that all tokens take in a full f16 cache. KV allocated: with room "
        "for new tokens.",
        f"build: {records[0]['build_commit']} ({records[0]['build_number']})",
    ]
    return FILLED * any(map(is_filled, records)) + "\n".join(lines) + "\n"


def is_filled(r: Record) -> bool:
    return bool(r["kv_fill"] == "repeat")


def _test(r: Record) -> str:
    return test_name(r["n_prompt"], r["n_gen"], r["n_depth"])


def _is_shown(name: str, records: Sequence[Record]) -> bool:
    values = {r[name] for r in records}
    if name == "n_threads":
        return True
    if name == "n_gpu_layers":
        return any(r["gpu_info"] for r in records)
    if name == "flash_attn":
        return 0 in values
    return len(values) > 1 or values != {USUAL[name]}


def _memory(r: Record) -> str:
    if is_filled(r):
        return ""
    device = f" + {r['mem_peak_device'] / MIB:,.0f} GPU" if r["mem_peak_device"] else ""
    return f"{r['mem_peak_host'] / MIB:,.0f}{device}"


def _size(n_bytes: int) -> str:
    return f"{n_bytes / MIB:.2f} MiB" if n_bytes < GIB else f"{n_bytes / GIB:.2f} GiB"


def _params(n: int) -> str:
    return f"{n / 1e6:.2f} M" if n < 1e9 else f"{n / 1e9:.2f} B"


def as_json(records: Sequence[Record]) -> str:
    return json.dumps(records, indent=2) + "\n"


def as_jsonl(records: Sequence[Record]) -> str:
    return "".join(json.dumps(r) + "\n" for r in records)


def _flat(records: Sequence[Record]) -> list[Record]:
    """Without the lists of samples; truth values as 0 and 1, as llama-bench writes them."""
    return [
        {k: int(v) if isinstance(v, bool) else v for k, v in r.items() if k not in SAMPLES}
        for r in records
    ]


def as_csv(records: Sequence[Record]) -> str:
    flat, text = _flat(records), io.StringIO()
    text.write(",".join(flat[0]) + "\n")
    csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows(
        list(r.values()) for r in flat
    )
    return text.getvalue()


def as_sql(records: Sequence[Record]) -> str:
    """A table and its rows; columns beyond those with a known kind are text."""
    flat = _flat(records)
    kinds = {**LLAMA_BENCH, **OURS}
    columns = ",\n".join(f"  {name} {_SQL[kinds.get(name, str)]}" for name in flat[0])
    rows = [
        f"INSERT INTO llama_bench ({', '.join(r)}) VALUES "
        f"({', '.join(_quoted(v) for v in r.values())});"
        for r in flat
    ]
    return f"CREATE TABLE IF NOT EXISTS llama_bench (\n{columns}\n);\n\n" + "\n".join(rows) + "\n"


_SQL = {str: "TEXT", int: "INTEGER", bool: "INTEGER", float: "REAL"}


def _quoted(value: Any) -> str:
    return "'" + str(value).replace("'", "''") + "'"


FORMATS = {"md": as_md, "csv": as_csv, "json": as_json, "jsonl": as_jsonl, "sql": as_sql}
