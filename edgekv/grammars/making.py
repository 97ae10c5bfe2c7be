"""What the parts of a schema share while it is made anew: marks, definitions, and what is lost."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

from edgekv.errors import BadInput
from edgekv.grammars.automata import matches
from edgekv.grammars.marks import Marks, Schema
from edgekv.grammars.merging import Flat
from edgekv.grammars.patterns import Rule, rule_of
from edgekv.grammars.regexes import NotHeld, tree_of

PARTS_MOST, DEPTH_MOST = 20_000, 60
WORK_MOST, WORK_OF_CHARACTER = 500_000, 20
"""Nodes of patterns that are looked at."""
NOT_HELD = "a grammar cannot express it"


def _in_a_line(text: str) -> str:
    """A text as a message has it: names may have line breaks."""
    return " ".join(text.split())[-200:]


class Making:
    """A schema in the making. `lost` is what was left out."""

    def __init__(self, marks: Marks) -> None:
        self.marks = marks
        self.lost: list[tuple[str, str, str]] = []
        self.why_never: tuple[str, str, str] | None = None
        self.definitions: dict[str, Schema] = {}
        self._numbers = count()
        self._parts = self._worked = 0
        self.depth = 0

    def inside(self, schema: Any, path: str) -> Schema | None:
        """The schema of a part inside a value; None if it allows none."""
        raise NotImplementedError

    def flats(self, schema: Any, path: str) -> list[Flat]:
        """Flat schemas, of which one has to hold, without references."""
        raise NotImplementedError

    def new_name(self) -> str:
        """A name for a definition."""
        return f"{self.marks.digest}-{next(self._numbers)}"

    def lose(self, path: str, keyword: str, why: str = NOT_HELD) -> None:
        self.lost.append((_in_a_line(path), keyword, _in_a_line(why)))

    def never(self, path: str, keyword: str, why: str = "no value is allowed") -> None:
        """Remember why nothing is allowed, for a schema that allows nothing at all."""
        self.why_never = self.why_never or (_in_a_line(path), keyword, _in_a_line(why))

    def count_part(self, path: str) -> None:
        self._parts += 1
        if self._parts > PARTS_MOST or self.depth > DEPTH_MOST:
            reason = "nests too deep" if self.depth > DEPTH_MOST else "has too many parts"
            raise BadInput(f"the JSON schema {reason} at '{_in_a_line(path)}': make it simpler")

    def definition(self, made: Schema) -> Schema:
        """A reference to a schema that stands in more than one place."""
        if not any(isinstance(part, (dict, list)) for word, part in made.items() if word != "enum"):
            return made
        name = self.new_name()
        self.definitions[name] = made
        return {"$ref": f"#/$defs/{name}"}

    def union(self, alternatives: list[Schema | None]) -> Schema | None:
        """The schema of what one of them allows."""
        found = [made for made in alternatives if made is not None]
        if len(found) > 1:
            found = list({json.dumps(made): made for made in found}.values())
        if not found:
            return None
        if {} in found:
            return {}
        return found[0] if len(found) == 1 else {"anyOf": found}

    def pattern(
        self,
        patterns: tuple[str, ...],
        least: int = 0,
        most: int | None = None,
        other: tuple[str, ...] = (),
    ) -> Rule:
        """The rule of patterns. Raises NotHeld, also if the schema's take too much work."""
        self._work(0)
        try:
            rule = rule_of(patterns, least, most, other)
        except NotHeld as error:
            self._work(error.work)
            raise
        self._work(rule.work)
        return rule

    def is_matched(self, pattern: str, text: str) -> bool:
        """Whether a pattern finds a text. Raises NotHeld."""
        self._work(WORK_OF_CHARACTER * len(text))
        return matches(tree_of(pattern), text)

    def _work(self, nodes: int) -> None:
        self._worked += nodes
        if self._worked > WORK_MOST:
            raise NotHeld("the schema's patterns are too many")
