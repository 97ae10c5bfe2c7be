"""A schema, part by part, in words that llama.cpp's converter takes exactly."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from edgekv.errors import BadInput
from edgekv.grammars import arrays, objects, values
from edgekv.grammars.endless import endless, reached
from edgekv.grammars.keywords import (
    CHECKS,
    LOST,
    OF_SCHEMAS,
    OF_TYPE,
    TYPES,
    is_schema,
    with_usual_names,
)
from edgekv.grammars.making import Making
from edgekv.grammars.marks import Marks, Schema
from edgekv.grammars.merging import Flat, together
from edgekv.grammars.references import References
from edgekv.grammars.regexes import NotHeld

ALTERNATIVES_MOST = 64
COMPOUND = ("$ref", "allOf", "anyOf", "oneOf")


class Shapes(Making):
    """Makes a schema of a schema. `lost` is what was left out."""

    def __init__(self, root: Any, marks: Marks) -> None:
        super().__init__(marks)
        self._root = root
        self._references = References(root)
        self._names: dict[str, str] = {}
        self._open: frozenset[str] = frozenset()
        self._used: set[str] = set()
        self._none: set[str] = set()

    def whole(self) -> Schema:
        if not is_schema(self._root):
            raise BadInput("a JSON schema is an object: {...}")
        flats = self._alternatives(self._root, "")
        if len(flats) == 1:  # parsers of tool calls look for properties, not for a reference
            flats = self.flats(self._root, "")
        made = self.union([self._flat(flat, "") for flat in flats])
        if made is None:
            self.lost.append(self.why_never or ("", "not", "no value is allowed"))
            made = {}
        return self._with_definitions(made)

    def _with_definitions(self, made: Schema) -> Schema:
        """A schema with the definitions that it leads to."""
        met = reached(made, self.definitions)
        if met.keys() & self._none:
            self.lose("", "$ref", "it leads to what allows no value")
        for name in endless(made, met):
            self.lose("", "$ref", "its values have no end")
            met |= {name: {}} if name else {}
        return {**made, "$defs": met} if met else made

    def of(self, schema: Any, path: str) -> Schema | None:
        """The schema of one part; None if it allows no value."""
        self.depth += 1
        self.count_part(path)
        try:
            return self._of(schema, path)
        finally:
            self.depth -= 1

    def inside(self, schema: Any, path: str) -> Schema | None:
        """As `of`, for a part inside a value: from here on, references may lead back."""
        opened, self._open = self._open, frozenset()
        try:
            return self.of(schema, path)
        finally:
            self._open = opened

    def _of(self, schema: Any, path: str) -> Schema | None:
        flats = self._alternatives(schema, path)
        if len(flats) == 1 and "$ref" in flats[0]:
            return self._flat(flats[0], path)

        def make() -> Schema | None:
            return self.union([self._flat(flat, path) for flat in flats])

        is_plain = isinstance(schema, bool) or not any(word in schema for word in COMPOUND)
        return make() if is_plain else self._named(json.dumps(schema), make, path)

    def _named(self, key: str, make: Callable[[], Schema | None], path: str) -> Schema | None:
        """What `make` makes, with a name if it is met again inside itself."""
        if key in self._open:
            self.never(path, "$ref", "it refers to itself")
            return None
        if key not in self._names:
            name = self._names[key] = self.new_name()
            opened, self._open = self._open, self._open | {key}
            made = make()
            self._open = opened
            if made is None:
                self._none.add(name)
            if not key.startswith("#") and name not in self._used:
                del self._names[key]  # it needs no name
                return made
            self.definitions[name] = made or {}
        name = self._names[key]
        if name in self._none:
            return None
        self._used.add(name)
        return {"$ref": f"#/$defs/{name}"}

    def _flat(self, flat: Flat, path: str) -> Schema | None:
        """The schema of a flat one, or of a reference."""
        if "$ref" in flat:
            ref = flat["$ref"]
            return self._named(f"#{ref}", lambda: self.of(self._references.find(ref), path), path)
        implied = dict.fromkeys(OF_TYPE[word] for word in flat if OF_TYPE.get(word))
        types = flat.get("type") or list(implied)
        for word in LOST[""]:
            if word in flat:
                self.lose(path, word)
        if "enum" in flat:
            return values.constants(self, flat, types, path)
        if not types or set(types) >= set(TYPES) - {"integer"} and not implied:
            return {}
        return self.union([self._of_type(type_, flat, path) for type_ in types])

    def _of_type(self, type_: str, flat: Flat, path: str) -> Schema | None:
        if type_ == "object":
            return objects.of(self, flat, path)
        if type_ == "array":
            return arrays.of(self, flat, path)
        if type_ == "string":
            return values.string(self, flat, path)
        if type_ in ("integer", "number"):
            return values.number(self, flat, type_ == "integer", path)
        return {"type": type_}

    def _alternatives(self, schema: Any, path: str) -> list[Flat]:
        """Flat schemas, of which one has to hold. One that is only a $ref stays one."""
        self.count_part(path)
        if isinstance(schema, bool):
            return [{}] if schema else []
        schema = self._checked(schema, path)
        factors = [("$ref", [{"$ref": schema["$ref"]}])] if "$ref" in schema else []
        for word in COMPOUND[1:]:
            ways = [self._alternatives(part, path) for part in schema.get(word, [])]
            if word == "allOf":
                factors += [(word, way) for way in ways]
            elif word in schema:
                factors.append((word, [flat for way in ways for flat in way]))
        out = self._own(schema, path)
        for word, factor in factors:
            if len(out) > 1 and len(out) * len(factor) > ALTERNATIVES_MOST:
                self.lose(path, word, f"it has more than {ALTERNATIVES_MOST} alternatives")
                continue
            out = [flat for a in out for b in factor for flat in self._together(a, b, path)]
        return out

    def _together(self, a: Flat, b: Flat, path: str) -> list[Flat]:
        if not a or not b:
            return [a or b]
        if "$ref" not in a and "$ref" not in b:
            merged = together(a, b, self._may_match)
            if merged is None:
                self.never(path, "type", "its types have nothing in common")
            return [] if merged is None else [merged]
        firsts, seconds = self._expanded(a, path), self._expanded(b, path)
        return [flat for x in firsts for y in seconds for flat in self._together(x, y, path)]

    def _may_match(self, pattern: str, name: str) -> bool:
        try:
            return self.is_matched(pattern, name)
        except NotHeld:  # it is named where the object is made
            return True

    def flats(self, schema: Any, path: str) -> list[Flat]:
        """Flat schemas, of which one has to hold, without references."""
        return [
            flat for one in self._alternatives(schema, path) for flat in self._expanded(one, path)
        ]

    def _expanded(self, flat: Flat, path: str) -> list[Flat]:
        """What a flat schema means, without a reference."""
        if "$ref" not in flat:
            return [flat]
        key = f"#{flat['$ref']}"
        if key in self._open:
            self.never(path, "$ref", "it refers to itself")
            return []
        opened, self._open = self._open, self._open | {key}
        out = self.flats(self._references.find(flat["$ref"]), path)
        self._open = opened
        return out

    def _checked(self, schema: Schema, path: str) -> Schema:
        """A schema's keywords, without remarks and what cannot be used."""
        out: Schema = {}
        for word, value in with_usual_names(schema).items():
            check, wanted = CHECKS.get(word, (lambda _: True, ""))
            if not check(value):
                self.lose(path, word, f"it is not {wanted}")
            elif word == "$ref":
                out |= self._ref(value, path)
            elif word == "type":
                out |= self._types(value, path)
            elif word in OF_SCHEMAS:
                out[word] = {name: self._one(one, path, name) for name, one in value.items()}
            elif word in OF_TYPE or word in COMPOUND or word in ("enum", "nullable"):
                out[word] = value
        return out

    def _one(self, schema: Any, path: str, name: str) -> Any:
        if is_schema(schema):
            return schema
        self.lose(f"{path}.{name}" if path else name, "properties", "it is not a schema")
        return True

    def _ref(self, ref: Any, path: str) -> Schema:
        try:
            target = self._references.find(ref)
        except (LookupError, AttributeError, TypeError):
            self.lose(path, "$ref", "it leads nowhere in this schema")
            return {}
        if not is_schema(target):
            self.lose(path, "$ref", "it leads to what is no schema")
            return {}
        return {"$ref": ref}

    def _types(self, said: Any, path: str) -> Schema:
        known = [name for name in TYPES if isinstance(said, list) and name in said]
        if not known or len(known) != len(set(map(str, said))):
            self.lose(path, "type", "it is not one of JSON schema's types")
            return {}
        return {"type": [name for name in known if name != "integer" or "number" not in known]}

    def _own(self, schema: Schema, path: str) -> list[Flat]:
        """What a schema says beside references and other schemas."""
        if schema.get("not") in ({}, True):
            self.never(path, "not")
            return []
        flat = {word: value for word, value in schema.items() if word not in COMPOUND}
        flat |= {word: [flat[word]] for word in ("pattern", "multipleOf", "format") if word in flat}
        is_nullable = flat.pop("nullable", False) is True
        if schema.get("not") is False:
            del flat["not"]
        if "if" in flat and not {"then", "else"} & flat.keys():
            del flat["if"]
        return [flat, {"enum": [None]}] if is_nullable and flat else [flat]
