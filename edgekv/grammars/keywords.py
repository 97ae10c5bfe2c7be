"""Keywords of JSON schema: which type each belongs to, and what it may say."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")

LOST = {
    "object": (
        "minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies",
        "unevaluatedProperties",
    ),
    "array": ("contains", "minContains", "maxContains", "uniqueItems", "unevaluatedItems"),
    "": ("not", "if", "then", "else", "$dynamicRef", "$recursiveRef"),
}  # fmt: skip
"""Keywords that a grammar does not express, by type; "" is of any type."""
HELD = {
    "object": (
        "properties", "required", "additionalProperties", "patternProperties", "propertyNames",
    ),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "string": ("pattern", "format", "minLength", "maxLength"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}  # fmt: skip
OF_TYPE = {
    keyword: type_ for table in (HELD, LOST) for type_, words in table.items() for keyword in words
}
FORMATS = ("date", "time", "date-time", "uuid", *(f"uuid{n}" for n in range(1, 6)))
"""Formats that llama.cpp has rules for. Others are remarks."""


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and is_finite(value)


def is_finite(value: float) -> bool:
    return isinstance(value, int) or math.isfinite(value)


def is_count(value: Any) -> bool:
    return is_number(value) and value >= 0 and value == int(value)


def is_schema(value: Any) -> bool:
    return isinstance(value, (dict, bool))


def is_schemas(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_schema, value))


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


OF_SCHEMAS = ("properties", "patternProperties")
CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(OF_SCHEMAS, (lambda value: isinstance(value, dict), "an object of schemas")),
    "required": (_is_names, "a list of names"),
    "pattern": (lambda value: isinstance(value, str), "a text"),
    "prefixItems": (is_schemas, "a list of schemas"),
    "enum": (lambda value: isinstance(value, list), "a list"),
    "multipleOf": (lambda value: is_number(value) and value > 0, "a number above 0"),
    **dict.fromkeys(
        ("additionalProperties", "propertyNames", "items", "not"), (is_schema, "a schema")
    ),
    **dict.fromkeys(("allOf", "anyOf", "oneOf"), (is_schemas, "a list of schemas")),
    **dict.fromkeys(
        ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"),
        (is_count, "a count"),
    ),
    **dict.fromkeys(
        ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), (is_number, "a number")
    ),
}
"""Whether a keyword's value can be used, and what it should be."""


def type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "integer" if value == int(value) else "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def has_type(value: Any, types: list[str]) -> bool:
    kind = type_of(value)
    return kind in types or kind == "integer" and "number" in types


def both_types(a: list[str], b: list[str]) -> list[str]:
    """Types that both allow. An integer is a number too."""
    out = []
    for name in TYPES:
        wider = "number" if name == "integer" else name
        if name in a and (name in b or wider in b) or name in b and wider in a:
            out.append(name)
    return [name for name in out if name != "integer" or "number" not in out]


def with_usual_names(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema in the newest draft's words, with `const` as an enum and `type` as a list.

    A null says nothing: many programs write it for what they leave out.
    """
    out = {word: value for word, value in schema.items() if value is not None or word == "const"}
    if isinstance(out.get("required"), bool):
        del out["required"]  # as drafts before the fourth have it: of the property itself
    if isinstance(out.get("items"), list):
        out["prefixItems"] = out.pop("items")
        out.update({"items": out["additionalItems"]} if "additionalItems" in out else {})
    for word, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(out.get(word), bool):
            if out.pop(word) and bound in out:
                out[word] = out.pop(bound)
    if isinstance(out.get("type"), str):
        out["type"] = [out["type"]]
    if "const" in out:
        values = out.get("enum")
        is_in = not isinstance(values, list) or any(same(v, out["const"]) for v in values)
        out["enum"] = [out["const"]] if is_in else []
    return out


def same(a: Any, b: Any) -> bool:
    """Whether two JSON values are equal: true is not 1, and 1.0 is."""
    if isinstance(a, bool) != isinstance(b, bool):
        return False
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(a == b)
