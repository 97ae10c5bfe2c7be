"""Names of properties: which may be, and what patterns say of them."""

from __future__ import annotations

from typing import Any

from edgekv.grammars.characters import literal, other_than
from edgekv.grammars.making import Making
from edgekv.grammars.merging import Flat, both
from edgekv.grammars.regexes import NotHeld


def named(making: Making, flat: Flat, path: str) -> dict[str, Any]:
    """The schemas of properties that have a name, or are required. Raises NotHeld."""
    out: dict[str, Any] = dict(flat.get("properties", {}))
    missing = [name for name in flat.get("required", []) if name not in out]
    for pattern, schema in flat.get("patternProperties", {}).items():
        for name in [*out, *missing]:
            if making.is_matched(pattern, name):
                out[name] = both(out.get(name, True), schema)
    for name in missing:
        out.setdefault(name, flat.get("additionalProperties", True))
    if "propertyNames" in flat:
        names = making.flats(flat["propertyNames"], path)
        out = {
            n: s if any(_is_name(making, one, n) for one in names) else False
            for n, s in out.items()
        }
    return out


def _is_name(making: Making, flat: Flat, name: str) -> bool:
    return (
        ("enum" not in flat or name in flat["enum"])
        and all(making.is_matched(pattern, name) for pattern in flat.get("pattern", []))
        and flat.get("minLength", 0) <= len(name) <= flat.get("maxLength", len(name))
    )


def rule_of(making: Making, flat: Flat, names: list[str], path: str) -> str | None:
    """The rule of further properties' names; None if there can be none. Raises NotHeld."""
    found = list(flat.get("patternProperties", {}))
    if len(found) > 1 or found and flat.get("additionalProperties", False) is not False:
        raise NotHeld("a grammar has one kind of further properties")
    if "propertyNames" not in flat:
        return _rule(making, found, 0, None, names)
    flats = making.flats(flat["propertyNames"], path)
    if any("enum" in one for one in flats) or not flats:
        values = [name for one in flats for name in one.get("enum", []) if isinstance(name, str)]
        texts = [f'"\\"" {literal(name)} "\\""' for name in values if name not in names]
        if found or not all("enum" in one for one in flats):
            raise NotHeld("a list of names stands beside a pattern")
        return f"( {' | '.join(texts)} )" if texts else None
    if len(flats) > 1:
        raise NotHeld("it has more than one pattern")
    found += flats[0].get("pattern", [])
    return _rule(making, found, int(flats[0].get("minLength", 0)), flats[0].get("maxLength"), names)


def _rule(making: Making, found: list[str], least: int, most: int | None, names: list[str]) -> str:
    if not found and not least and most is None:
        return other_than(names) if names else ANY_NAME
    rule = making.pattern(tuple(found), least, most, tuple(names))
    if not rule.is_of_length:
        raise NotHeld("its lengths stand beside a pattern")
    return rule.text


ANY_NAME = "string"
"""llama.cpp's own rule."""
