"""Bounds and multiples as grammars: what a grammar lets through is in the bounds."""

from __future__ import annotations

import random
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgekv.grammars.schemas import finished, prepared
from edgekv.native import chat
from tests.gbnf import Grammar


def grammar_of(schema) -> Grammar | None:
    """None if no number is allowed."""
    made = prepared(schema)
    if made.lost:
        assert made.lost[0][2] == "no number is allowed"
        return None
    grammar = finished(chat.grammar_of(made.schema), made.rules)
    chat.check_grammar(None, grammar)
    return Grammar(grammar)


def is_valid(schema, number: Decimal) -> bool:
    return (
        ("minimum" not in schema or number >= decimal(schema["minimum"]))
        and ("maximum" not in schema or number <= decimal(schema["maximum"]))
        and ("exclusiveMinimum" not in schema or number > decimal(schema["exclusiveMinimum"]))
        and ("exclusiveMaximum" not in schema or number < decimal(schema["exclusiveMaximum"]))
        and ("multipleOf" not in schema or number % decimal(schema["multipleOf"]) == 0)
        and (schema["type"] == "number" or number % 1 == 0)
    )


def decimal(number: float) -> Decimal:
    return Decimal(repr(number))


def written(number: Decimal) -> str:
    text = f"{number:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


CASES = [
    ({"type": "integer", "minimum": 0}, ["0", "7", "120"], ["-1", "1.5", "01", "1e5"]),
    ({"type": "integer", "maximum": -5}, ["-5", "-60"], ["-4", "0", "-05", "5"]),
    ({"type": "integer", "minimum": -12, "maximum": 130}, ["-12", "0", "130"], ["-13", "131"]),
    ({"type": "integer", "minimum": 1.5, "maximum": 2.5}, ["2"], ["1", "3"]),
    ({"type": "integer", "exclusiveMinimum": -2, "exclusiveMaximum": 2}, ["-1", "1"], ["-2", "2"]),
    ({"type": "integer", "minimum": 10**18}, ["1000000000000000000"], ["999999999999999999"]),
    ({"type": "integer", "maximum": 2**63 - 1}, ["9223372036854775807"], ["9223372036854775808"]),
    ({"type": "integer", "minimum": -(2**63)}, ["-9223372036854775808"], ["-9223372036854775809"]),
    ({"type": "integer", "minimum": 5, "exclusiveMinimum": 7}, ["8"], ["5", "7"]),
    ({"type": "integer", "minimum": 5, "exclusiveMinimum": True}, ["6"], ["5"]),
    ({"type": "integer", "multipleOf": 5, "minimum": 0}, ["0", "5", "115"], ["-5", "3", "05"]),
    ({"type": "integer", "multipleOf": 10}, ["0", "-20", "1230"], ["5", "00"]),
    ({"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 50}, ["7", "49"], ["0", "8"]),
    ({"type": "integer", "multipleOf": 2.5}, ["5", "10"], ["2", "2.5"]),
    ({"type": "number", "minimum": 0}, ["0", "0.5", "12.25", "0.0"], ["-1", "-0.1"]),
    ({"type": "number", "exclusiveMinimum": 0}, ["0.001", "1", "3.5"], ["0", "0.0", "-1"]),
    ({"type": "number", "minimum": -0.5, "maximum": 0.5}, ["-0.5", "0.50", "0"], ["0.51", "-0.51"]),
    (
        {"type": "number", "exclusiveMaximum": 1.25},
        ["1.249", "1.2", "-9"],
        ["1.25", "1.250", "1.3"],
    ),
    ({"type": "number", "maximum": -1.5}, ["-1.5", "-2", "-10.1"], ["-1.4", "-1", "0"]),
    ({"type": "number", "minimum": 1e-3, "maximum": 1e3}, ["0.001", "1000"], ["0.0009", "1000.1"]),
    ({"type": "number", "multipleOf": 0.01}, ["0.25", "-1.1", "3"], ["0.001"]),
    ({"type": "number", "multipleOf": 0.25, "minimum": 1}, ["1.75", "2"], ["0.75", "1.3"]),
    ({"type": "number", "multipleOf": 1}, ["3", "-1"], ["1.5"]),
    ({"type": "number", "maximum": 1e300}, ["5", "-0.1"], ["1e400"]),
]


@pytest.mark.parametrize(("schema", "good", "bad"), CASES)
def test_a_number_is_in_its_bounds(schema, good, bad):
    grammar = grammar_of(schema)
    assert grammar and all(map(grammar.fits, good)) and not any(map(grammar.fits, bad))


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"minimum": 1e300}, "minimum"),
        ({"maximum": -(10**400)}, "maximum"),
        ({"multipleOf": 7}, "multipleOf"),
        ({"multipleOf": 0.3, "minimum": 0}, "multipleOf"),
        ({"minimum": 2, "maximum": 1}, "minimum"),
        ({"exclusiveMinimum": 1, "exclusiveMaximum": 1}, "exclusiveMinimum"),
        ({"minimum": "1"}, "minimum"),
        ({"multipleOf": 0}, "multipleOf"),
    ],
)
def test_a_bound_that_no_grammar_expresses_is_named(schema, keyword):
    made = prepared({"type": "number", **schema})
    assert [lost[1] for lost in made.lost] == [keyword]
    chat.check_grammar(None, finished(chat.grammar_of(made.schema), made.rules))


def test_bounds_without_a_type_make_a_number():
    grammar = grammar_of({"minimum": 3})
    assert [grammar.fits(text) for text in ("3", "3.5", '"a"', "2")] == [True, True, False, False]


INTEGERS = st.integers(-1200, 1200) | st.integers(-(10**17), 10**17)
DECIMALS = st.builds(lambda n, places: n / 10**places, INTEGERS, st.integers(0, 4))
BOUNDS = st.one_of(st.integers(-30, 30), INTEGERS, st.integers(-300, 300).map(lambda n: n / 100))
STEPS = st.sampled_from([1, 2, 5, 10, 20, 25, 100, 0.1, 0.01, 0.5, 0.25, 0.05, 0.2])


@settings(max_examples=400)
@given(
    st.sampled_from(["integer", "number"]),
    st.dictionaries(
        st.sampled_from(["minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"]),
        BOUNDS,
        max_size=3,
    ),
    st.none() | STEPS,
    st.lists(INTEGERS | DECIMALS, max_size=10),
    st.integers(0, 2**32),
)
def test_numbers_are_those_of_the_schema(type_, bounds, step, numbers, seed):
    schema = {"type": type_, **bounds, **({"multipleOf": step} if step else {})}
    grammar = grammar_of(schema)
    near = [decimal(bound) + Decimal(i) / 100 for bound in bounds.values() for i in range(-3, 4)]
    for number in [
        *map(decimal, numbers),
        *near,
        Decimal(0),
        *(decimal(b) for b in bounds.values()),
    ]:
        number = number.quantize(Decimal("0.0001"))
        if abs(number) < 10**16:
            fits = grammar is not None and grammar.fits(written(number))
            assert fits == is_valid(schema, number), number
    draw = random.Random(seed)
    for _ in range(10 if grammar else 0):
        text = grammar.drawn(draw)
        assert is_valid(schema, Decimal(text)), text
