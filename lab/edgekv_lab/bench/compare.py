"""Ratios of a compressed row to the full caches beside it, taken within each round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from statistics import fmean, stdev
from typing import Any

from edgekv_lab.bench.runner import Measurements
from edgekv_lab.bench.spec import Case
from edgekv_lab.record import table

T95 = tuple(
    map(
        float,
        """
            12.706 4.303 3.182 2.776 2.571 2.447 2.365 2.306 2.262 2.228 2.201 2.179
            2.160 2.145 2.131 2.120 2.110 2.101 2.093 2.086 2.080 2.074 2.069 2.064
            2.060 2.056 2.052 2.048 2.045 2.042
        """.split(),
    )
)
"""Student's t for 95 %, two-sided, with 1 to 30 degrees of freedom; more are near the normal's
1.96."""


@dataclass(frozen=True)
class Ratio:
    """One compressed row beside one full cache of the same test. speeds: of each round, this row's
    over the full one's."""

    case: Case
    full: Case
    speeds: tuple[float, ...]
    kv: float
    """Of the bytes in use."""
    memory: float | None
    """None where depths were filled."""

    @property
    def speed(self) -> float:
        """The geometric mean."""
        return exp(fmean(map(log, self.speeds)))

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % interval of `speed`, None of a single round."""
        n = len(self.speeds)
        if n < 2:
            return None
        half = (T95[n - 2] if n - 2 < len(T95) else 1.96) * stdev(map(log, self.speeds)) / sqrt(n)
        return self.speed / exp(half), self.speed * exp(half)


def ratios(measured: Measurements) -> list[Ratio]:
    """Every compressed row against every full one of its test."""
    found = []
    for case, mine in zip(measured.cases, measured.samples, strict=True):
        for other, theirs in zip(measured.cases, measured.samples, strict=True):
            if case.is_full or not other.is_full or not case.same_test(other):
                continue
            n = measured.n_rounds
            speeds = tuple(b["ns"] / a["ns"] for a, b in zip(mine[:n], theirs[:n], strict=True))
            memory = None if case.is_filled else _memory(mine) / max(_memory(theirs), 1)
            found.append(
                Ratio(
                    case,
                    other,
                    speeds,
                    mine[0]["kv_bytes_used"] / theirs[0]["kv_bytes_used"],
                    memory,
                )
            )
    return found


def _memory(samples: Sequence[dict[str, Any]]) -> int:
    return max(s["mem_peak_host"] or 0 for s in samples)


COLUMNS = (
    *((head, "") for head in ("test", "this", "beside")),
    *((head, "{:.2f} x") for head in ("KV used", "process memory", "speed")),
    ("95 % interval", "{:.2f} to {:.2f}{}"),
)


def rows(found: Sequence[Ratio]) -> list[list[Any]]:
    """Values of COLUMNS; where the rounds show no difference in speed, the interval says so."""
    return [
        [
            *(x.case.test, x.case.setting, x.full.setting),
            *(x.kv, x.memory, x.speed),
            _interval(x) or "one round",
        ]
        for x in found
    ]


def _interval(x: Ratio) -> list[Any]:
    if x.interval is None:
        return []
    low, high = x.interval
    return [low, high, ", no difference shown" * (low <= 1 <= high)]


def as_md(found: Sequence[Ratio]) -> str:
    """The ratios as a table."""
    return table(COLUMNS, rows(found))
