"""What a person sees on standard error: a line, or a bar while something takes long."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

BAR_FROM, BAR_AFTER_S = 256, 0.5
"""Tokens of a prompt and seconds from which there is a bar: a short one needs none."""


def say(line: str) -> None:
    """A line for the user, on standard error."""
    click.echo(f"edgekv: {line}", err=True)


def error_console() -> Console:
    """Where progress and status go; without escape codes if that is no terminal."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)


class ReadingBar:
    """A bar on standard error while a prompt is read, `kv_progress` of a model. Without a terminal
    it shows nothing.

    It is set all the same: this callback is where Python sees a Ctrl-C.
    """

    def __init__(self) -> None:
        from rich.progress import (
            BarColumn,
            Progress,
            TaskProgressColumn,
            TextColumn,
            TimeRemainingColumn,
        )

        self._bar = Progress(
            TextColumn("reading"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            console=error_console(),
            transient=True,
        )
        self._task = self._bar.add_task("reading")
        self._shown_from = time.monotonic() + BAR_AFTER_S
        self._is_shown = False

    def __call__(self, done: int, total: int) -> None:
        if done >= total:
            self.stop()
        elif sys.stderr.isatty() and (total > BAR_FROM or time.monotonic() > self._shown_from):
            self._bar.start()
            self._is_shown = True
            self._bar.update(self._task, completed=done, total=total)

    def stop(self) -> None:
        """Takes the bar away."""
        if self._is_shown:
            self._bar.stop()
            self._is_shown = False
