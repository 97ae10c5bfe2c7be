"""Strings, numbers and constants."""

from __future__ import annotations

from typing import Any

from edgekv.grammars import numbers, objects
from edgekv.grammars.characters import literal, quoted
from edgekv.grammars.counts import AT_ONCE, COUNT_MOST, repeated
from edgekv.grammars.keywords import FORMATS, HELD, OF_TYPE, has_type, type_of
from edgekv.grammars.making import Making
from edgekv.grammars.marks import Schema
from edgekv.grammars.merging import Flat
from edgekv.grammars.regexes import NotHeld

EXACT_MOST = 2**53


def string(making: Making, flat: Flat, path: str) -> Schema | None:
    """The schema of a string; None if it can have no length."""
    least, most = flat.get("minLength", 0), flat.get("maxLength")
    if most is not None and least > most:
        making.never(path, "minLength", "it is above maxLength")
        return None
    lengths: dict[str, int] = {}
    for word in ("minLength", "maxLength"):
        if flat.get(word, 0) > COUNT_MOST:
            making.lose(path, word, f"a grammar counts to {COUNT_MOST:,} at most")
        elif word in flat:
            lengths[word] = int(flat[word])
    formats = [name for name in flat.get("format", []) if name in FORMATS]
    if "pattern" in flat:
        try:
            return _patterned(making, flat["pattern"], lengths, formats, path)
        except NotHeld as error:
            making.lose(path, "pattern", str(error))
    if not formats:
        return _long(making, lengths)
    for word in [*lengths, *(["format"] if len(formats) > 1 else [])]:
        making.lose(path, word, f"the format {formats[0]} stands beside it")
    return {"type": "string", "format": formats[0]}


def _long(making: Making, lengths: dict[str, int]) -> Schema:
    if max(lengths.values(), default=0) <= AT_ONCE:
        return {"type": "string", **lengths}
    counted = repeated("ours-char", lengths.get("minLength", 0), lengths.get("maxLength"))
    return making.marks.string("\n".join([f'"\\"" {counted[0]} "\\""', *counted[1]]))


def _patterned(
    making: Making, patterns: list[str], lengths: dict[str, int], formats: list[str], path: str
) -> Schema:
    least, most = lengths.get("minLength", 0), lengths.get("maxLength")
    rule = making.pattern(tuple(patterns), least, most)
    for word in [*([] if rule.is_of_length else lengths), *(["format"] if formats else [])]:
        making.lose(path, word, "a pattern stands beside it")
    return making.marks.string(rule.text)


def number(making: Making, flat: Flat, is_integer: bool, path: str) -> Schema | None:
    """The schema of a number; None if there is no such number."""
    said = [word for word in HELD["number"] if word in flat]
    if not said:
        return {"type": "integer" if is_integer else "number"}
    want = numbers.asked(flat, is_integer)
    try:
        rule = numbers.rule_of(want)
    except NotHeld as error:
        word = "multipleOf" if "multipleOf" in flat else said[0]
        making.lose(path, word, str(error))
        return number(making, {k: v for k, v in flat.items() if k != word}, is_integer, path)
    if rule is None:
        making.never(path, said[0], "no number is allowed")
        return None
    return making.marks.number(rule, want.is_integer)


def constants(making: Making, flat: Flat, types: list[str], path: str) -> Schema | None:
    """The values of an enum that the other keywords allow."""
    values = [value for value in flat["enum"] if not types or has_type(value, types)]
    values = [value for value in values if _is_allowed(making, flat, value, path)]
    if not values:
        making.never(path, "enum", "none of its values is allowed")
        return None
    plain = [value for value in values if _is_plain(value)]
    others = [_constant(making, value) for value in values if not _is_plain(value)]
    return making.union([{"enum": plain} if plain else None, *others])


def _is_allowed(making: Making, flat: Flat, value: Any, path: str) -> bool:
    """Whether the keywords of a value's type allow it, as far as they are looked at."""
    kind = type_of(value)
    if kind in ("integer", "number"):
        return numbers.allows(numbers.asked(flat, False), value)
    if kind == "string":
        length = len(value)
        is_long = flat.get("minLength", 0) <= length <= flat.get("maxLength", length)
        return is_long and _is_matched(making, flat.get("pattern", []), value, path)
    for word in flat:
        if OF_TYPE.get(word) == kind:
            making.lose(path, word, "an enum stands beside it")
    return True


def _is_matched(making: Making, patterns: list[str], value: str, path: str) -> bool:
    try:
        return all(making.is_matched(pattern, value) for pattern in patterns)
    except NotHeld as error:
        making.lose(path, "pattern", str(error))
        return True


def _is_plain(value: Any) -> bool:
    """Whether llama.cpp writes a value as it is."""
    if isinstance(value, str):
        return not any("\ud800" <= character <= "\udfff" for character in value)
    if isinstance(value, (int, float)):
        return isinstance(value, int) and abs(value) < EXACT_MOST
    return value is None


def _constant(making: Making, value: Any) -> Schema:
    """One value. Objects and arrays may have spaces in them."""
    if isinstance(value, dict):
        properties = {name: _constant(making, part) for name, part in value.items()}
        return objects.closed(making, properties, properties)
    if isinstance(value, list):
        return {"type": "array", "prefixItems": [_constant(making, part) for part in value]}
    if _is_plain(value):
        return {"enum": [value]}
    if isinstance(value, str):
        return making.marks.string(f'"\\"" {literal(value)} "\\""')
    return making.marks.number(quoted(numbers.text_of(numbers.exact(value))), value == int(value))
