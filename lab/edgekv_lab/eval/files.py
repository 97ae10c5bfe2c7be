"""Data sets from the user's disk: JSON and JSON lines, and which of their records are asked."""

from __future__ import annotations

import json
import stat
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from edgekv.errors import BadInput

T = TypeVar("T")


def text_of(path: str) -> str:
    """Raises BadInput if the file cannot be read, is no regular file, or no text."""
    file = Path(path)
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise BadInput(f"{path} cannot be read: it is no regular file")  # a pipe may never end
        return file.read_text(encoding="utf-8")
    except BadInput:
        raise
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is no text in UTF-8"
        raise BadInput(f"{path} cannot be read ({why})") from None


def parse(text: str, where: str) -> Any:
    """The value of a JSON text. Raises BadInput for any other text, and for nesting too deep to be
    read."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise BadInput(f"{where} is no JSON that can be read") from None


def words(value: Any, name: str, where: str) -> str:
    """A field's value, which has to be a text. Raises BadInput for another value, and for half a
    character."""
    try:
        if isinstance(value, str):
            value.encode()
            return value
    except UnicodeEncodeError:
        pass
    raise BadInput(f"{where}: the field '{name}' has to be a text")


def load_json(path: str) -> Any:
    return parse(text_of(path), path)


def load_lines(path: str, fields: Sequence[str], texts: Sequence[str]) -> list[dict[str, Any]]:
    """One record for each line that is not empty.

    fields: what a record needs; texts: those of them that have to be texts. Raises BadInput for a
    line that is no such record, or for no record at all.
    """
    records = []
    for number, line in enumerate(text_of(path).splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        record = parse(line, where)
        missing = [name for name in fields if not isinstance(record, dict) or name not in record]
        if missing:
            raise BadInput(
                f"{where}: '{missing[0]}' is missing; each line is an object with "
                f"{', '.join(fields)}"
            )
        for name in texts:
            words(record[name], name, where)
        records.append(record)
    if not records:
        raise BadInput(f"{path} has no records")
    return records


def draw(records: Sequence[T], n: int, seed: int) -> list[tuple[int, T]]:
    """n of the records with their numbers, drawn by the seed, in their order; all of them if there
    are no more."""
    chosen = sorted(Random(f"{seed} draw").sample(range(len(records)), min(n, len(records))))
    return [(i, records[i]) for i in chosen]
