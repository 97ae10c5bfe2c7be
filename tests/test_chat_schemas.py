"""JSON schemas as grammars: what a grammar lets through is what the schema allows."""

from __future__ import annotations

import enum
import json
import random
import time
from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any, Literal
from uuid import UUID

import pytest
from pydantic import BaseModel, Field, TypeAdapter

from edgekv.errors import BadInput
from edgekv.grammars.schemas import finished, prepared, refusal
from edgekv.native import chat
from tests.gbnf import Grammar
from tests.test_chat_native import HERMES

ANY = {"type": "object"}


def grammar_of(schema) -> str:
    made = prepared(schema)
    grammar = finished(chat.grammar_of(made.schema), made.rules)
    chat.check_grammar(None, grammar)
    return grammar


def fits(schema, *texts: str) -> list[bool]:
    grammar = Grammar(grammar_of(schema))
    return [grammar.fits(text) for text in texts]


def lost(schema) -> list[tuple[str, str]]:
    return [(path, keyword) for path, keyword, _ in prepared(schema).lost]


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('root ::= "a" | "b"', ["a", "b"], ["", "ab", "c"]),
        ('root ::= "a"* b\nb ::= [^a-c\\]]+', ["x", "aad"], ["a", "ab", "]"]),
        ('root ::= ("ab" | [\\x63-\\u0065]){2,3}', ["abab", "cde"], ["ab", "cdec"]),
        ('root ::= "\\"" . "\\\\"?', ['"x', '"x\\', '"😀'], ['"', 'x"']),
        ('root ::= "(" root ")" | # twice\n  "x"', ["x", "((x))"], ["(x", "()"]),
        ("root ::= [ab]{0,1} [-x]{2}", ["-x", "axx"], ["abxx", "x"]),
    ],
)
def test_a_grammar_is_read_as_llama_cpp_reads_it(grammar, good, bad):
    chat.check_grammar(None, grammar)
    read = Grammar(grammar)
    assert all(map(read.fits, good)) and not any(map(read.fits, bad))
    assert all(read.fits(read.drawn(random.Random(i))) for i in range(50))


@pytest.mark.parametrize("grammar", ["root ::= foo", "root ::= (", 'x ::= "a"', "root ::= *"])
def test_a_text_that_is_no_grammar_is_refused(grammar):
    with pytest.raises(ValueError):
        Grammar(grammar)
    with pytest.raises(BadInput):
        chat.check_grammar(None, grammar)


@pytest.mark.parametrize("schema", [True, {}, {"title": "A"}, {"description": "b", "default": 1}])
def test_a_schema_that_says_nothing_is_any_json(schema):
    assert all(fits(schema, "1", '"a"', "[null, {}]", '{"a": [true]}'))
    assert not any(fits(schema, "", "a", "[1"))


def test_a_property_may_have_any_schema():
    schema = {**ANY, "properties": {"a": True, "b": {"not": {}}, "c": {"title": "C"}}}
    assert fits(schema, '{"a": 1}', '{"a": {}, "c": "x"}', '{"b": 1}') == [True, True, False]
    assert lost(schema) == []


@pytest.mark.parametrize("schema", [False, {"not": {}}, {"enum": []}, {"allOf": [False]}])
def test_a_schema_that_allows_nothing_is_named(schema):
    assert len(lost(schema)) == 1


def test_references_are_found():
    schema = {
        "type": "object",
        "properties": {
            "self": {"$ref": "#"},
            "slash": {"$ref": "#/$defs/a~1b%25~0"},
            "anchor": {"$ref": "#here"},
        },
        "$defs": {"a/b%~": {"type": "integer"}, "c": {"$anchor": "here", "type": "null"}},
    }
    good = ['{"slash": 1}', '{"anchor": null}', '{"self": {"self": {"slash": 2}}}']
    assert all(fits(schema, *good)) and lost(schema) == []
    assert not any(fits(schema, '{"slash": "a"}', '{"anchor": 1}', '{"self": {"self": 1}}'))


@pytest.mark.parametrize("ref", ["http://a/b", "#/nothing", "#nowhere", "other.json#/a", 5])
def test_a_reference_that_leads_nowhere_is_any_json(ref):
    schema = {**ANY, "properties": {"a": {"$ref": ref}}}
    assert lost(schema) == [("a", "$ref")]
    assert all(fits(schema, '{"a": 1}', '{"a": {"b": []}}'))


def test_a_schema_that_refers_to_itself_at_once_ends():
    assert lost({"$ref": "#"}) == [("", "$ref")]
    assert fits({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "null", "1") == [True, False]


def test_values_without_an_end_are_named():
    schema = {**ANY, "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    assert lost(schema) == [("", "$ref")]
    assert fits(schema, '{"a": 1}') == [True]


def test_names_may_have_any_characters():
    names = [
        "",
        '"',
        "\\",
        "a\nb",
        "*",
        "\u2028",
        "😀",
        "]",
        "^",
        "a-b",
        "\x00",
        "\ud800",
        "é",
        "/",
    ]
    schema = {**ANY, "properties": {name: {"const": i} for i, name in enumerate(names)}}
    for further in (False, True, {"type": "integer"}):
        grammar = Grammar(grammar_of({**schema, "additionalProperties": further}))
        for i, name in enumerate(names):
            key = json.dumps(name, ensure_ascii=name == "\ud800")
            assert grammar.fits(f"{{{key}: {i}}}")
            assert not grammar.fits(f"{{{key}: {i + 1}}}")
        assert grammar.fits('{"other\\n": 5}') == (further is not False)


def test_constants_may_have_any_characters():
    values = ['"', "\\", "\x00\x1f\n", "😀\U0010ffff", 1.5, 10**30, -0.001, None, True, [], {}]
    values += [[1, "a"], {"a": [1], "b": {"*": "c\n"}}]
    for schema in ({"enum": values}, {"anyOf": [{"const": value} for value in values]}):
        grammar = Grammar(grammar_of(schema))
        assert all(grammar.fits(json.dumps(value, ensure_ascii=False)) for value in values)
        assert not any(map(grammar.fits, ['"a"', "1", "[1]", "{1}", '"\\u0000"']))


def test_a_name_that_is_required_is_a_property():
    assert fits({**ANY, "required": ["a"]}, '{"a": [1]}', "{}") == [True, False]
    schema = {**ANY, "properties": {"b": {"type": "null"}}, "required": ["a"]}
    assert fits(schema, '{"a": 1, "b": null}', '{"a": 1}', '{"b": null}') == [True, True, False]
    assert lost({**schema, "additionalProperties": False}) == [("", "required")]


def test_rules_of_like_names_are_told_apart():
    open_ = {**ANY, "properties": {"x": {"type": "null"}}}
    texts = {**open_, "additionalProperties": {"type": "string"}}
    numbers = {**open_, "additionalProperties": {"type": "integer"}}
    items = {"prefixItems": [{}], "items": {"type": "string"}}
    schema = {
        **ANY,
        "properties": {
            "a-b": texts,
            "a": {**ANY, "properties": {"b": numbers, "c": items}},
            "a-c": {"prefixItems": [{}], "items": {"type": "integer"}},
        },
    }
    good = ['{"a-b": {"y": "s"}, "a": {"b": {"y": 1}, "c": [1, "s"]}, "a-c": [1, 2]}']
    bad = ['{"a-b": {"y": 1}}', '{"a": {"b": {"y": "s"}}}', '{"a": {"c": [1, 2]}}']
    assert fits(schema, *good, *bad, '{"a-c": [1, "s"]}') == [True] + [False] * 4


def test_further_names_have_patterns():
    values = {"patternProperties": {"^x": {"type": "null"}}}
    assert fits({**ANY, **values}, '{"xa": null}', "{}", '{"a": null}') == [True, True, False]
    schema = {**ANY, **values, "properties": {"x": {"enum": [1, None]}, "a": {"const": 1}}}
    assert fits(schema, '{"x": null, "a": 1, "xx": null}', '{"x": 1}') == [True, False]
    names = {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}}
    assert fits({**ANY, **names}, '{"a": 1, "b": 2}', '{"c": 1}') == [True, False]
    short = {"propertyNames": {"$ref": "#/$defs/a"}, "$defs": {"a": {"maxLength": 2}}}
    assert fits({**ANY, **short}, '{"ab": []}', '{"abc": []}') == [True, False]
    both = {**ANY, **values, "additionalProperties": {"type": "integer"}}
    assert lost(both) == [("", "patternProperties")]


@pytest.mark.parametrize(
    ("least", "most"), [(0, 2000), (0, 2001), (1999, 2999), (0, 3000), (2500, 5432), (2100, None)]
)
def test_lengths_may_be_large(least, most):
    ends = {"minLength": least} | ({} if most is None else {"maxLength": most})
    string = Grammar(grammar_of({"type": "string", **ends}))
    pattern = Grammar(grammar_of({"pattern": f"^a{{{least},{'' if most is None else most}}}$"}))
    ends = {"minItems": least} | ({} if most is None else {"maxItems": most})
    array = Grammar(grammar_of({"items": {"type": "integer"}, **ends}))
    lengths = {least + extra for extra in (-1, 0, 1, 999, 1000, 1001, 1501)}
    lengths |= {5000} if most is None else {most - 1, most, most + 1, 0}
    for n in lengths - {-1}:
        is_in = least <= n and (most is None or n <= most)
        assert string.fits(f'"{"a" * n}"') == is_in
        assert pattern.fits(f'"{"a" * n}"') == is_in
        assert array.fits(f"[{','.join('1' * n)}]") == is_in


def test_further_items_stand_behind_a_tuple():
    schema = {"prefixItems": [{"type": "string"}, {"type": "null"}], "items": {"type": "boolean"}}
    good = ['["a", null]', '["a", null, true]', '["a", null, true, false]']
    assert all(fits(schema, *good))
    assert not any(fits(schema, '["a"]', '["a", null, 1]', '["a", null, ]', '["a", true]'))
    counted = {**schema, "minItems": 1, "maxItems": 3}
    assert fits(counted, '["a"]', *good) == [True, True, True, False]
    assert fits({**schema, "minItems": 4}, *good) == [False, False, True]


def test_schemas_that_hold_together_are_merged():
    schema = {
        "allOf": [
            {"$ref": "#/$defs/named"},
            {"properties": {"n": {"maximum": 5}}, "required": ["n"]},
        ],
        "properties": {"n": {"type": "integer"}},
        "$defs": {"named": {"type": "object", "properties": {"name": {"type": "string"}}}},
    }
    assert fits(schema, '{"n": 3, "name": "a"}', '{"n": 3}', '{"name": "a"}') == [True, True, False]


def test_an_object_that_is_closed_stays_so_beside_others():
    closed = {"patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False}
    named = {"properties": {"y": {"type": "null"}, "x": {"maximum": 5}}}
    good = ['{"x": 3}', '{"x1": 9}', "{}"]
    for parts in ([closed, named], [named, closed]):
        schema = {"type": "object", "allOf": parts}
        assert all(fits(schema, *good))
        assert not any(fits(schema, '{"y": null}', '{"x": 7}', '{"x1": null}'))
    few = {"properties": {"x": {"type": "null"}}, "additionalProperties": False}
    schema = {"type": "object", "allOf": [few, {"patternProperties": {"^y": {"type": "null"}}}]}
    assert fits(schema, '{"x": null}', '{"y": null}') == [True, False]


def test_what_stands_beside_alternatives_holds_for_each():
    schema = {
        **ANY,
        "properties": {"kind": {"type": "string"}},
        "oneOf": [
            {"properties": {"kind": {"const": "a"}, "x": {"type": "null"}}, "required": ["x"]},
            {"properties": {"kind": {"const": "b"}}, "required": ["kind"]},
        ],
    }
    good = ['{"kind": "b"}', '{"x": null}', '{"x": null, "kind": "a"}']
    assert all(fits(schema, *good))
    assert not any(fits(schema, "{}", '{"kind": "c"}', '{"kind": "b", "x": null}'))


def test_an_enum_has_the_values_that_its_type_has():
    schema = {"type": "integer", "enum": [1, 1.5, 2.0, "a", None, 7], "maximum": 5}
    assert fits(schema, "1", "2", "1.5", '"a"', "7") == [True, True, False, False, False]
    assert fits({"type": "number", "enum": [1, 1.5, True]}, "1", "1.5", "true") == [1, 1, 0]


def test_each_of_many_types_has_its_keywords():
    schema = {"type": ["string", "array", "null"], "minLength": 2, "maxItems": 0}
    assert fits(schema, '"ab"', "[]", "null", '"a"', "[1]", "1") == [True] * 3 + [False] * 3
    nullable = {"type": "integer", "nullable": True, "enum": [1, "a", 2]}
    assert fits(nullable, "1", "null", '"a"') == [True, True, False]


def test_what_is_left_out_is_named():
    schema = {
        **ANY,
        "properties": {
            "tags": {"type": "array", "items": {"maxLength": 10**10}, "uniqueItems": True},
            "at": {"type": "string", "format": "no such", "readOnly": True},
            "b": {"if": {}, "then": False, "type": "kaboom", "minLength": "3"},
        },
        "minProperties": 2,
    }
    assert sorted(lost(schema)) == [
        ("", "minProperties"),
        ("b", "if"),
        ("b", "minLength"),
        ("b", "then"),
        ("b", "type"),
        ("tags", "uniqueItems"),
        ("tags[]", "maxLength"),
    ]
    (odd,) = prepared({**ANY, "properties": {"a\n\u2028b": 1}}).lost
    assert odd[0] == "a b"
    line = refusal(prepared(schema).lost, "the tool x")
    assert line.startswith("the tool x: 'uniqueItems' of 'tags' ") and "\n" not in line


def test_what_is_wrong_in_one_property_leaves_the_others():
    properties = {
        "a": {"type": "integer", "minimum": None, "enum": None, "items": None},
        "b": "a text",
        "c": {"type": "null", "required": True},
    }
    schema = {**ANY, "properties": properties, "required": None}
    assert lost(schema) == [("b", "properties")]
    assert fits(schema, '{"a": 1, "b": [], "c": null}', '{"a": "x"}') == [True, False]


@pytest.mark.parametrize("schema", [1, None, "a", [], {"enum": [{1}]}, {"const": float("nan")}])
def test_what_is_no_schema_is_refused(schema):
    with pytest.raises(BadInput):
        prepared(schema)


def test_a_schema_that_is_too_large_is_refused():
    deep: dict = {}
    for _ in range(60_000):
        deep = {"items": deep}
    wide = {"properties": {str(i): {"type": "null"} for i in range(20_000)}}
    chain = {"$defs": {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(900)}}
    chain |= {"$ref": "#/$defs/0"}
    chain["$defs"]["900"] = {}
    for schema in (deep, wide, chain):
        with pytest.raises(BadInput) as refused:
            prepared(schema)
        assert "\n" not in str(refused.value)
    while deep:  # Python ends of freeing it at once
        deep = deep.pop("items")


def _laughs(word: str) -> dict:
    """Each definition has the next one twice, in two ways."""
    made: dict = {
        str(i): {
            word: [{"$ref": f"#/$defs/{i + 1}"}, {"title": str(i), "$ref": f"#/$defs/{i + 1}"}]
        }
        for i in range(40)
    }
    return {"$ref": "#/$defs/0", "$defs": {**made, "40": {"type": "null"}}}


def _tuples(depth: int) -> dict:
    inner = {"type": "null"}
    for _ in range(depth):
        inner = {"prefixItems": [inner, inner], "minItems": 0, "items": inner}
    return inner


def _choices(depth: int) -> dict:
    inner = {"type": "null"}
    for _ in range(depth):
        inner = {"properties": {"a": inner}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}
    return inner


SMALL_AND_LARGE = {
    "allOf": _laughs("allOf"),
    "anyOf": _laughs("anyOf"),
    "anyOf with a type": {**_laughs("anyOf"), "type": "null"},
    "tuples": _tuples(9),
    "choices": _choices(25),
    "products": {"allOf": [{"anyOf": [{"minLength": i}, {"maxLength": i}]} for i in range(30)]},
    "patterns": {"allOf": [{"pattern": f"{i}.*{i + 1}"} for i in range(30)]},
    "properties": {**ANY, "properties": {f"p{i}": {"type": "null"} for i in range(1000)}},
    "enum": {"enum": [[i] for i in range(3000)]},
}


@pytest.mark.parametrize("schema", SMALL_AND_LARGE.values(), ids=SMALL_AND_LARGE)
def test_a_small_schema_makes_no_large_grammar(schema):
    start = time.process_time()
    try:
        made = prepared(schema)
    except BadInput as refused:
        assert "\n" not in str(refused)
        return
    grammar = finished(chat.grammar_of(made.schema), made.rules)
    chat.check_grammar(None, grammar)
    assert time.process_time() - start < 2 and len(grammar) < 10**6


def test_many_schemas_come_into_one_grammar():
    a = prepared({**ANY, "properties": {"x": {"const": 1.5}}}, "a")
    b = prepared({**ANY, "properties": {"x": {"const": 2.5}}}, "b")
    assert not a.rules.keys() & b.rules.keys()
    grammar = chat.grammar_of({"anyOf": [a.schema, b.schema]})
    read = Grammar(finished(grammar, {**a.rules, **b.rules}))
    assert read.fits('{"x": 1.5}') and read.fits('{"x": 2.5}') and not read.fits('{"x": 3.5}')


def test_a_grammar_without_marks_stays_as_it_is():
    grammar = 'root ::= "made-ab-0-rule" |\n  other\nother ::= [\\n] "-700000000000000"\n'
    assert finished(grammar, {}) == grammar and finished("", {}) == ""


def test_numbers_and_texts_are_what_json_has():
    assert fits({}, "1e300", "1e-07", '"\\ud83d\\ude00"', '"\x7f"') == [False, True, True, True]
    assert not any(fits({}, "1e400", '"\\ud83d"', '"\\ude00"', '"\\ud83dx"'))


class Kind(enum.Enum):
    CAT = "cat"
    DOG = "dog"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(ge=1, le=9)


class Dog(BaseModel):
    kind: Literal["dog"]
    friends: list[Cat | Dog] = []


class Order(BaseModel):
    """What pydantic writes for most of its types."""

    id: UUID
    at: datetime
    price: Decimal
    rate: float = Field(gt=0, le=1)
    name: str = Field(min_length=1, max_length=20, pattern=r"^\w+$")
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    place: tuple[float, float]
    codes: Annotated[list[int], Field(min_length=1, max_length=3)]
    by_kind: dict[Kind, int] = {}
    note: str | None = None
    extra: Any = None


def test_what_pydantic_writes_is_held_to():
    schema = Order.model_json_schema()
    assert lost(schema) == []
    order = {
        "id": "12345678-1234-5678-1234-567812345678",
        "at": "2024-01-31T12:30:00Z",
        "price": "1.50",
        "rate": 0.25,
        "name": "box_1",
        "pet": {"kind": "dog", "friends": [{"kind": "cat", "lives": 9}, {"kind": "dog"}]},
        "place": [1.5, -2.0],
        "codes": [1],
    }
    grammar = Grammar(grammar_of(schema))
    assert grammar.fits(json.dumps(order)) and Order.model_validate(order)
    assert grammar.fits(json.dumps({**order, "by_kind": {"cat": 1}, "note": None, "extra": [1]}))
    wrong = {"name": "a b", "rate": 0, "codes": [], "place": [1], "pet": {"kind": "cow"}}
    for name, value in wrong.items():
        assert not grammar.fits(json.dumps({**order, name: value}))
    for seed in range(50):
        drawn = json.loads(grammar.drawn(random.Random(seed)))
        # a grammar has dates such as 2024-02-31, and pydantic says of a Decimal's text nothing
        Order.model_validate({**drawn, "at": order["at"], "price": "1"})
    assert lost(TypeAdapter(set[int]).json_schema()) == [("", "uniqueItems")]


DECIMAL = {"anyOf": [{"type": "number"}, {"pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}]}
"""What older releases of pydantic write for a Decimal."""


def test_the_calls_of_many_tools_are_held_to_their_schemas():
    first = {**ANY, "properties": {"price": DECIMAL, "n": {"$ref": "#/$defs/n"}}}
    schemas = [
        {**first, "$defs": {"n": {"type": "integer", "minimum": 5}}},
        {**first, "$defs": {"n": {"type": "integer", "maximum": 5}}, "additionalProperties": True},
    ]
    made = [prepared(schema, str(i)) for i, schema in enumerate(schemas)]
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "parameters": one.schema}}
        for i, one in enumerate(made)
    ]
    request = {"messages": [{"role": "user", "content": "a"}], "tools": tools}
    said = chat.Template(None, HERMES).apply({**request, "tool_choice": "required"})
    text = finished(said["grammar"], {**made[0].rules, **made[1].rules})
    chat.check_grammar(None, text)
    grammar = Grammar(text)
    for name, arguments, is_allowed in [
        ("f0", '{"price": "1.5", "n": 7}', True),
        ("f0", '{"price": "-", "n": 7}', False),
        ("f0", '{"n": 4}', False),
        ("f1", '{"price": 2, "n": -4, "more": [1]}', True),
        ("f1", '{"n": 7}', False),
    ]:
        call = f'{{"name": "{name}", "arguments": {arguments}}}'
        text = f"{said['generation_prompt']}<tool_call>\n{call}\n</tool_call>"
        assert grammar.fits(text) == is_allowed, call
