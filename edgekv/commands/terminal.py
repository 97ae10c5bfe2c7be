"""The terminal of a chat: lines in, progress out, Ctrl-C. Without a terminal the same, plainly."""

from __future__ import annotations

import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from edgekv.base import folders, text
from edgekv.base.console import ReadingBar, error_console
from edgekv.commands.stream import Piece, refused_prompts
from edgekv.commands.wrap import Wrap, lines
from edgekv.documents import plain

if TYPE_CHECKING:
    from prompt_toolkit.history import History

    from edgekv import Llama

PROMPT = "> "
CONTINUED = ". "


def is_interactive() -> bool:
    """Whether a person types: lines are edited and a Ctrl-C ends a reply only."""
    return sys.stdin.isatty() and sys.stdout.isatty()


QUOTES = '"""'
"""Begin and end a text of several lines, as in Ollama."""


def typed_lines(commands: Sequence[str], with_path: Sequence[str]) -> Iterator[str]:
    """What a person types, with history over sessions, until Ctrl-D. Ctrl-C empties the line.

    commands: names that Tab completes, as it does paths behind those of with_path.
    """
    from prompt_toolkit import PromptSession
    from prompt_toolkit.shortcuts import CompleteStyle

    from edgekv.commands.completion import completer

    session: PromptSession[str] = PromptSession(
        history=_history(),
        completer=completer(commands, with_path),
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,
    )
    while True:
        try:
            typed = quoted(session.prompt(PROMPT), lambda: session.prompt(CONTINUED))
        except KeyboardInterrupt:
            continue
        except EOFError:
            return
        yield typed


def piped_lines() -> Iterator[str]:
    """The lines of standard input. Raises BadInput for one that is longer than any context."""

    def read() -> str:
        line = sys.stdin.readline(plain.DOCUMENT_MAX + 1)
        if len(line) > plain.DOCUMENT_MAX:
            raise plain.too_long("a line of standard input")
        if not line:
            raise EOFError
        return line.rstrip("\r\n")

    while True:
        try:
            line = read()
        except EOFError:
            return
        yield quoted(line, read)


def quoted(line: str, more: Callable[[], str]) -> str:
    """A text between triple quotes, to which `more` adds lines; any other line as it is.

    Such a text begins with a line end, so that it is no command whatever its first letter. Raises
    what `more` raises, but where there are no more lines the text ends.
    """
    begin = line.lstrip()
    if not begin.startswith(QUOTES):
        return line
    lines = [begin.removeprefix(QUOTES)]
    while not lines[-1].rstrip().endswith(QUOTES):
        try:
            lines.append(more())
        except EOFError:
            break
    return "\n" + "\n".join(lines).rstrip().removesuffix(QUOTES)


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


@contextmanager
def interruptible(stop: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C calls `stop` instead of raising KeyboardInterrupt."""
    # only there Python handles signals
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: stop())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def reading(llm: Llama) -> Iterator[None]:
    """A `with` block in which `llm` reads a prompt. Ctrl-C stops that. Raises EdgeKVError."""
    with interruptible(llm.kv_cancel), reading_bar(llm), refused_prompts(llm):
        yield


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


OPEN, CLOSE = "<think>\n", "\n</think>\n\n"
"""Stand around a thought, whatever the model's own tags are."""


class ReplyPrinter:
    """A reply as it comes. For a person: words whole at the terminal's edge, thoughts dim, nothing
    that steers the terminal. Else as it is.
    """

    def __init__(self, for_person: bool) -> None:
        self._for_person = for_person
        self._wrap = Wrap(lambda: width(sys.stdout) or 80)
        self._in_thought = False

    def write(self, piece: Piece) -> None:
        if piece.is_thought and not self._in_thought:
            self._show(OPEN, True)
        elif self._in_thought and not piece.is_thought:
            self._show(CLOSE, True)
            if self._for_person:
                write(_dimmed(self._wrap.end(), True))
        self._in_thought = piece.is_thought
        self._show(piece.text, piece.is_thought)

    def end(self) -> None:
        """What was held back, and a line end."""
        if self._for_person:
            write(_dimmed(self._wrap.end(), self._in_thought))
        write("\n")

    def _show(self, shown: str, is_thought: bool) -> None:
        if not self._for_person:
            write(shown)
            return
        write(_dimmed(self._wrap.feed(text.printable(shown)), is_thought))


def show(llm: Llama, reply: Iterable[Piece], stop: Callable[[], None], for_person: bool) -> None:
    """Prints a reply as it comes, with a bar while the prompt is read. Ctrl-C calls `stop`."""
    shown = ReplyPrinter(for_person)
    with interruptible(stop), reading_bar(llm) as bar:
        for piece in reply:
            bar.stop()
            shown.write(piece)
    shown.end()


def _dimmed(text: str, is_dim: bool) -> str:
    return f"\x1b[2m{text}\x1b[0m" if is_dim and text else text


def width(stream: TextIO | None = None) -> int | None:
    """Columns of the terminal that a stream goes to (standard error), None if that is none."""
    stream = stream or sys.stderr
    return shutil.get_terminal_size().columns if stream.isatty() else None


@contextmanager
def busy(what: str) -> Iterator[Callable[[str], None]]:
    """Shows on a terminal that work goes on, and what it is about; gives what changes the words."""
    if not sys.stderr.isatty():
        yield lambda words: None
        return
    from rich.text import Text

    with error_console().status(Text(what)) as shown:
        yield lambda words: shown.update(Text(words))


def status(line: str) -> None:
    """A dim line on standard error."""
    error_console().print(lines(line, width()), style="dim", markup=False)
