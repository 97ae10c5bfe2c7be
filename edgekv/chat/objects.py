"""Objects: their properties, in order, and what further ones may be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from edgekv.chat.characters import literal, other_than
from edgekv.chat.keywords import LOST
from edgekv.chat.marks import Schema
from edgekv.chat.merging import Flat

if TYPE_CHECKING:
    from edgekv.chat.shapes import Shapes


def of(shapes: Shapes, flat: Flat, path: str) -> Schema | None:
    """The schema of an object; None if it needs a property that can have no value."""
    said, further = flat.get("properties", {}), _further(flat)
    needed = dict.fromkeys(flat.get("required", []))
    unnamed = {name: further is None or further for name in needed if name not in said}
    properties = {}
    for name, schema in {**said, **unnamed}.items():
        made = shapes.inside(schema, f"{path}.{name}" if path else name)
        if made is not None:
            properties[name] = made
        elif name in needed:
            shapes.never(path, "required", f"'{name}' can have no value")
            return None
    _lose(shapes, flat, path, len(properties), len(needed))
    values = None
    if further not in (None, False):
        values = shapes.inside(further, f"{path}.*" if path else "*")
    if values is None:
        is_any = further is None and not said and not properties
        return {"type": "object"} if is_any else closed(shapes, properties, needed)
    if not said and not properties:
        return {"type": "object", "additionalProperties": values}
    keyed = shapes.marks.keyed(values, other_than([*{**said, **properties}]))
    return {**closed(shapes, properties, needed), "additionalProperties": keyed}


def closed(shapes: Shapes, properties: dict[str, Schema], needed: Iterable[str]) -> Schema:
    """An object of these properties alone."""
    names = {name: _name(shapes, name) for name in properties}
    out: Schema = {"type": "object"}
    out["properties"] = {names[name]: made for name, made in properties.items()}
    required = [names[name] for name in needed]
    return {**out, "required": required} if required else out


def _name(shapes: Shapes, name: str) -> str:
    """llama.cpp takes a star for any number of properties, and control characters as they are."""
    is_odd = any(character < " " or "\ud800" <= character <= "\udfff" for character in name)
    if name != "*" and not is_odd:
        return name
    return shapes.marks.name(f'"\\"" {literal(name)} "\\""')


def _further(flat: Flat) -> Any:
    """What properties without a name may be; None: nothing is said."""
    patterns = list(flat.get("patternProperties", {}).values())
    further = flat.get("additionalProperties")
    if not patterns:
        return further
    return {"anyOf": [*patterns, *([further] if isinstance(further, (dict, bool)) else [])]}


def _lose(shapes: Shapes, flat: Flat, path: str, n_most: int, n_least: int) -> None:
    is_closed = "patternProperties" not in flat and not flat.get("additionalProperties", not n_most)
    for word in LOST["object"]:
        if word not in flat or flat[word] in (True, {}):
            continue
        if word == "unevaluatedProperties" and flat[word] is False:
            continue  # what has no name is not written anyway
        if word == "minProperties" and flat[word] <= n_least:
            continue
        if word == "maxProperties" and is_closed and flat[word] >= n_most:
            continue
        shapes.lose(path, word, "a grammar cannot express it")
