"""The long-context page: memory and speed against the length of the context, with the limit that memory bandwidth sets."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from edgekv.bench import compare, formats
from edgekv.bench.runner import Table
from edgekv.bench.spec import Case, Lists
from edgekv.errors import BadInput
from edgekv.sizes import size_text

FIRST = 4096
N_GEN = 32
MARGIN = 2**30
MIB = 2**20
Record = dict[str, Any]


def depths_that_fit(lists: Lists, wished: Sequence[int]) -> list[int]:
    """Contexts at which every row fits into free memory less 1 GiB: the wished ones, or powers of two from 4,096 up to the trained context.

    Raises BadInput if not even the first does.
    """
    from edgekv.blueprint import Blueprint
    from edgekv.choose import choose
    from edgekv.fit import Planner, Wish
    from edgekv.machine import memory_free, rss_now

    free = memory_free() - MARGIN
    with Blueprint(lists.models[0], lists.n_ubatch[0]) as blueprint:
        contexts = list(wished) or [n for n in (FIRST * 2**k for k in range(12)) if n <= blueprint.n_ctx_train]
        contexts = contexts or [blueprint.n_ctx_train - N_GEN]  # trained with less than the first
        planner = Planner(blueprint, choose(lists.kv_method[0], lists.models[0]), Wish(free, max(contexts), process=rss_now()), lists.n_ubatch[0])

        def peak(n: int) -> int:
            n_ctx = -(-(n + N_GEN) // 256) * 256
            n_states = int(lists.fill == "repeat")  # a filled cache comes from a state of its size
            full = [planner.point(n_ctx, 1.0, (kind, kind), "f32") for kind in lists.full]
            compressed = [planner.point(n_ctx, r, t, lists.kv_hidden) for r in lists.kv_ratio for t in lists.types]
            return max(p.peak + n_states * p.kv for p in [*full, *compressed])

        fitting = [n for n in contexts if peak(n) <= free]
    if not fitting:
        raise BadInput(f"a context of {min(contexts):,} tokens takes {size_text(peak(min(contexts)))}, and {size_text(free)} are free beside 1 GiB; give a "
                       "smaller -d, or fewer --full caches")
    return fitting


def rows(lists: Lists, depths: Sequence[int]) -> list[Case]:
    """tg32 at every depth; reading what lies before it is timed too."""
    return replace(lists, models=lists.models[:1], n_prompt=[], n_gen=[N_GEN], pairs=[], n_depth=depths).cases()


def write(table: Table, folder: Path, words: Sequence[str]) -> list[Path]:
    """The page and, where matplotlib is there, its plots (of memory only if contexts were read); returns their paths. words: the command line's."""
    folder.mkdir(parents=True, exist_ok=True)
    plots = _plots(table, folder)
    page = folder / "long.md"
    _replace(page, _page(table, words, plots).encode())
    _replace(folder / "long.json", formats.as_json(table.records()).encode())
    return [page, folder / "long.json", *plots]


def _page(table: Table, words: Sequence[str], plots: Sequence[Path]) -> str:
    records, first = table.records(), table.samples[0][0]
    is_filled = any(map(formats.is_filled, records))
    heading = (f"# Long contexts\n\n`{shlex.join(['edgekv', *words])}`, edgekv {_version()}, llama.cpp {first['build_commit']}, {first['cpu_info']}"
               f"{', ' + first['gpu_info'] if first['gpu_info'] else ''}, {records[0]['model_type']}, {_counted(records[0]['n_threads'], 'thread')}, "
               f"{_counted(table.n_rounds, 'round')}.\n\n") + formats.FILLED * is_filled
    images = "".join(f"![{path.stem}]({path.name})\n" for path in plots) or "No plots: they need matplotlib (pip install matplotlib).\n"
    rows = _filled_rows(table, records) if is_filled else _read_rows(table, records)
    has_note = not is_filled and any(r["note"] for r in records)
    notes = "\n\\* measured memory is more than 2 % off what shapes say; `note` in long.json.\n" * has_note
    limit = ("\nDecoding reads all weights and all rows once per token: (weights + full KV) / (weights + kept KV) is the most that it can gain over the "
             "full cache of the same type where memory bandwidth decides, and `reached` the share of that gain. Above 100 % the full cache was not read at "
             "the memory's speed: its attention waits for arithmetic.\n\n")
    return heading + images + "\n" + "\n".join(rows) + "\n" + notes + limit + compare.as_md(compare.ratios(table))


def _read_rows(table: Table, records: Sequence[Record]) -> list[str]:
    lines = ["| context | cache | read, tokens/s | write, tokens/s | KV MiB | KV peak MiB | memory MiB |", "| ---: | --- | ---: | ---: | ---: | ---: | ---: |"]
    for case, samples, r in zip(table.cases, table.samples, records, strict=True):
        lines.append(f"| {case.n_depth:,} | {case.setting} | {_reading(samples):.1f} | {r['avg_ts']:.2f} ± {r['stddev_ts']:.2f} "
                     f"| {r['kv_bytes_kept'] / MIB:.1f} | {r['kv_bytes_peak'] / MIB:.1f} | {r['mem_peak_host'] / MIB:.0f}{' *' if r['note'] else ''} |")
    return lines


def _filled_rows(table: Table, records: Sequence[Record]) -> list[str]:
    """Only what does not depend on reading."""
    return ["| context | cache | write, tokens/s | KV MiB |", "| ---: | --- | ---: | ---: |",
            *(f"| {case.n_depth:,} | {case.setting} | {r['avg_ts']:.2f} ± {r['stddev_ts']:.2f} | {r['kv_bytes_kept'] / MIB:.1f} |"
              for case, r in zip(table.cases, records, strict=True))]


def _version() -> str:
    """edgekv's version, and in a checkout its commit."""
    import subprocess

    import edgekv

    git = ["git", "-C", str(Path(edgekv.__file__).parent.parent), "rev-parse", "--short", "HEAD"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    except OSError:
        commit = ""
    return f"{edgekv.__version__}{f' ({commit})' if commit else ''}"


def _counted(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def _reading(samples: Sequence[dict[str, Any]]) -> float:
    """Tokens per second while the context was read."""
    return median(1e9 * (s["kv_tokens_full"] - N_GEN) / s["depth_ns"] for s in samples)


def _plots(table: Table, folder: Path) -> list[Path]:
    """PNGs of memory and of speed against the context, none without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("Agg")
    speed = _plot(table, folder / "long-speed.png", "tokens/s while writing", lambda r: r["avg_ts"], limits=True)
    if any(case.is_filled for case in table.cases):
        return [speed]
    return [_plot(table, folder / "long-memory.png", "peak memory, MiB", lambda r: r["mem_peak_host"] / MIB, limits=False), speed]


def _plot(table: Table, path: Path, title: str, value: Any, limits: bool) -> Path:
    """One line per setting; with `limits` the most that each compressed one can reach, dashed."""
    import io

    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    records = table.records()
    colours: dict[str, Any] = {}
    for setting in dict.fromkeys(case.setting for case in table.cases):
        points = [(case.n_depth, value(r)) for case, r in zip(table.cases, records, strict=True) if case.setting == setting]
        colours[setting] = axes.plot(*zip(*points, strict=True), marker="o", label=setting)[0].get_color()
    speeds = {case: r["avg_ts"] for case, r in zip(table.cases, records, strict=True)}
    for setting, colour in colours.items() if limits else ():
        best = [(x.case.n_depth, speeds[x.full] * x.limit) for x in compare.ratios(table) if x.case.setting == setting and x.limit]
        if best:
            axes.plot(*zip(*best, strict=True), linestyle="--", color=colour, alpha=0.6, label=f"{setting}: limit")
    axes.set(xlabel="context, tokens", ylabel=title, ylim=(0, None))
    axes.legend(fontsize="small")
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=120)
    _replace(path, data.getvalue())
    return path


def _replace(path: Path, data: bytes) -> None:
    """Written beside and renamed."""
    beside = path.with_suffix(path.suffix + ".partial")
    beside.write_bytes(data)
    beside.replace(path)
