"""What Tab completes in a chat: commands, and paths behind those that take one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document


class _Commands(Completer):
    def __init__(self, commands: Sequence[str], with_path: Sequence[str]) -> None:
        self._commands, self._with_path = commands, with_path
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        name, blank, rest = text.partition(" ")
        if not blank:
            return [
                Completion(command, start_position=-len(text))
                for command in self._commands
                if text and command.startswith(text)
            ]
        if name not in self._with_path:
            return []
        return self._paths.get_completions(Document(rest.lstrip().lstrip("'\"")), event)


def completer(commands: Sequence[str], with_path: Sequence[str]) -> Completer:
    """For lines that begin with one of `commands`; those of `with_path` are followed by a path."""
    return _Commands(commands, with_path)
