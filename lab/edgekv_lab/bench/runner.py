"""Rounds: every row once, one after the other, then again, each sample in a fresh process; ratios
of rows then hold on a noisy machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from edgekv_lab.bench import fields
from edgekv_lab.bench.spec import Case
from edgekv_lab.process import call

CaseProgress = Callable[[int, int, Case], None]


class Measurements:
    """Rows and their samples, round by round: samples[i][r] is row i in round r."""

    def __init__(self, cases: Sequence[Case]) -> None:
        self.cases = list(cases)
        self.samples: list[list[dict[str, Any]]] = [[] for _ in cases]
        self.computed = [0] * len(cases)
        self.bandwidth: dict[int, float] = {}
        """Of main memory, bytes/s by number of threads: the best of all rounds."""
        self.is_short = False
        """An error ended it before all rounds."""

    @property
    def n_rounds(self) -> int:
        """Rounds that all rows have been through."""
        return min(map(len, self.samples), default=0)

    def measured(self) -> Measurements:
        """This table; before its first round is complete, only the rows that have a sample."""
        rows = [
            (case, samples)
            for case, samples in zip(self.cases, self.samples, strict=True)
            if samples
        ]
        if self.n_rounds or not rows:
            return self
        part = Measurements([case for case, _ in rows])
        part.samples, part.bandwidth = [samples for _, samples in rows], self.bandwidth
        return part

    def records(self) -> list[dict[str, Any]]:
        """One record per row, of the rounds that are complete."""
        n = self.n_rounds
        return [
            fields.record(case, samples[:n], computed, self._bandwidth(case, samples[0]))
            for case, samples, computed in zip(self.cases, self.samples, self.computed, strict=True)
        ]

    def _bandwidth(self, case: Case, sample: dict[str, Any]) -> float:
        """0 where another memory counts: a GPU's."""
        return (
            0.0
            if sample["gpu_info"] or not case.only_writes
            else self.bandwidth.get(case.n_threads, 0.0)
        )


def run(
    cases: Sequence[Case],
    repetitions: int,
    progress: CaseProgress = lambda done, total, case: None,
    warm_up: bool = True,
    table: Measurements | None = None,
    verbose: bool = False,
) -> Measurements:
    """All rows, `repetitions` rounds; every other round goes backwards, so that no row is always
    first.

    table: filled as it goes, so that whoever stops it has what is there. verbose: print what
    llama.cpp logs on standard error. Raises EdgeKVError if a row fails.
    """
    table = Measurements(cases) if table is None else table
    order = list(range(len(cases)))
    for number in range(repetitions):
        for n in sorted({case.n_threads for case in cases if case.only_writes}):
            table.bandwidth[n] = max(table.bandwidth.get(n, 0.0), bandwidth(n))
        for i in order if number % 2 == 0 else reversed(order):
            progress(sum(map(len, table.samples)), len(cases) * repetitions, cases[i])
            table.samples[i].append(sample(cases[i], warm_up, verbose))
    table.computed = computed(cases, table.samples)
    progress(len(cases) * repetitions, len(cases) * repetitions, cases[-1])
    return table


def sample(case: Case, warm_up: bool = True, verbose: bool = False) -> dict[str, Any]:
    """One sample in a process of its own; see `measure`."""
    found: dict[str, Any] = child("measure", case, warm_up=warm_up, verbose=verbose)
    return found


def needles(case: Case, n_tokens: int, n_cases: int) -> str:
    """'hits/cases' under a row's setting, in a process of its own; see `needles`."""
    return str(child("needles", case, n_tokens=n_tokens, n_cases=n_cases))


def bandwidth(n_threads: int) -> float:
    """Bytes per second that n_threads read from main memory, in a process of its own; see
    `bandwidth`."""
    request = {"n_threads": n_threads}
    return float(call(f"{__package__}.bandwidth:answer", request, "the memory's speed"))


def child(module: str, case: Case, **more: Any) -> Any:
    """What a module of this package answers about a case. Raises BadInput with the row's name if
    the engine refuses it."""
    what = f"{case.test}, {case.setting}"
    return call(f"{__package__}.{module}:answer", {**asdict(case), **more}, what)


def computed(cases: Sequence[Case], samples: Sequence[Sequence[dict[str, Any]]]) -> list[int]:
    """Bytes that each row should take in host memory; 0 where weights are on a GPU, a depth was not
    read, or there are several conversations."""
    from edgekv_lab.bench.expected import ExpectedBytes

    with ExitStack() as stack:
        models = {(c.model, c.n_ubatch): None for c in cases}
        known = {key: stack.enter_context(ExpectedBytes(*key)) for key in models}
        return [
            0
            if case.is_filled or case.n_parallel > 1 or s[0]["gpu_info"]
            else known[case.model, case.n_ubatch].host(case, s[0])
            for case, s in zip(cases, samples, strict=True)
        ]
