"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence


def table(head: Iterable[str], rows: Iterable[Iterable[str]], words: Collection[str] = ()) -> str:
    """The lines of a table. words: columns that hold no numbers, and stand left."""
    names = list(head)
    rule = ["---" if name in words else "---:" for name in names]
    return "".join(line(cells) for cells in (names, rule, *map(list, rows)))


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |\n"
