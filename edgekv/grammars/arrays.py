"""Arrays: items of one kind, tuples, and tuples that go on."""

from __future__ import annotations

from typing import Any

from edgekv.grammars.counts import COUNT_MOST
from edgekv.grammars.keywords import LOST
from edgekv.grammars.making import NOT_HELD, Making
from edgekv.grammars.marks import Schema
from edgekv.grammars.merging import Flat

ITEMS_MOST, TUPLE_MOST = 1000, 32
"""Items that llama.cpp's own rule counts: its parser has room for 2,000, and takes some twice."""


def of(making: Making, flat: Flat, path: str) -> Schema | None:
    """The schema of an array; None if it needs an item that can have no value."""
    least, most = _counts(making, flat, path)
    _lose(making, flat, path, most)
    front = flat.get("prefixItems", [])
    if most is not None and least > most:
        making.never(path, "minItems", "it is above maxItems")
        return None
    rest = making.inside(flat["items"], f"{path}[]") if "items" in flat else None
    if front:
        return _tuple(making, flat, rest, (least, most), path)
    if rest is None and "items" in flat:
        if least:
            making.never(path, "items")
        return None if least else {"type": "array", "maxItems": 0}
    if max(least, most or 0) > ITEMS_MOST:
        some = making.marks.many(rest or {}, max(least, 1), most)
        empty = [] if least else [{"type": "array", "maxItems": 0}]
        return making.union([*empty, {"type": "array", "prefixItems": [some]}])
    out: Schema = {"type": "array", "items": rest} if rest else {"type": "array"}
    out |= {"minItems": least} if least else {}
    return out if most is None else {**out, "maxItems": most}


def _counts(making: Making, flat: Flat, path: str) -> tuple[int, int | None]:
    least, most = int(flat.get("minItems", 0)), flat.get("maxItems")
    for word, count in (("minItems", least), ("maxItems", most)):
        if count is not None and count > COUNT_MOST:
            making.lose(path, word, f"a grammar counts to {COUNT_MOST:,} at most")
    return min(least, COUNT_MOST), None if most is None or most > COUNT_MOST else int(most)


def _lose(making: Making, flat: Flat, path: str, most: int | None) -> None:
    for word in LOST["array"]:
        if word not in flat or flat[word] is False or word == "uniqueItems" and most in (0, 1):
            continue
        if word in ("minContains", "maxContains") and "contains" not in flat:
            continue
        making.lose(path, word, NOT_HELD)


def _tuple(
    making: Making, flat: Flat, rest: Schema | None, counts: tuple[int, int | None], path: str
) -> Schema | None:
    """As many of the first items as may be, and then the rest.

    Without minItems all of the first are written, as llama.cpp does.
    """
    front: list[Any] = []
    for i, schema in enumerate(flat["prefixItems"]):
        made = making.inside(schema, f"{path}[{i}]")
        if made is None:
            rest = None
            break
        front.append(made)
    least, most = counts
    if "minItems" not in flat:
        least = len(flat["prefixItems"]) if most is None else min(len(flat["prefixItems"]), most)
    last = len(front) if most is None else min(len(front), most)
    lengths = range(min(least, last), last + 1) if least <= last else range(0)
    if len(lengths) > TUPLE_MOST:
        making.lose(path, "minItems", f"the tuple is longer than {TUPLE_MOST}")
        lengths = lengths[-TUPLE_MOST:]
    if len(lengths) > 1 or rest is not None:
        front = [making.definition(made) for made in front]
    tuples = [{"type": "array", "prefixItems": front[:n]} for n in lengths]
    if rest is not None and (most is None or most > len(front)):
        further = (max(least - len(front), 1), None if most is None else most - len(front))
        tuples.append({"type": "array", "prefixItems": [*front, making.marks.many(rest, *further)]})
    if not tuples:
        making.never(path, "prefixItems")
        return None
    return tuples[0] if len(tuples) == 1 else {"anyOf": tuples}
