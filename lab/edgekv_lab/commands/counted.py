"""How far a list of known length has come: a bar, or lines now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import click

from edgekv.commands.progress import about

Item = TypeVar("Item")

LINE_S = 20.0
"""Seconds between two lines of progress where standard error is no terminal."""


def counted(
    items: Iterable[Item],
    length: int,
    label: str,
    hidden: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Item]:
    """The items, of which there are `length`, with a bar on standard error, or with lines now and
    then where that is no terminal.
    """
    if hidden or sys.stderr.isatty():
        with click.progressbar(
            items, length=length, label=label, file=sys.stderr, hidden=hidden
        ) as bar:
            yield from bar
        return
    begin = said = clock()
    for done, item in enumerate(items, 1):
        yield item
        if clock() - said >= LINE_S and done < length:
            said = clock()
            left = about((said - begin) / done * (length - done))
            click.echo(f"edgekv: {label}: {done:,} of {length:,}, {left} left", err=True)
