"""llama.cpp's own cases of schemas (tests/test-json-schema-to-grammar.cpp): schema and grammar.

A case is [name, schema, rules of its own, names of the usual rules that it has]; without rules,
the schema is refused. This is what `prepared` builds on: a move of the pin may change it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgekv.errors import BadInput
from edgekv.grammars.schemas import finished, prepared
from edgekv.native import chat

FACTS = json.loads((Path(__file__).parent / "reference" / "llama_schemas.json").read_text("utf-8"))
CASES = [pytest.param(*facts, id=name) for name, *facts in FACTS["cases"]]


@pytest.mark.parametrize(("schema", "rules", "usual"), CASES)
def test_llama_cpp_makes_its_own_grammars(schema, rules, usual):
    if rules is None:
        with pytest.raises(BadInput):
            chat.grammar_of(schema)
        return
    expected = {**rules, **{name: FACTS["usual rules"][name] for name in usual}}
    found = dict(line.split(" ::= ", 1) for line in chat.grammar_of(schema).splitlines())
    assert found == expected


@pytest.mark.parametrize(("schema", "rules", "usual"), CASES)
def test_its_schemas_can_be_prepared(schema, rules, usual):
    made = prepared(schema)
    chat.check_grammar(None, finished(chat.grammar_of(made.schema), made.rules))
    assert rules is not None or made.lost
