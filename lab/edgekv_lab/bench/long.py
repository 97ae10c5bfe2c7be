"""The long-context page: memory, speed, and the bytes that a token reads, against the length of the
context."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from edgekv.base import files
from edgekv.base.defaults import whole_ctx
from edgekv.base.sizes import MIB, mib, percent, share, size_text
from edgekv.errors import BadInput
from edgekv.version import __version__
from edgekv_lab import markdown
from edgekv_lab.bench import compare, formats, plot, reads
from edgekv_lab.bench.runner import Measurements
from edgekv_lab.bench.spec import Case, Lists, pair_of
from edgekv_lab.record import commit

FIRST = 4096
TITLE = "# Long contexts"
N_GEN = 32
MARGIN = 2**30
Record = dict[str, Any]


def depths_that_fit(lists: Lists, wished: Sequence[int]) -> list[int]:
    """Contexts at which every row fits into free memory less 1 GiB: the wished ones, or powers of
    two from 4,096 up to the trained context.

    Raises BadInput if not even the first does.
    """
    from edgekv.base.machine import memory_free, rss_now
    from edgekv.choice.choose import choose
    from edgekv.memory.fit import Planner, Wish
    from edgekv.model.blueprint import Blueprint

    free = memory_free() - MARGIN
    with Blueprint(lists.models[0], lists.n_ubatch[0]) as blueprint:
        contexts = list(wished) or [
            n for n in (FIRST * 2**k for k in range(12)) if n <= blueprint.n_ctx_train
        ]
        contexts = contexts or [blueprint.n_ctx_train - N_GEN]  # trained with less than the first
        types = lists.types or [
            pair_of(lists.stored(lists.models[0], lists.kv_method[0], r)) for r in lists.kv_ratio
        ]
        wish = Wish(free, max(contexts), process=rss_now())
        planner = Planner(
            blueprint, choose(lists.kv_method[0], lists.models[0]), wish, lists.n_ubatch[0]
        )

        def peak(n: int) -> int:
            n_ctx = whole_ctx(n + N_GEN)
            n_states = int(lists.fill == "repeat")  # a filled cache comes from a state of its size
            full = [planner.point(n_ctx, 1.0, (kind, kind), "f32") for kind in lists.full]
            compressed = [
                planner.point(n_ctx, r, t, lists.kv_hidden) for r in lists.kv_ratio for t in types
            ]
            return max(p.peak + n_states * p.kv for p in [*full, *compressed])

        fitting = [n for n in contexts if peak(n) <= free]
    if not fitting:
        raise BadInput(
            f"a context of {min(contexts):,} tokens takes {size_text(peak(min(contexts)))}, and "
            f"{size_text(free)} are free beside 1 GiB; give a "
            "smaller -d, or fewer --full caches"
        )
    return fitting


def rows(lists: Lists, depths: Sequence[int]) -> list[Case]:
    """tg32 at every depth; reading what lies before it is timed too."""
    return replace(
        lists, models=lists.models[:1], n_prompt=[], n_gen=[N_GEN], pairs=[], n_depth=depths
    ).cases()


def write(table: Measurements, folder: Path, words: Sequence[str]) -> list[Path]:
    """The page and, where matplotlib is there, its plots (of memory only if contexts were read);
    returns their paths.

    words: the command line's. Raises BadInput if a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    records = [
        r | {"read_ts": _reading(samples)}
        for r, samples in zip(table.records(), table.samples, strict=True)
    ]
    images = _plots(table, records, folder)
    page = folder / "long.md"
    for path, is_ours, text in (
        (page, files.begins_with(TITLE.encode()), _page(table, records, words, images)),
        (folder / "long.json", files.begins_with(b"["), formats.as_json(records)),
    ):
        with files.replaced(path, is_ours, "page of an earlier run") as f:
            f.write(text.encode())
    return [page, folder / "long.json", *images]


def _page(
    table: Measurements, records: Sequence[Record], words: Sequence[str], images: Sequence[Path]
) -> str:
    is_filled = any(map(formats.is_filled, records))
    about = ", ".join(
        [
            f"`{shlex.join(['edgekv', *words])}`",
            f"llama.cpp {records[0]['build_commit']}",
            *_about(records),
            _counted(table.n_rounds, "round"),
        ]
    )
    shown = "".join(f"![{path.stem}]({path.name})\n" for path in images)
    return (
        f"{TITLE}\n\n{about}.\n\n"
        + formats.FILLED * is_filled
        + (shown or "No plots: they need matplotlib (pip install matplotlib).\n")
        + "\n"
        + _rows(table, records)
        + "\n"
        + reads.as_md(records, [case.setting for case in table.cases])
        + "\n"
        + compare.as_md(compare.ratios(table))
    )


def _about(records: Sequence[Record]) -> list[str]:
    """Model, machine, version and date."""
    first = records[0]
    machine = ", ".join(
        filter(None, (first["cpu_info"], first["gpu_info"], _counted(first["n_threads"], "thread")))
    )
    return [
        Path(first["model_filename"]).stem,
        machine,
        f"edgekv {__version__} ({commit()})",
        first["test_time"][:10],
    ]


def _rows(table: Measurements, records: Sequence[Record]) -> str:
    """Where contexts were filled, only what does not depend on reading."""
    is_filled = any(map(formats.is_filled, records))
    rows = []
    for case, r in zip(table.cases, records, strict=True):
        cells = {
            "context": f"{case.n_depth:,}",
            "cache": case.setting,
            "KV used": share(r["kv_bytes_used"], r["kv_bytes_full"]),
            "tokens kept": percent(r["kv_tokens_kept"], r["kv_tokens_full"]),
            "KV allocated MiB": mib(r["kv_bytes_allocated"]),
        }
        if not is_filled:
            cells |= {
                "KV peak MiB": mib(r["kv_bytes_peak"]),
                "process MiB": f"{r['mem_peak_host'] / MIB:,.0f}",
                "read, tokens/s": f"{r['read_ts']:.1f}",
            }
        rows.append(cells | {"write, tokens/s": f"{r['avg_ts']:.2f} ± {r['stddev_ts']:.2f}"})
    return markdown.table(rows[0], (row.values() for row in rows), ("cache",))


def _counted(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def _reading(samples: Sequence[dict[str, Any]]) -> float:
    """Tokens per second while the context was read; 0 if it was filled."""
    return median(
        1e9 * (s["kv_tokens_full"] - N_GEN) / s["depth_ns"] if s["depth_ns"] else 0.0
        for s in samples
    )


def _plots(table: Measurements, records: Sequence[Record], folder: Path) -> list[Path]:
    """The plots' files, none without matplotlib."""
    if find_spec("matplotlib") is None:
        return []
    lines: dict[str, plot.Line] = {}
    for case, r in zip(table.cases, records, strict=True):
        lines.setdefault(case.label, plot.Line(case.label, case.is_full, [])).records.append(r)
    about, was_read = _about(records), not any(map(formats.is_filled, records))
    figures = {"long-memory.png": plot.memory(list(lines.values()), about)} if was_read else {}
    figures["long-speed.png"] = plot.speed(list(lines.values()), about, was_read)
    if records[0]["read_bytes_weights"]:
        figures["long-bytes.png"] = plot.bytes_read(list(lines.values()), about)
    return plot.save(figures, folder)
