"""Data sets from the user's disk: JSON and JSON lines, and which of their records are asked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from edgekv.errors import BadInput

T = TypeVar("T")


def text_of(path: str) -> str:
    """Raises BadInput if the file cannot be read or is no text."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} cannot be read ({getattr(error, 'strerror', None) or 'it is no text in UTF-8'})") from None


def load_json(path: str) -> Any:
    try:
        return json.loads(text_of(path))
    except ValueError:
        raise BadInput(f"{path} is no JSON") from None


def load_lines(path: str, fields: Sequence[str]) -> list[dict[str, Any]]:
    """One record for each line that is not empty. Raises BadInput for what is no object with these fields, or for no record at all."""
    records = []
    for number, line in enumerate(text_of(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:
            raise BadInput(f"{path}, line {number}: this is no JSON") from None
        missing = [name for name in fields if not isinstance(record, dict) or name not in record]
        if missing:
            raise BadInput(f"{path}, line {number}: '{missing[0]}' is missing; each line is an object with {', '.join(fields)}")
        records.append(record)
    if not records:
        raise BadInput(f"{path} has no records")
    return records


def draw(records: Sequence[T], n: int, seed: int) -> list[tuple[int, T]]:
    """n of the records with their numbers, drawn by the seed, in their order; all of them if there are no more."""
    chosen = sorted(Random(f"{seed} draw").sample(range(len(records)), min(n, len(records))))
    return [(i, records[i]) for i in chosen]
