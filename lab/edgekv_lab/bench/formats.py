"""A table of rows as md, csv, json, jsonl or sql, in llama-bench's form."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from typing import Any

from edgekv.base.sizes import MIB, percent, share
from edgekv_lab.bench.fields import DEFAULTS, LLAMA_BENCH, OURS, SAMPLES
from edgekv_lab.bench.spec import FILL_FIRST, test_name
from edgekv_lab.record import table

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
WORDS = ("split_mode", "tensor_split", "tensor_buft_overrides", "load_mode")
"""Those of them that are no numbers."""
USUAL = {**DEFAULTS, "n_batch": 2048, "n_ubatch": 512, "flash_attn": None, "n_gpu_layers": None}
FILLED = (
    f"Depths above {FILL_FIRST} are filled with the rows of their first {FILL_FIRST} tokens, again "
    "and again (--fill repeat): they were not read, so no peak was measured.\n\n"
)


def columns(records: Sequence[Record]) -> list[tuple[str, str, Callable[[Record], Any]]]:
    """llama-bench's columns with the cache's beside its speed: head, format, value of a row."""
    shown = [name for name in SHOWN if _is_shown(name, records)]
    found: list[tuple[str, str, Callable[[Record], Any]]] = [
        ("model", "", lambda r: r["model_type"]),
        ("size", "{}", lambda r: _size(r["model_size"])),
        ("params", "{}", lambda r: _params(r["model_n_params"])),
        ("backend", "", lambda r: r["backends"]),
        *((SHOWN[x], "{}" * (x not in WORDS), lambda r, x=x: r[x]) for x in shown),
        *((x, "", lambda r, x=x: r[x]) for x in ("type_k", "type_v", "kv_method")),
        ("kv_ratio", "{:g}", lambda r: r["kv_ratio"]),
        ("test", "{}", _test),
        ("t/s", "{:.2f} ± {:.2f}", lambda r: [r["avg_ts"], r["stddev_ts"]]),
        ("KV used", "{}", lambda r: share(r["kv_bytes_used"], r["kv_bytes_full"])),
        ("tokens kept", "{}", lambda r: percent(r["kv_tokens_kept"], r["kv_tokens_full"])),
        ("KV allocated MiB", "{:,.1f}", lambda r: r["kv_bytes_allocated"] / MIB),
        (
            "KV peak MiB",
            "{:,.1f}",
            lambda r: None if is_filled(r) else r["kv_bytes_peak"] / MIB,
        ),
        ("process MiB", "{}", _memory),
    ]
    if any(r["kv_recall"] for r in records):
        found += [
            ("recall", "{:g}", lambda r: r["kv_recall"] or None),
            ("index MiB", "{:,.1f}", lambda r: _in_mib(r, "kv_bytes_index")),
            ("archive MiB", "{:,.1f}", lambda r: _in_mib(r, "kv_bytes_archive")),
            ("looked up MiB", "{:,.1f}", lambda r: _in_mib(r, "kv_bytes_recalled")),
        ]
    if "eval_needle" in records[0]:
        found.append(("needles found", "", lambda r: r["eval_needle"]))
    return found


def rows(records: Sequence[Record]) -> list[list[Any]]:
    """A row for each record, of the values of `columns`."""
    return [[value(r) for _, _, value in columns(records)] for r in records]


def as_md(records: Sequence[Record]) -> str:
    """llama-bench's table, with the cache's columns between test and speed."""
    lines = [
        table([(head, form) for head, form, _ in columns(records)], rows(records)),
        "KV used: of the bytes that all tokens take in a full f16 cache. KV allocated: with room "
        "for new tokens.",
        f"build: {records[0]['build_commit']} ({records[0]['build_number']})",
    ]
    return FILLED * any(map(is_filled, records)) + "\n".join(lines) + "\n"


def is_filled(r: Record) -> bool:
    return bool(r["kv_fill"] == "repeat")


def _test(r: Record) -> str:
    return test_name(r["n_prompt"], r["n_gen"], r["n_depth"], r["n_parallel"], r["spec_type"])


def _is_shown(name: str, records: Sequence[Record]) -> bool:
    values = {r[name] for r in records}
    if name == "n_threads":
        return True
    if name == "n_gpu_layers":
        return any(r["gpu_info"] for r in records)
    if name == "flash_attn":
        return 0 in values
    return len(values) > 1 or values != {USUAL[name]}


def _in_mib(r: Record, name: str) -> float | None:
    """Of a row with recall."""
    return r[name] / MIB if r["kv_recall"] else None


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
