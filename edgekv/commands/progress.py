"""How far a long piece of work has come and how long it still takes: a bar, or one line."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from edgekv.commands.terminal import error_console

if TYPE_CHECKING:
    from rich.progress import Progress, Task

_COLD = 4
"""Calls before time is measured: they contain what happens once, such as a model's pages that are
read from disk and graphs that are built."""
_SURE, _SURE_S = 6, 2.0
"""Calls and seconds that have to be measured before a time is said: pieces differ in size."""
_PERIOD_S = 120.0  # the rate is of the last two minutes, so that an estimate follows the machine
_LOW, _HIGH = 0.8, 1.25  # a time that is said is a range: other programs want the processor too
_UNITS = (
    ("second", 1, 10, 90),
    ("minute", 60, 1, 25 * 60),
    ("minute", 60, 5, 90 * 60),
    ("hour", 3600, 1, float("inf")),
)
"""Name, seconds, a number that all are multiples of, and seconds up to which it is taken."""


class WorkBar:
    """`progress(done, total)` for `edgekv.profiles`, as a context manager.

    line: makes the line that is printed once, when it is known how long the work takes, from words
    such as "about 2 to 3 minutes". On a terminal a bar with the time that is left follows it,
    if has_bar: what others print there would tear it.
    """

    def __init__(
        self,
        line: Callable[[str], str],
        clock: Callable[[], float] = time.monotonic,
        has_bar: bool = True,
    ) -> None:
        self._line, self._clock, self._bar = line, clock, _bar(clock)
        self._has_bar = has_bar
        self._task: Any = None
        self._n_calls, self._begin = 0, 0.0
        self.said = False

    def __enter__(self) -> WorkBar:
        if self._has_bar and sys.stderr.isatty():
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar.live.is_started:  # else a plain line end would be printed
            self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        if self._task is None:
            self._task = self._bar.add_task("", total=total, completed=done)
        self._n_calls += 1
        if self._n_calls <= _COLD:  # what is done so far, now or by an earlier run, took no time
            self._begin = self._clock()
            self._bar.reset(self._task, total=total, completed=done)
            return
        self._bar.update(self._task, total=total, completed=done)
        is_sure = self._n_calls >= _COLD + _SURE and self._clock() - self._begin >= _SURE_S
        left = self._bar.tasks[0].time_remaining if is_sure and not self.said else None
        if left:
            self.said = True
            self._bar.console.print(self._line(about(left)), markup=False)


def _bar(clock: Callable[[], float]) -> Progress:
    """A bar on standard error that vanishes in the end."""
    from rich.progress import BarColumn, Progress, ProgressColumn, TaskProgressColumn
    from rich.text import Text

    class Left(ProgressColumn):
        max_refresh = 1.0

        def render(self, task: Task) -> Text:
            if task.time_remaining is None or len(task._progress) < _SURE:
                return Text("measuring how long it takes", style="dim")
            return Text(f"{about(task.time_remaining)} left", style="dim")

    return Progress(
        BarColumn(),
        TaskProgressColumn(),
        Left(),
        console=error_console(),
        transient=True,
        get_time=clock,
        speed_estimate_period=_PERIOD_S,
    )


def about(seconds: float) -> str:
    """A time in words, as a range that it is likely to end in: "about 2 to 3 minutes"."""
    low, high = _LOW * seconds, _HIGH * seconds
    if high < 10:
        return "some seconds"
    name, unit, step = next(u for u in _UNITS if high < u[3])[:3]
    first, last = (int(x / (unit * step) + 0.5) for x in (low, high))
    first = max(first, 1)
    return f"about {first * step} to {max(last, first + 1) * step} {name}s"
