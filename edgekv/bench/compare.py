"""Ratios of a compressed row to the full caches beside it, taken within each round, and the most that decoding can gain.

Decoding a token reads all weights and all rows once, so on a machine that is limited by memory bandwidth
(weights + full KV) / (weights + kept KV) is the most that it can gain over the full cache of the same type. Where more is gained, the full
cache was not read at the memory's speed: its attention waits for arithmetic, or another kernel attends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from edgekv.bench.runner import Table
from edgekv.bench.spec import Case

MIB = 2**20


@dataclass(frozen=True)
class Ratio:
    """One compressed row beside one full cache of the same test. speeds: of each round, this row's over the full one's."""

    case: Case
    full: Case
    speeds: tuple[float, ...]
    kv: float
    memory: float | None
    """None where depths were filled."""
    limit: float | None
    """The most that decoding can gain; None for another cache type or a test that reads a prompt."""

    @property
    def speed(self) -> float:
        return median(self.speeds)

    @property
    def reached(self) -> float | None:
        """Share of the possible gain: 1 at the limit, 0 if nothing was gained."""
        return None if self.limit is None or self.limit <= 1.005 else (self.speed - 1) / (self.limit - 1)


def gain_limit(weights: int, kv_full: int, kv_kept: int) -> float:
    """(weights + full KV) / (weights + kept KV), bytes read per token."""
    return (weights + kv_full) / (weights + kv_kept)


def ratios(table: Table) -> list[Ratio]:
    """Every compressed row against every full one of its test."""
    found = []
    for case, mine in zip(table.cases, table.samples, strict=True):
        for other, theirs in zip(table.cases, table.samples, strict=True):
            if case.is_full or not other.is_full or not case.same_test(other):
                continue
            n = table.n_rounds
            speeds = tuple(b["ns"] / a["ns"] for a, b in zip(mine[:n], theirs[:n], strict=True))
            same_type = (case.type_k, case.type_v) == (other.type_k, other.type_v)
            a, b = mine[0], theirs[0]
            limit = gain_limit(a["model_size"], b["kv_bytes_kept"], a["kv_bytes_kept"]) if same_type and case.n_gen and not case.n_prompt else None
            found.append(Ratio(case, other, speeds, a["kv_bytes_kept"] / b["kv_bytes_kept"], None if case.is_filled else _memory(mine) / max(_memory(theirs), 1), limit))
    return found


def _memory(samples: Sequence[dict[str, Any]]) -> int:
    return max(s["mem_peak_host"] or 0 for s in samples)


def as_md(found: Sequence[Ratio]) -> str:
    """The ratios as a table; speeds as the median of the rounds and their span."""
    lines = ["| test | this | beside | speed | from - to | KV bytes | memory | gain limit | reached |",
             "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for x in found:
        memory = f"{x.memory:.2f} x" if x.memory is not None else ""
        limit = f"{x.limit:.2f} x" if x.limit else ""
        reached = f"{100 * x.reached:.0f} %" if x.reached is not None else ""
        lines.append(f"| {x.case.test} | {x.case.setting} | {x.full.setting} | {x.speed:.2f} x | {min(x.speeds):.2f} - {max(x.speeds):.2f} "
                     f"| {x.kv:.2f} x | {memory} | {limit} | {reached} |")
    return "\n".join(lines) + "\n"
