"""One form for all that is measured: a table, and what is needed to measure it again.

A file of records is a JSON object, {"tables": {NAME: record}}. `--record FILE` of `edgekv bench`,
`edgekv eval` and each experiment of `edgekv-lab` adds to one; docs/results is made of such files.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import date
from pathlib import Path
from typing import Any

import click

from edgekv.base import files
from edgekv.commands.declare import option
from edgekv.errors import BadInput
from edgekv.model.identity import identify
from edgekv.version import __version__
from edgekv_lab import markdown

Column = tuple[str, str]
"""A head, and the format of its values: "" of text, which stands left."""


@dataclass(frozen=True)
class Record:
    """A table that was measured.

    A cell is text, a number, several numbers for one format (an interval has its two ends), or
    None where nothing was measured.
    """

    what: str
    """The question, in a line."""
    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]
    command: Sequence[str]
    """Lines, which may be commented."""
    commit: str
    date: str
    machine: str
    processors: int | None = None
    models: Mapping[str, str] = field(default_factory=dict)
    """Name of the file -> the model's hash, empty if it is not known."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Options that were given."""
    samples: Sequence[Any] = ()
    """What the rows were made of."""

    def table(self) -> str:
        """The rows in Markdown."""
        return table(self.columns, self.rows)

    def origin(self) -> str:
        """Where the numbers are from: commit, date, machine, and the commands in a block."""
        processors = f", {self.processors} processors" if self.processors else ""
        line = f"Commit {self.commit}, {self.date}, {self.machine}{processors}:\n\n"
        return line + "".join(f"    {command}\n" for command in self.command)


def table(columns: Sequence[Column], rows: Sequence[Sequence[Any]]) -> str:
    """Rows in Markdown, each value in its column's format."""
    words = {head for head, form in columns if not form}
    cells = ([cell(form, x) for (_, form), x in zip(columns, row, strict=True)] for row in rows)
    return markdown.table([head for head, _ in columns], cells, words)


def cell(form: str, value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return form.format(*value) if isinstance(value, list | tuple) else (form or "{}").format(value)


# ---- files


def read(path: str | os.PathLike[str]) -> dict[str, Record]:
    """The records of a file by their names. Raises BadInput if it is no such file."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))["tables"]
        return {name: Record(**values) for name, values in found.items()}
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror})") from None
    except (AttributeError, KeyError, TypeError, ValueError):
        raise BadInput(f"{path} is no file of records") from None


def put(path: str | os.PathLike[str], name: str, record: Record) -> None:
    """Add a record to a file, in the place of one of that name. Raises BadInput."""
    checked(path)
    there = os.path.exists(path) and os.path.getsize(path)
    found = json.loads(Path(path).read_text(encoding="utf-8")) if there else {"tables": {}}
    found["tables"][name] = asdict(record)
    with files.replaced(path, files.begins_with(b"{"), "file of records") as f:
        f.write(text_of(found).encode())


def text_of(found: Mapping[str, Any]) -> str:
    """JSON with a line for each row and each sample; what a record leaves empty is left out."""

    def value(name: str, x: Any) -> str:
        if name not in ("rows", "samples", "command") or not x:
            return json.dumps(x, ensure_ascii=False)
        lines = (f"        {json.dumps(row, ensure_ascii=False)}" for row in x)
        return "[\n" + ",\n".join(lines) + "\n      ]"

    def record(values: Mapping[str, Any]) -> str:
        known = [x.name for x in fields(Record) if values.get(x.name)]
        lines = (f'      "{name}": {value(name, values[name])}' for name in known)
        return "{\n" + ",\n".join(lines) + "\n    }"

    tables = (f"    {json.dumps(x)}: {record(values)}" for x, values in found["tables"].items())
    parts = ['  "tables": {\n' + ",\n".join(tables) + "\n  }"]
    parts += [f"  {json.dumps(x)}: {json.dumps(found[x])}" for x in found if x != "tables"]
    return "{\n" + ",\n".join(parts) + "\n}\n"


# ---- what is measured here and now

RECORD = option(
    "--record",
    metavar="FILE",
    callback=lambda ctx, param, path: path and checked(path),
    help="Add the table, with all that is needed to measure it again, to this file of records.",
)
"""The option of everything that measures."""


def checked(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Raises BadInput if no record can be put there: before minutes of work, not after."""
    files.check(path, files.begins_with(b"{"), "file of records")
    if os.path.exists(path) and os.path.getsize(path):
        read(path)
    return path


def here(
    what: str,
    columns: Sequence[Column],
    rows: Sequence[Sequence[Any]],
    models: Sequence[str] = (),
    samples: Sequence[Any] = (),
) -> Record:
    """A record of what the present command has measured. models: their files."""
    return Record(
        what,
        columns,
        rows,
        [command()],
        commit(),
        date.today().isoformat(),
        machine(),
        os.cpu_count(),
        {Path(path).name: _hash(path) for path in models},
        _given(),
        samples,
    )


def _hash(path: str) -> str:
    try:
        return identify(path).digest
    except BadInput:
        return ""  # of a kind that is not compressed


def _given() -> dict[str, Any]:
    """The present command's options that somebody gave; paths by their last part."""
    context = click.get_current_context(silent=True)
    if context is None:
        return {}
    sources = click.core.ParameterSource.COMMANDLINE, click.core.ParameterSource.ENVIRONMENT
    names = [x for x in context.params if context.get_parameter_source(x) in sources]
    given = {name: context.params[name] for name in names if name not in ("record", "verbose")}
    return {name: _plain(value) for name, value in given.items()}


def _plain(value: Any) -> Any:
    """As JSON has it."""
    if value is None or isinstance(value, int | float):
        return value
    return [*map(_plain, value)] if isinstance(value, list | tuple) else _short(str(value))


def _short(word: str) -> str:
    """Without a machine's own folders."""
    return Path(word).name if os.path.isabs(word) else word


def command() -> str:
    """The present command line."""
    context = click.get_current_context(silent=True)
    program = context.find_root().info_name if context else None
    return shlex.join([program or "edgekv", *map(_short, sys.argv[1:])])


def commit() -> str:
    """The checkout's commit, or where there is none $EDGEKV_COMMIT or the version."""
    known = _git("rev-parse", "--short", "HEAD") or os.environ.get("EDGEKV_COMMIT", __version__)
    return known + " with changes" * bool(_git("status", "--porcelain", "-uno"))


def _git(*words: str) -> str:
    """What git says in the checkout that this file is in, or that the command runs in."""
    places = (*Path(__file__).resolve().parents, Path.cwd())
    root = next((x for x in places if (x / ".git").exists() and (x / "lab").is_dir()), None)
    try:
        done = root and subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)
    except OSError:  # no git here
        return ""
    return done.stdout.strip() if done else ""


def machine() -> str:
    """The processor's name and the system's."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{[*names, platform.processor() or platform.machine()][0]}, {platform.system()}"
