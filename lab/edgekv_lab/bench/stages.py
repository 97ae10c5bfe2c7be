"""Where the time goes while a prompt is compressed: the table of `bench --stages`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from edgekv.base.stats import WORK
from edgekv_lab.bench.spec import Case

if TYPE_CHECKING:
    from edgekv import Llama

HEADER = (
    "| test | setting | stage | seconds | of the prompt | multiply-adds a second | of the peak |\n"
    "| --- | --- | --- | ---: | ---: | ---: | ---: |\n"
)
LEAST = 0.005
"""Of the time: a stage that takes less is in the rest."""
NAMES = {
    "weights": "products with weights",
    "levels": "products with weights, in 8 bits",
    "attention": "attention",
    "observe": "statistics of attention",
    "score": "scores",
    "budget": "budgets",
    "select": "choice of rows",
    "merge": "merge",
    "evict": "eviction",
}


def of(llm: Llama, n_threads: int) -> dict[str, Any] | None:
    """What the last prompt took by stage: milliseconds, of some also multiply-adds; and how many of
    these the threads can do in a millisecond, of WORK. None if nothing was compressed on the CPU.
    """
    from edgekv import native

    if llm.engine is None or llm.engine.offloaded or not llm.engine.turn.clock.work:
        return None
    work = {name: list(pair) for name, pair in llm.engine.turn.clock.work.items()}
    stages = {**work, **{name: [ms, 0.0] for name, ms in llm.engine.turn.clock.ms.items()}}
    peak, of_levels = (native.product_peak(x) * n_threads / 1e3 for x in (False, True))
    peaks = {name: of_levels if name == "levels" else peak for name in WORK}
    return {"stages": stages, "peak": peaks}


def as_md(cases: Sequence[Case], samples: Sequence[Sequence[dict[str, Any]]]) -> str:
    """Medians over the rounds, of the rows that read a prompt and compressed it."""
    lines = [
        f"| {case.test} | {case.setting} | {' | '.join(cells)} |\n"
        for case, rounds in zip(cases, samples, strict=True)
        if case.n_prompt and not (case.n_gen or case.n_depth) and all(x["work"] for x in rounds)
        for cells in _rows(rounds)
    ]
    if not lines:
        return "No row read a prompt on the CPU and compressed it: give -p, and no -n or -d.\n"
    return HEADER + "".join(lines)


def _rows(rounds: Sequence[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    total = median(x["ns"] for x in rounds) / 1e6
    rest = total
    for name, title in NAMES.items():
        found = [x["work"]["stages"][name] for x in rounds]
        ms, n = (median(values) for values in zip(*found, strict=True))
        if ms >= LEAST * total:
            rest -= ms
            yield title, f"{ms / 1e3:.2f}", f"{ms / total:.0%}", *_speed(name, n / ms, rounds)
    yield "the rest", f"{rest / 1e3:.2f}", f"{rest / total:.0%}", "", ""
    yield "all", f"{total / 1e3:.2f}", "100%", "", ""


def _speed(name: str, speed: float, rounds: Sequence[dict[str, Any]]) -> tuple[str, str]:
    if name not in WORK:
        return "", ""
    return f"{speed / 1e6:,.0f} G", f"{speed / median(x['work']['peak'][name] for x in rounds):.0%}"
