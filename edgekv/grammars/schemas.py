"""JSON schemas that llama.cpp's converter takes exactly.

llama.cpp makes a grammar of a schema. It ignores much in silence, and refuses much. `prepared`
writes a schema in words that llama.cpp understands, with marks where a rule of ours has to stand
(`edgekv.grammars.marks`); `finished` puts these rules into the grammar. What no grammar expresses
is left out, and named.

As in llama.cpp, properties and items that a schema does not name are not written, unless
`additionalProperties` or `items` says what they are; a `oneOf` is an `anyOf`; and keywords of
strings, say, make a string of a schema without a type.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from edgekv.errors import BadInput
from edgekv.grammars.marks import Marks, finished
from edgekv.grammars.shapes import Shapes

__all__ = ["Loss", "Prepared", "finished", "prepared", "refusal"]

DEPTH_MOST, NODES_MOST, CHARACTERS_MOST = 100, 20_000, 1_000_000
Loss = tuple[str, str, str]
"""Where, which keyword, and why it was left out."""


@dataclass
class Prepared:
    """A schema for llama.cpp, the rules for `finished`, and what was left out."""

    schema: dict[str, Any]
    rules: dict[str, str] = field(default_factory=dict)
    lost: list[Loss] = field(default_factory=list)


def prepared(schema: Any, where: str = "") -> Prepared:
    """A JSON schema as llama.cpp takes it. Raises BadInput for one that is too large.

    where: tells it from others of one grammar.
    """
    text = where + _bounded(schema)
    digest = blake2b(text.encode("utf-8", "replace"), digest_size=5).hexdigest()
    shapes = Shapes(schema, Marks(digest))
    try:
        made = shapes.whole()
    except RecursionError:
        raise BadInput("the JSON schema nests too deep: make it flatter") from None
    return Prepared(made, shapes.marks.rules, list(dict.fromkeys(shapes.lost)))


def refusal(lost: Sequence[Loss], what: str) -> str:
    """One line for a schema that has to be held to. what: whose schema it is."""
    path, keyword, why = lost[0]
    return f"{what}: '{keyword}'{_of(path)} cannot be held to: {why}; leave it out"


def _of(path: str) -> str:
    return f" of '{path}'" if path else ""


def _bounded(schema: Any) -> str:
    """The schema as text. Raises BadInput for one that is too large."""
    left, nodes = [(schema, "", 0)], 0
    while left:
        node, path, depth = left.pop()
        nodes += 1
        if depth > DEPTH_MOST or nodes > NODES_MOST:
            reason = "nests too deep" if depth > DEPTH_MOST else "has too many parts"
            where = " ".join(path.split())
            raise BadInput(f"the JSON schema {reason} at '{where}': make it simpler")
        if isinstance(node, dict):
            left += [(part, f"{path}.{key}"[-200:], depth + 1) for key, part in node.items()]
        elif isinstance(node, list):
            left += [(part, f"{path}[]"[-200:], depth + 1) for part in node]
    try:
        text = json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError):
        raise BadInput("a JSON schema is JSON: this one has other values in it") from None
    if len(text) > CHARACTERS_MOST:
        raise BadInput(f"the JSON schema is longer than {CHARACTERS_MOST:,} characters: shorten it")
    return text
