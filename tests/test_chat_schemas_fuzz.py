"""Random schemas: their grammars let through what `jsonschema` allows, and nothing else."""

from __future__ import annotations

import json
import random
import re
import time
from decimal import Decimal
from fractions import Fraction
from typing import Any

import jsonschema
from hypothesis import given, settings
from hypothesis import strategies as st

from edgekv.errors import BadInput
from edgekv.grammars.keywords import CHECKS, OF_TYPE, TYPES
from edgekv.grammars.schemas import Prepared, finished, prepared, refusal
from edgekv.native import chat
from tests import json_schemas
from tests.gbnf import Grammar

SEEDS = st.integers(0, 2**32)


def exact(number: float) -> Fraction:
    return Fraction(Decimal(repr(number)))


def _multiple_of(validator: Any, step: Any, number: Any, schema: Any) -> Any:
    if validator.is_type(number, "number") and exact(number) % exact(step):
        yield jsonschema.ValidationError(f"{number} is no multiple of {step}")


def _pattern(validator: Any, pattern: str, text: Any, schema: Any) -> Any:
    """As ECMA-262 has it: the end is the end, and a dot is in a line."""
    said = pattern.replace("$", r"\Z").replace(".", "[^\n\r\u2028\u2029]")
    if validator.is_type(text, "string") and not re.search(said, text, re.ASCII):
        yield jsonschema.ValidationError(f"{text!r} has no {pattern}")


Validator = jsonschema.validators.extend(
    jsonschema.Draft202012Validator, {"multipleOf": _multiple_of, "pattern": _pattern}
)


def grammar_of(made: Prepared) -> Grammar:
    grammar = finished(chat.grammar_of(made.schema), made.rules)
    chat.check_grammar(None, grammar)
    return Grammar(grammar)


def is_valid(schema: Any, value: Any) -> bool | None:
    """None where `jsonschema` finds no end."""
    try:
        return bool(Validator(schema).is_valid(value))
    except RecursionError:
        return None


def closed(schema: Any, is_part: bool = False) -> Any:
    """A schema as llama.cpp reads it: what has no name is not written, and tuples are whole."""
    if not isinstance(schema, dict):
        return schema
    out = dict(schema)
    for word in ("properties", "patternProperties", "$defs"):
        if word in out:
            out[word] = {name: closed(one) for name, one in out[word].items()}
    for word in ("items", "additionalProperties"):
        out |= {word: closed(out[word])} if word in out else {}
    for word, is_one in (("prefixItems", False), ("anyOf", is_part), ("allOf", True)):
        out |= {word: [closed(one, is_one) for one in out[word]]} if word in out else {}
    if "prefixItems" in out:
        out.setdefault("minItems", len(out["prefixItems"]))
    is_named = out.keys() & {"properties", "patternProperties", "allOf"}
    if is_named and not is_part and "additionalProperties" not in out:
        out["unevaluatedProperties"] = False
    return out


def check(schema: Any, draw: random.Random) -> None:
    made = prepared(schema)
    grammar = grammar_of(made)
    asked = closed(schema)
    for _ in range(6):
        value = json_schemas.value(schema, schema, draw)
        if is_valid(asked, value):
            text = json.dumps(value, ensure_ascii=False)
            assert grammar.fits(text), text
    for _ in range(0 if made.lost else 6):
        text = grammar.drawn(draw)
        assert is_valid(schema, json.loads(text)) is not False, text


@settings(max_examples=500)
@given(SEEDS)
def test_a_grammar_allows_what_its_schema_does(seed):
    draw = random.Random(seed)
    check(json_schemas.schema(draw), draw)


@settings(max_examples=300)
@given(SEEDS)
def test_a_grammar_allows_what_its_schema_with_references_does(seed):
    draw = random.Random(seed)
    check(json_schemas.with_definitions(draw), draw)


WORDS = [*CHECKS, *OF_TYPE, "type", "const", "$ref", "$defs", "nullable", "format", "if", "then"]
REFS = ["#", "#/$defs/a", "#/properties/a/items", "#/anyOf/0", "http://a", "#a", "%", 3]
SIMPLE = [None, True, False, 0, -1, 2, 1.5, 1e308, -1e308, 10**40, "", "a", "object", "string"]
SIMPLE += ["number", "integer", "array", "null", "^a(", "(a*)*$", "\ud800", "\x00", "date", *REFS]


def nonsense(draw: random.Random, depth: int = 4) -> Any:
    """JSON with the words of schemas in it."""
    kind = draw.random()
    if depth == 0 or kind < 0.25:
        return draw.choice(SIMPLE)
    if kind < 0.4:
        return [nonsense(draw, depth - 1) for _ in range(draw.randint(0, 4))]
    if kind < 0.5:
        return {draw.choice(json_schemas.NAMES): nonsense(draw, depth - 1) for _ in range(3)}
    words = draw.sample(WORDS, draw.randint(0, 5))
    return {word: _of_word(word, draw, depth - 1) for word in words}


def _of_word(word: str, draw: random.Random, depth: int) -> Any:
    if word == "type" and draw.random() < 0.8:
        return draw.choice([*TYPES, list(TYPES[:3])])
    if word == "$ref":
        return draw.choice(REFS)
    if word in ("anyOf", "oneOf", "allOf", "prefixItems", "enum") and draw.random() < 0.8:
        return [nonsense(draw, depth) for _ in range(draw.randint(0, 4))]
    if word in ("properties", "patternProperties", "$defs") and draw.random() < 0.8:
        return {name: nonsense(draw, depth) for name in draw.sample(["a", "b", "", "*", "^x"], 3)}
    return nonsense(draw, depth)


@settings(max_examples=3000)
@given(SEEDS)
def test_nonsense_ends_in_one_line_or_a_grammar(seed):
    start = time.perf_counter()
    try:
        made = prepared(nonsense(random.Random(seed)))
    except BadInput as refused:
        assert str(refused) and "\n" not in str(refused)
        return
    chat.check_grammar(None, finished(chat.grammar_of(made.schema), made.rules))
    if made.lost:
        assert "\n" not in refusal(made.lost, "it")
    assert time.perf_counter() - start < 1
