"""Objects: their properties, in order, and what further ones may be."""

from __future__ import annotations

from collections.abc import Iterable

from edgekv.grammars import keys
from edgekv.grammars.characters import literal, other_than
from edgekv.grammars.keywords import LOST
from edgekv.grammars.making import NOT_HELD, Making
from edgekv.grammars.marks import Schema
from edgekv.grammars.merging import Flat
from edgekv.grammars.regexes import NotHeld

OPTIONAL_MOST = 400
"""llama.cpp's converter takes seconds for more."""
CLOSING = {"additionalProperties", "patternProperties", "propertyNames"}


def of(making: Making, flat: Flat, path: str) -> Schema | None:
    """The schema of an object; None if it needs a property that can have no value."""
    flat = _named(making, flat, path)
    needed = dict.fromkeys(flat.get("required", []))
    properties = {}
    for name, schema in flat["properties"].items():
        made = making.inside(schema, f"{path}.{name}" if path else name)
        if made is not None:
            properties[name] = made
        elif name in needed:
            making.never(path, "required", f"'{name}' can have no value")
            return None
    if len(properties) - len(needed) > OPTIONAL_MOST:
        making.lose(path, "properties", f"more than {OPTIONAL_MOST} of them may be left out")
        return {"type": "object"}
    key, values = _further(making, flat, path)
    is_any = values is None and not flat["properties"] and not flat.keys() & CLOSING
    _lose(making, flat, path, None if values is not None or is_any else len(properties))
    if is_any:
        return {"type": "object"}
    out = closed(making, properties, needed)
    if values is None or key is None:
        return out
    if key == keys.ANY_NAME:
        return {"type": "object", "additionalProperties": values}
    return {**out, "additionalProperties": making.marks.keyed(values, key)}


def _named(making: Making, flat: Flat, path: str) -> Flat:
    """With all properties that have a name. What cannot be held of patterns is left out."""
    try:
        return {**flat, "properties": keys.named(making, flat, path)}
    except NotHeld as error:
        word = "patternProperties" if "patternProperties" in flat else "propertyNames"
        making.lose(path, word, str(error))
        return _named(making, {w: value for w, value in flat.items() if w != word}, path)


def _further(making: Making, flat: Flat, path: str) -> tuple[str | None, Schema | None]:
    """(the rule of further names, what their values may be); None: there are none."""
    named = list(flat["properties"])
    ways = list(flat.get("patternProperties", {}).values())
    ways += [flat["additionalProperties"]] if "additionalProperties" in flat else []
    ways += [True] if not ways and not named and "propertyNames" in flat else []
    values = making.inside({"anyOf": ways}, f"{path}.*" if path else "*") if ways else None
    if values is None:
        return None, None
    try:
        return keys.rule_of(making, flat, named, path), values
    except NotHeld as error:
        word = "patternProperties" if "patternProperties" in flat else "propertyNames"
        making.lose(path, word, str(error))
        return (other_than(named) if named else keys.ANY_NAME), values


def closed(making: Making, properties: dict[str, Schema], needed: Iterable[str]) -> Schema:
    """An object of these properties alone."""
    names = {name: _name(making, name) for name in properties}
    out: Schema = {"type": "object"}
    out["properties"] = {names[name]: made for name, made in properties.items()}
    required = [names[name] for name in needed]
    return {**out, "required": required} if required else out


def _name(making: Making, name: str) -> str:
    """A name that llama.cpp takes as it is.

    It takes an empty one for the root, a star for any number of properties, and a line break for
    one of the grammar.
    """
    is_odd = any(character < " " or "\ud800" <= character <= "\udfff" for character in name)
    if name not in ("", "*") and not is_odd:
        return name
    return making.marks.name(f'"\\"" {literal(name)} "\\""')


def _lose(making: Making, flat: Flat, path: str, n_most: int | None) -> None:
    """Name what is not held. n_most: how many properties there may be, if that is known."""
    for word in LOST["object"]:
        if word not in flat or flat[word] in (True, {}):
            continue
        if word == "unevaluatedProperties" and flat[word] is False:
            continue  # what has no name is not written anyway
        if word == "minProperties" and flat[word] <= len(flat.get("required", [])):
            continue
        if word == "maxProperties" and n_most is not None and flat[word] >= n_most:
            continue
        making.lose(path, word, NOT_HELD)
