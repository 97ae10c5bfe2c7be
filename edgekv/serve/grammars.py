"""GBNF grammars from JSON schemas, and of tool calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from edgekv.errors import BadInput

if TYPE_CHECKING:
    from edgekv.serve.tools import Format, Tool

THOUGHT = '( [^<] | "<" [^/] )* "</think>" [\\n]{0,4}'
"""What is left of a thought, where the prompt opens one."""


REPEATS_MOST = 2000
"""Repetitions of one thing, as in llama.cpp. The converter writes each of them out."""
COUNTS = ("minLength", "maxLength", "minItems", "maxItems")
REPEATED = re.compile(r"\{\s*(\d*)\s*,?\s*(\d*)\s*\}")


class Grammar:
    """Rules that are made one by one. Raises BadInput for a schema that cannot be used."""

    def __init__(self) -> None:
        self._converter = _converter()
        self._n = 0

    def add(self, schema: Any, around: Callable[[Any], Any] = lambda inner: inner) -> str:
        """Returns the name of a rule for JSON of a schema.

        around: makes the whole schema of one whose references have been resolved.
        """
        name, self._n = f"json-{self._n}", self._n + 1
        try:
            resolved = self._converter.resolve_refs(deepcopy(schema), name)
            return str(self._converter.visit(around(resolved), name))
        except (
            AssertionError,
            AttributeError,
            IndexError,
            KeyError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            reason = " ".join(str(error).split())[:200]
            raise BadInput(f"this JSON schema cannot be used: {reason}") from None

    def text(self, root: str) -> str:
        """The grammar. root: what the whole answer has to be, in GBNF."""
        self._converter._rules["root"] = root
        return str(self._converter.format_grammar())


def _converter() -> Any:
    from edgekv.llama_cpp.llama_grammar import SchemaConverter

    class Converter(SchemaConverter):
        """Definitions of two schemas, or of two places, may have the same last name."""

        def visit(self, schema: Any, name: str) -> Any:
            _check_repeats(schema)
            return super().visit(schema, name)

        def _resolve_ref(self, ref: str) -> str:
            name = f"ref-{list(self._refs).index(ref)}"
            if name not in self._rules and ref not in self._refs_being_resolved:
                self._refs_being_resolved.add(ref)
                name = self.visit(self._refs[ref], name)
                self._refs_being_resolved.remove(ref)
            return name

    return Converter(prop_order={}, allow_fetch=False, dotall=False, raw_pattern=False)


def _check_repeats(schema: Any) -> None:
    """Raises ValueError for more repetitions than REPEATS_MOST."""
    counts = [schema[name] for name in COUNTS if isinstance(schema.get(name), (int, float))]
    for found in REPEATED.finditer(str(schema.get("pattern", ""))):
        counts += [int(n[:9]) for n in found.groups() if n]
    if any(n > REPEATS_MOST for n in counts):
        raise ValueError(f"it repeats something more than {REPEATS_MOST:,} times")


def of_schema(schema: Any, opens_thought: bool) -> str:
    grammar = Grammar()
    return grammar.text(_behind_thought(grammar.add(schema), opens_thought))


def of_calls(form: Format, tools: Sequence[Tool], parallel: bool, opens_thought: bool) -> str:
    """Answers that are one call of a tool, or with `parallel` several."""
    grammar = Grammar()
    calls = form.calls(_one_of(grammar, form, tools), parallel)
    return grammar.text(_behind_thought(calls, opens_thought))


def of_body(form: Format, tools: Sequence[Tool]) -> str:
    """What stands behind the opening of a call, with its end."""
    grammar = Grammar()
    return grammar.text(form.body(_one_of(grammar, form, tools)))


def _one_of(grammar: Grammar, form: Format, tools: Sequence[Tool]) -> str:
    rules = [
        form.named(tool.name, grammar.add(tool.parameters))
        if form.is_named_outside
        else grammar.add(tool.parameters, _around(tool.name, form.key))
        for tool in tools
    ]
    return f"( {' | '.join(rules)} )"


def _around(name: str, key: str) -> Callable[[Any], Any]:
    return lambda parameters: {
        "type": "object",
        "properties": {"name": {"const": name}, key: parameters},
        "required": ["name", key],
    }


def _behind_thought(rule: str, opens_thought: bool) -> str:
    return f"{THOUGHT} {rule}" if opens_thought else rule
