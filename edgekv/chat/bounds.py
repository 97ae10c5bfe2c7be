"""How large and how deep may be what llama.cpp's parsers get: they go as deep as the text."""

from __future__ import annotations

from typing import Any

from edgekv.errors import BadInput

JSON_DEPTH = 100
"""Arrays and objects within each other, as in most parsers of JSON."""
GRAMMAR_MOST = 2**20
"""Bytes of a grammar."""
RULES_MOST, DEPTH_MOST = 8192, 256


def check_json(value: Any, what: str) -> None:
    """Raises BadInput for JSON that is nested too deeply. what: its name, in the message."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > JSON_DEPTH:
            raise BadInput(f"{what} is nested too deeply: {JSON_DEPTH} levels are the most")
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]


def check_grammar(grammar: str) -> None:
    """Raises BadInput for what would take llama.cpp's parser deeper than its stack."""
    depth = deepest = 0
    for letter in grammar:
        depth += (letter == "(") - (letter == ")")
        deepest = max(deepest, depth)
    if (
        len(grammar) > GRAMMAR_MOST
        or grammar.count("::=") > RULES_MOST
        or deepest > DEPTH_MOST
        or "\0" in grammar
    ):
        raise BadInput("this grammar is too large: make it shorter, with fewer rules and brackets")
