"""What experiments share: how one is declared, its options, and the tables that come out."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from edgekv.commands.declare import Decorator, declared, option
from edgekv.commands.load import model_path
from edgekv.commands.values import COUNT, FROM_ZERO, SHARE
from edgekv.errors import BadInput
from edgekv_lab import markdown, record
from edgekv_lab.record import RECORD, Column

Options = SimpleNamespace
"""The values of an experiment's options by their names; `model` is a file."""


def experiment(*options: Decorator) -> Callable[[Callable[[Options], None]], click.Command]:
    """Makes a command of a function of its options; the module's docstring is the help."""

    def made(run: Callable[[Options], None]) -> click.Command:
        def call(**values: Any) -> None:
            if values.get("model"):
                values["model"] = model_path(values["model"])
            where = f"{record.machine()}, {os.cpu_count()} processors"
            print(f"`{record.command()}`, commit {record.commit()}, {where}\n")
            run(Options(**values))

        name = run.__module__.rpartition(".")[2].replace("_", "-")
        decorated = declared(call, [*options, RECORD])
        return click.command(name, help=sys.modules[run.__module__].__doc__)(decorated)

    return made


# ---- options


def many(kind: Callable[[str], Any], between: str = ",") -> Callable[..., list[Any]]:
    """A click callback: values of a kind with a sign between them."""

    def parsed(ctx: click.Context, param: click.Parameter, text: str | None) -> list[Any]:
        try:
            return [kind(x) for x in (text or "").split(between) if x]
        except ValueError:
            why = f"'{text}' is not a list of such values with '{between}' between them"
            raise click.BadParameter(why, ctx, param) from None

    return parsed


MODEL = option("-m --model", default="demo", metavar="MODEL", help="A file, or a model's name.")
THREADS = option("-t --threads", type=COUNT, default=2, help="CPU threads.")
ROUNDS = option("-r --rounds", type=COUNT, default=3, help="Rounds of all sides.")
RATIO = option("--ratio", type=SHARE, default=0.2, metavar="R", help="Share of the bytes to keep.")
METHOD = option("--method", default="snapkv", metavar="NAME", help="A method.")
AUTO = option("--method", default="auto", metavar="NAME", help="A method.")
LAYERS = option("-ngl ngl", type=FROM_ZERO, default=0, help="Layers on a GPU.")


def tokens(default: int, what: str) -> Decorator:
    """The option of a number of tokens."""
    return option("--tokens", type=COUNT, default=default, help=f"Tokens of {what}.")


def text(path: str) -> str:
    """Raises BadInput."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read: {error}") from None


def say(*words: object) -> None:
    """A line of progress."""
    click.echo(" ".join(map(str, words)), err=True)


# ---- what comes out


class Sheet:
    """A table whose rows are printed as they come."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self.columns, self.rows = list(columns), list[list[Any]]()
        self.samples: list[Any] = []
        """What the rows are made of, for the record."""
        print(record.table(columns, []), end="", flush=True)

    def add(self, *cells: Any) -> None:
        pairs = zip(self.columns, cells, strict=True)
        line = markdown.line([record.cell(form, x) for (_, form), x in pairs])
        self.rows.append(list(cells))
        print(line, end="", flush=True)


@contextmanager
def sheet(
    *columns: Column, name: str = "", about: str = "", models: Sequence[str] = ()
) -> Iterator[Sheet]:
    """A `with` block whose table is printed, and kept where --record says; the rows so far, if the
    experiment is stopped.

    name: behind the experiment's own, where there are several tables; about: a line above it;
    models: files, without them that of --model.
    """
    if about:
        print(f"{about}\n")
    made = Sheet(columns)
    try:
        yield made
    finally:
        print(flush=True)
        if made.rows:
            _keep(made, name, about, models)


def _keep(made: Sheet, name: str, about: str, models: Sequence[str]) -> None:
    context = click.get_current_context()
    path, model = context.params["record"], context.params.get("model")
    if path:
        what = about.replace("*", "") or str(context.command.help).partition("\n\n")[0].replace(
            "\n", " "
        )
        models = models or ([model_path(model)] if model else [])
        found = record.here(what, made.columns, made.rows, models, made.samples)
        record.put(path, "-".join(filter(None, (context.info_name, name))), found)
