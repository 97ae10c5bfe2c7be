"""Random JSON schemas, and values that they should allow, in the order of a grammar."""

from __future__ import annotations

import random
from typing import Any

NAMES = ["a", "b", "name", "a b", 'q"', "back\\slash", "é", "😀", "*", "n\nl", "]^-", "additional"]
CHARACTERS = 'ab1 _"\\/\n\t\x00\x1f\x7fé€\u2028😀\U0010ffff{}[]:,'
PATTERNS = {
    "^a+$": ["a", "aaa"],
    r"\d": ["1", "a1\n"],
    r"^[^\"]{2}": ["\\\\", "ab😀"],
    r"^.*\\$": ["\\", "é\\"],
    "b|^$": ["", "abc"],
}
SIMPLE = ("string", "integer", "number", "boolean", "null", "enum", "any", "types")


def text(draw: random.Random, least: int = 0, most: int = 6) -> str:
    return "".join(draw.choice(CHARACTERS) for _ in range(draw.randint(least, most)))


def any_json(draw: random.Random, depth: int = 2) -> Any:
    kinds = ["text", "int", "float", "other", "list", "dict"]
    kind = draw.choice(kinds[: 6 if depth else 4])
    if kind == "text":
        return text(draw)
    if kind == "int":
        return draw.randint(-(10**6), 10**6)
    if kind == "float":
        return draw.randint(-999, 999) / 8 + 0.0625
    if kind == "other":
        return draw.choice([None, True, False])
    values = [any_json(draw, depth - 1) for _ in range(draw.randint(0, 3))]
    return values if kind == "list" else {text(draw): value for value in values}


def schema(draw: random.Random, depth: int = 3, refs: tuple[str, ...] = ()) -> Any:
    """A random schema."""
    kinds = [*SIMPLE, *(["ref"] if refs else [])]
    if depth:
        kinds += ["object", "map", "array", "tuple", "anyOf", "allOf"] * 2
    out = MAKERS[draw.choice(kinds)](draw, depth - 1, refs)
    if isinstance(out, dict) and draw.random() < 0.2:
        out = {**out, "description": "x", "default": 1, "x-own": {}}
    return out


def with_definitions(draw: random.Random) -> Any:
    """A random schema with definitions that refer to each other."""
    names = ("a", "b/c", "d~e%")
    refs = ("#/$defs/a", "#/$defs/b~1c", "#/$defs/d~0e%25", "#")
    made = {name: schema(draw, 2, refs) for name in names}
    root = MAKERS["object"](draw, 2, refs)
    return {**root, "$defs": made}


def _string(draw: random.Random, depth: int, refs: tuple[str, ...]) -> Any:
    out: dict[str, Any] = {"type": "string"}
    if draw.random() < 0.3:
        return {**out, "pattern": draw.choice(list(PATTERNS))}
    out |= {"minLength": draw.randint(0, 3)} if draw.random() < 0.4 else {}
    return out | ({"maxLength": draw.randint(3, 8)} if draw.random() < 0.4 else {})


def _number(type_: str) -> Any:
    def make(draw: random.Random, depth: int, refs: tuple[str, ...]) -> Any:
        unit = draw.choice([1, 10]) if type_ == "number" else 1
        out: dict[str, Any] = {"type": type_}
        if draw.random() < 0.4:
            word = draw.choice(["minimum", "exclusiveMinimum"])
            out[word] = draw.randint(-50, 5) / unit if unit > 1 else draw.randint(-50, 5)
        if draw.random() < 0.4:
            word = draw.choice(["maximum", "exclusiveMaximum"])
            out[word] = draw.randint(10, 150) / unit if unit > 1 else draw.randint(10, 150)
        return out | ({"multipleOf": draw.choice([1, 2, 5])} if draw.random() < 0.2 else {})

    return make


def _enum(draw: random.Random, depth: int, refs: tuple[str, ...]) -> Any:
    values = [any_json(draw) for _ in range(draw.randint(1, 4))]
    return {"const": values[0]} if draw.random() < 0.3 else {"enum": values}


def _types(draw: random.Random, depth: int, refs: tuple[str, ...]) -> Any:
    types = draw.sample(["string", "integer", "boolean", "null", "array"], draw.randint(1, 3))
    return {"type": types, "minLength": 1, "maximum": 9, "maxItems": 2}


def _object(draw: random.Random, depth: int, refs: tuple[str, ...]) -> Any:
    names = draw.sample(NAMES, draw.randint(1, 4))
    out = {"type": "object", "properties": {name: schema(draw, depth, refs) for name in names}}
    if draw.random() < 0.6:
        out["required"] = draw.sample(names, draw.randint(0, len(names)))
    if draw.random() < 0.3:
        out["additionalProperties"] = draw.choice([True, False, {"type": "integer"}])
    if draw.random() < 0.1 and out.get("additionalProperties") is not False:
        out["required"] = [*out.get("required", []), "unnamed"]
    return out


def _map(draw: random.Random, depth: int, refs: tuple[str, ...]) -> Any:
    if draw.random() < 0.3:
        return {"type": "object", "patternProperties": {"^x": schema(draw, depth, refs)}}
    return {"type": "object", "additionalProperties": schema(draw, depth, refs)}


def _array(draw: random.Random, depth: int, refs: tuple[str, ...]) -> Any:
    out = {"type": "array", "items": schema(draw, depth, refs)}
    out |= {"minItems": draw.randint(0, 2)} if draw.random() < 0.4 else {}
    return out | ({"maxItems": draw.randint(2, 4)} if draw.random() < 0.4 else {})


def _tuple(draw: random.Random, depth: int, refs: tuple[str, ...]) -> Any:
    front = [schema(draw, depth, refs) for _ in range(draw.randint(1, 3))]
    out: dict[str, Any] = {"type": "array", "prefixItems": front}
    out |= {"minItems": draw.randint(0, len(front))} if draw.random() < 0.3 else {}
    return {**out, "items": draw.choice([False, schema(draw, depth, refs)])}


def _any_of(draw: random.Random, depth: int, refs: tuple[str, ...]) -> Any:
    ways = [schema(draw, depth, refs) for _ in range(draw.randint(1, 3))]
    return {"anyOf": ways, **draw.choice([{}, {}, {"type": ["object", "string", "null"]}])}


def _all_of(draw: random.Random, depth: int, refs: tuple[str, ...]) -> Any:
    kind = draw.choice(["object", "string", "number", "array", "anyOf"][: 5 if depth else 3])
    parts = [MAKERS[kind](draw, depth, refs) for _ in range(2)]
    return {"allOf": parts} if draw.random() < 0.7 else {**parts[0], "allOf": parts[1:]}


MAKERS = {
    "string": _string,
    "integer": _number("integer"),
    "number": _number("number"),
    "boolean": lambda draw, depth, refs: {"type": "boolean"},
    "null": lambda draw, depth, refs: {"type": "null"},
    "any": lambda draw, depth, refs: draw.choice([True, {}, {"title": "A"}]),
    "ref": lambda draw, depth, refs: {"$ref": draw.choice(refs)},
    "enum": _enum,
    "types": _types,
    "object": _object,
    "map": _map,
    "array": _array,
    "tuple": _tuple,
    "anyOf": _any_of,
    "allOf": _all_of,
}


def value(of: Any, root: Any, draw: random.Random, depth: int = 8) -> Any:
    """A value that a schema may allow: not all of its keywords are looked at."""
    if isinstance(of, bool) or depth < 0:
        return any_json(draw, 1)
    if "$ref" in of:
        return value(_target(of["$ref"], root), root, draw, depth - 1)
    if "allOf" in of:
        parts = [{k: v for k, v in of.items() if k != "allOf"}, *of["allOf"]]
        return value(_joined([part for part in parts if part]), root, draw, depth - 1)
    if "anyOf" in of:
        return value(draw.choice(of["anyOf"]), root, draw, depth - 1)
    if "enum" in of or "const" in of:
        return draw.choice(of.get("enum", [of.get("const")]))
    type_ = of.get("type", "any")
    type_ = draw.choice(type_) if isinstance(type_, list) else type_
    if type_ == "object":
        return _object_of(of, root, draw, depth - 1)
    if type_ == "array":
        return _array_of(of, root, draw, depth - 1)
    if type_ == "string":
        if "pattern" in of:
            return draw.choice(PATTERNS[of["pattern"]])
        return text(draw, of.get("minLength", 0), of.get("maxLength", 8))
    if type_ == "integer":
        return draw.choice([draw.randint(-60, 160), draw.randint(-5, 20) * 10])
    if type_ == "number":
        return draw.choice([draw.randint(-60, 160), draw.randint(-300, 300) / 8 + 0.0625])
    return {"boolean": draw.random() < 0.5, "null": None}.get(type_, any_json(draw))


def _joined(parts: list[Any]) -> Any:
    """Something like what all parts allow."""
    if all(isinstance(part, dict) and part.get("type") == "object" for part in parts):
        properties: dict[str, Any] = {}
        for part in parts:
            for name, one in part.get("properties", {}).items():
                properties[name] = {"allOf": [properties[name], one]} if name in properties else one
        required = [name for part in parts for name in part.get("required", [])]
        return {"type": "object", "properties": properties, "required": required}
    return parts[0]


def _object_of(of: Any, root: Any, draw: random.Random, depth: int) -> Any:
    """The required properties, then the others, then further ones: a grammar's order."""
    said, needed = of.get("properties", {}), of.get("required", [])
    out = {name: value(one, root, draw, depth) for name, one in said.items() if name in needed}
    further = of.get("additionalProperties", not said and "patternProperties" not in of)
    for name in needed:
        if name not in said:
            out[name] = value(True if further is False else further, root, draw, depth)
    for name, one in said.items():
        if name not in needed and draw.random() < 0.6:
            out[name] = value(one, root, draw, depth)
    for i in range(draw.randint(0, 2)):
        name = f"x{i}{text(draw)}"
        if further is not False:
            out[name] = value(further, root, draw, depth)
        elif "patternProperties" in of:
            out[name] = value(of["patternProperties"]["^x"], root, draw, depth)
    return out


def _array_of(of: Any, root: Any, draw: random.Random, depth: int) -> Any:
    front = [value(one, root, draw, depth) for one in of.get("prefixItems", [])]
    if "minItems" in of and front and draw.random() < 0.3:
        return front[: draw.randint(of["minItems"], len(front))]
    if of.get("items") is False:
        return front
    n = draw.randint(0 if front else of.get("minItems", 0), of.get("maxItems", 3))
    return front + [value(of.get("items", True), root, draw, depth) for _ in range(n)]


def _target(ref: str, root: Any) -> Any:
    names = {"#/$defs/a": "a", "#/$defs/b~1c": "b/c", "#/$defs/d~0e%25": "d~e%"}
    return root["$defs"][names[ref]] if ref in names else root
