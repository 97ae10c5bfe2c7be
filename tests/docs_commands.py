"""The command lines in the pages: what stands in a block of code or in a quotation of one line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import click

from edgekv.commands import main

STARTS = ("edgekv", "python3 cli.py", "python -m edgekv")
EXPERIMENTS = ("edgekv-lab",)
NOT_EDGEKV = ("test",)
"""What `cli.py` does itself."""


def commands(text: str, starts: tuple[str, ...] = STARTS) -> Iterator[list[str]]:
    """The words behind `edgekv`, or another start, of each command line in the blocks of a Markdown
    page."""
    for line in _lines(text):
        for words in _simple(line):
            started = next((s.split() for s in starts if words[: len(s.split())] == s.split()), [])
            rest = words[len(started) :]
            if started and rest[:1] != list(NOT_EDGEKV):
                yield rest


def quoted(text: str) -> Iterator[list[str]]:
    """The words behind `edgekv` of what prose has in backquotes."""
    for line in re.findall(r"`(edgekv [^`\n]+)`", text):
        yield next(_simple(line), [])[1:]


def scripts(text: str) -> Iterator[str]:
    """The file of the checkout that each line `python FILE ...` in the blocks runs."""
    for line in _lines(text):
        for words in _simple(line):
            named = re.fullmatch(r"python3? (\S+/\S+[.]py)", " ".join(words[:2]))
            if named:
                yield named[1]


def parsed(args: list[str], command: click.Command = main) -> click.Context:
    """What the real parser makes of a command's words. Raises click.ClickException."""
    above = None
    while True:
        context = command.make_context(command.name or "edgekv", list(args), parent=above)
        if not isinstance(command, click.Group):
            return context
        _, found, args = command.resolve_command(context, _rest(context))
        assert found is not None
        command, above = found, context


def _rest(context: click.Context) -> list[str]:
    """The words that a group leaves to its command."""
    return [*getattr(context, "_protected_args", []), *context.args]


def _lines(text: str) -> list[str]:
    """Lines in fenced blocks of a shell, and in indented ones; a backslash goes on."""
    fenced = "\n".join(re.findall(r"^```(?:sh|text)?\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    indented = "\n".join(re.findall(r"^    (\S.*(?:\\\n.*)*)$", text, re.MULTILINE))
    return (fenced + "\n" + indented).replace("\\\n", " ").splitlines()


def _simple(line: str) -> Iterator[list[str]]:
    """The words of each command of a pipe or a list; nothing where a line is no command line."""
    reader = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars="|&;<>")
    reader.whitespace_split = True
    try:
        words = list(reader)
    except ValueError:  # an apostrophe in a sentence
        return
    simple: list[str] = []
    for word in [*words, ";"]:
        if word and set(word) <= set("|&;<>"):
            if simple:
                yield simple
            simple = []
        elif not ("=" in word and word.split("=")[0].isupper() and not simple):
            simple.append(word)  # NAME=VALUE in front is the environment
