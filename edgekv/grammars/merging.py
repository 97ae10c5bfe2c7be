"""Schemas that hold together, as one. A flat schema has no references, no allOf, no anyOf."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edgekv.grammars.keywords import both_types, same

Flat = dict[str, Any]
LOWEST = ("minimum", "exclusiveMinimum", "minItems", "minLength", "minProperties")
HIGHEST = ("maximum", "exclusiveMaximum", "maxItems", "maxLength", "maxProperties")


def both(a: Any, b: Any) -> Any:
    """A schema of what two schemas allow."""
    if a is False or b is False:
        return False
    if a in (True, {}) or a == b:
        return b
    return a if b in (True, {}) else {"allOf": [a, b]}


def together(a: Flat, b: Flat, is_matched: Callable[[str, str], bool]) -> Flat | None:
    """A flat schema of what two allow; None if their types have nothing in common.

    is_matched: whether a pattern finds something in a name.
    """
    out = {**a, **b}
    for word in a.keys() & b.keys():
        out[word] = _word(word, a[word], b[word])
    if "type" in out and not out["type"]:
        return None
    if "properties" in out:
        names = dict.fromkeys([*a.get("properties", {}), *b.get("properties", {})])
        out["properties"] = {
            name: both(_property(a, name, is_matched), _property(b, name, is_matched))
            for name in names
        }
    if "patternProperties" in out:
        out["patternProperties"] = {
            pattern: both(_pattern(a, pattern), _pattern(b, pattern))
            for pattern in out["patternProperties"]
        }
    if "prefixItems" in a or "prefixItems" in b:
        longest = max(len(a.get("prefixItems", [])), len(b.get("prefixItems", [])))
        out["prefixItems"] = [both(_item(a, i), _item(b, i)) for i in range(longest)]
    return out


def _word(word: str, a: Any, b: Any) -> Any:
    if word in LOWEST:
        return max(a, b)
    if word in HIGHEST:
        return min(a, b)
    if word == "type":
        return both_types(a, b)
    if word == "enum":
        return [value for value in a if any(same(value, other) for other in b)]
    if word in ("required", "pattern", "multipleOf", "format"):
        return a + [value for value in b if value not in a]
    if word == "patternProperties":
        return a | b
    return both(a, b) if word in ("items", "additionalProperties", "propertyNames") else b


def _property(flat: Flat, name: str, is_matched: Callable[[str, str], bool]) -> Any:
    """The schema of a property; that of a pattern is put to it later."""
    if name in flat.get("properties", {}):
        return flat["properties"][name]
    has_pattern = any(is_matched(pattern, name) for pattern in flat.get("patternProperties", {}))
    return True if has_pattern else flat.get("additionalProperties", True)


def _pattern(flat: Flat, pattern: str) -> Any:
    """What further names that a pattern finds may have. Names of other patterns may be among them:
    objects are not held to several patterns anyway.
    """
    further = True if "patternProperties" in flat else flat.get("additionalProperties", True)
    return flat.get("patternProperties", {}).get(pattern, further)


def _item(flat: Flat, i: int) -> Any:
    items = flat.get("prefixItems", [])
    return items[i] if i < len(items) else flat.get("items", True)
