"""Strings, numbers and constants."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Any

from edgekv.chat import objects
from edgekv.chat.characters import literal, quoted
from edgekv.chat.keywords import FORMATS, HELD, OF_TYPE, both_types, type_of
from edgekv.chat.marks import Schema
from edgekv.chat.merging import Flat
from edgekv.chat.patterns import rule_of as patterns_rule
from edgekv.chat.regexes import NotHeld

if TYPE_CHECKING:
    from edgekv.chat.shapes import Shapes

LENGTH_MOST = 2000
"""Repetitions that the grammar's parser has room for."""
EXACT_MOST = 2**53


def string(shapes: Shapes, flat: Flat, path: str) -> Schema | None:
    """The schema of a string; None if it can have no length."""
    least, most = flat.get("minLength", 0), flat.get("maxLength")
    if most is not None and least > most:
        shapes.never(path, "minLength", "it is above maxLength")
        return None
    lengths: dict[str, int] = {}
    for word in ("minLength", "maxLength"):
        if flat.get(word, 0) > LENGTH_MOST:
            shapes.lose(path, word, f"a grammar counts to {LENGTH_MOST:,} at most")
        elif word in flat:
            lengths[word] = int(flat[word])
    formats = [name for name in flat.get("format", []) if name in FORMATS]
    if "pattern" in flat:
        try:
            return _patterned(shapes, flat["pattern"], lengths, formats, path)
        except NotHeld as error:
            shapes.lose(path, "pattern", str(error))
    if not formats:
        return {"type": "string", **lengths}
    for word in [*lengths, *(["format"] if len(formats) > 1 else [])]:
        shapes.lose(path, word, f"the format {formats[0]} stands beside it")
    return {"type": "string", "format": formats[0]}


def _patterned(
    shapes: Shapes, patterns: list[str], lengths: dict[str, int], formats: list[str], path: str
) -> Schema:
    least, most = lengths.get("minLength", 0), lengths.get("maxLength")
    rule, is_of_length = patterns_rule(patterns, least, most)
    for word in [*([] if is_of_length else lengths), *(["format"] if formats else [])]:
        shapes.lose(path, word, "a pattern stands beside it")
    return shapes.marks.string(rule)


def number(shapes: Shapes, flat: Flat, is_integer: bool, path: str) -> Schema | None:
    for word in HELD["number"]:
        if word in flat:
            shapes.lose(path, word, "a grammar cannot express it")
    return {"type": "integer" if is_integer else "number"}


def constants(shapes: Shapes, flat: Flat, types: list[str], path: str) -> Schema | None:
    """The values of an enum that have one of the types."""
    values = [v for v in flat["enum"] if not types or both_types([type_of(v)], types)]
    for word in flat.keys() & OF_TYPE.keys():
        if any(both_types([type_of(value)], [OF_TYPE[word]]) for value in values if OF_TYPE[word]):
            shapes.lose(path, word, "the enum decides")
    if not values:
        shapes.never(path, "enum", "none of its values is allowed")
        return None
    plain = [value for value in values if _is_plain(value)]
    others = [_constant(shapes, value) for value in values if not _is_plain(value)]
    made = [{"enum": plain}] if plain else []
    made += [one for i, one in enumerate(others) if one not in others[:i]]
    return made[0] if len(made) == 1 else {"anyOf": made}


def _is_plain(value: Any) -> bool:
    """Whether llama.cpp writes a value as it is."""
    if isinstance(value, str):
        return not any("\ud800" <= character <= "\udfff" for character in value)
    if isinstance(value, (int, float)):
        return isinstance(value, int) and abs(value) < EXACT_MOST
    return value is None


def _constant(shapes: Shapes, value: Any) -> Schema:
    """One value. Objects and arrays may have spaces in them."""
    if isinstance(value, dict):
        properties = {name: _constant(shapes, part) for name, part in value.items()}
        return objects.closed(shapes, properties, properties)
    if isinstance(value, list):
        return {"type": "array", "prefixItems": [_constant(shapes, part) for part in value]}
    if _is_plain(value):
        return {"enum": [value]}
    if isinstance(value, str):
        return shapes.marks.string(f'"\\"" {literal(value)} "\\""')
    return shapes.marks.number(quoted(_digits(value)), value == int(value))


def _digits(value: float) -> str:
    """A number without an exponent, if it is of usual size."""
    if value == int(value):
        return str(int(value)) if abs(value) < 10**25 else repr(value)
    return f"{Decimal(repr(value)):f}" if abs(value) > 1e-15 else repr(value)
