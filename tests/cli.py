"""The command line, as it is typed."""

from __future__ import annotations

import shlex

from click.testing import CliRunner, Result

from edgekv import commands


def typed(line: str = "", *words: str, stdin: str | bytes = "") -> Result:
    """What `edgekv LINE` does; more words go behind the line as they are."""
    line_words = [*shlex.split(line), *words]
    return CliRunner().invoke(commands.main, line_words, input=stdin, prog_name="edgekv")


def refused(result: Result) -> str:
    """The one line that a user mistake gives."""
    assert result.exit_code == 2, result.output
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("edgekv: "), result.stderr
    return lines[0]
