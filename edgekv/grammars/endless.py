"""Definitions that a schema leads to, and those without a value that ends."""

from __future__ import annotations

from typing import Any

from edgekv.grammars.marks import Schema


def reached(root: Schema, definitions: dict[str, Schema]) -> dict[str, Schema]:
    """The definitions that a schema leads to."""
    met: dict[str, Schema] = {}
    left: list[Any] = [root]
    while left:
        node = left.pop()
        if isinstance(node, list):
            left += node
        if not isinstance(node, dict):
            continue
        left += node.values()
        name = str(node.get("$ref")).rpartition("/")[2]
        if name in definitions and name not in met:
            met[name] = definitions[name]
            left.append(met[name])
    return met


def endless(root: Schema, definitions: dict[str, Schema]) -> set[str]:
    """Names of definitions without a value that ends; "" is the root's."""
    left = {"": root, **definitions}
    ending: set[str] = set()
    while found := {name for name, schema in left.items() if _ends(schema, ending)}:
        ending |= found
        left = {name: schema for name, schema in left.items() if name not in found}
    return set(left)


def _ends(schema: Schema, ending: set[str]) -> bool:
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2] in ending
    if "anyOf" in schema:
        return any(_ends(way, ending) for way in schema["anyOf"] if not _is_mark(way))
    if "prefixItems" in schema:
        return all(_ends(item, ending) for item in schema["prefixItems"])
    if schema.get("minItems"):
        return _ends(schema.get("items", {}), ending)
    properties = schema.get("properties", {})
    return all(_ends(properties[name], ending) for name in schema.get("required", []))


def _is_mark(schema: Schema) -> bool:
    """Whether it is a mark that only stands beside a schema."""
    value = schema.get("enum", [None])[0]
    return isinstance(value, str) and value.startswith("made-") and not value.endswith("-rule")
