"""The terminal of a chat: lines in, progress out, Ctrl-C. Without a terminal the same, plainly."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from edgekv import folders
from edgekv.commands import text

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from rich.console import Console

    from edgekv import Llama

PROMPT = "> "
BAR_AFTER_S = 0.5  # a short prompt needs no bar


def is_interactive() -> bool:
    """Whether a person types: lines are edited and a Ctrl-C ends a reply only."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def typed_lines() -> Iterator[str]:
    """Lines a person types, with history over sessions, until Ctrl-D. Ctrl-C empties the line."""
    from prompt_toolkit import PromptSession

    session: PromptSession[str] = PromptSession(history=_history())
    while True:
        try:
            yield session.prompt(PROMPT)
        except KeyboardInterrupt:
            continue
        except EOFError:
            return


def _history() -> History:
    """What was typed before; kept in memory only if the folder cannot be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    path = folders.data() / "history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        return FileHistory(str(path))
    except OSError:
        return InMemoryHistory()


def piped_lines() -> Iterator[str]:
    """The lines of standard input. Raises BadInput for one that is longer than any context."""
    while line := sys.stdin.readline(text.DOCUMENT_MAX + 1):
        if len(line) > text.DOCUMENT_MAX:
            raise text.too_long("a line of standard input")
        yield line.rstrip("\r\n")


class ReadingBar:
    """A bar on standard error while a prompt is read, `kv_progress` of a model. Without a terminal it shows nothing.

    It is set all the same: this callback is where Python sees a Ctrl-C.
    """

    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        self._bar = Progress(TextColumn("reading"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn(),
                             console=error_console(), transient=True)
        self._task = self._bar.add_task("reading")
        self._begin = time.monotonic()
        self._is_shown = False
        self.is_reading = False

    def __call__(self, done: int, total: int) -> None:
        self.is_reading = done < total
        if not self.is_reading:
            self.stop()
        elif sys.stderr.isatty() and time.monotonic() - self._begin > BAR_AFTER_S:
            self._bar.start()
            self._is_shown = True
            self._bar.update(self._task, completed=done, total=total)

    def stop(self) -> None:
        """Takes the bar away."""
        if self._is_shown:
            self._bar.stop()
            self._is_shown = False


@contextmanager
def reading_bar(llm: Llama) -> Iterator[ReadingBar]:
    """A bar for whatever prompts `llm` reads meanwhile."""
    bar = ReadingBar()
    llm.kv_progress = bar
    try:
        yield bar
    finally:
        bar.stop()
        llm.kv_progress = None


def error_console() -> Console:
    """Where progress and status go; without escape codes if that is no terminal."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)


@contextmanager
def interruptible(stop: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C calls `stop` instead of raising KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():  # only there Python handles signals
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: stop())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def killable() -> Iterator[None]:
    """Ctrl-C ends the process at once, without a word: while modules and weights are loaded."""
    default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if threading.current_thread() is not threading.main_thread() or not default:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def write(text: str) -> None:
    """A piece of the result, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def status(line: str) -> None:
    """A dim line on standard error."""
    error_console().print(line, style="dim", markup=False)
