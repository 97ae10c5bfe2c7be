"""Rules of ours in a grammar that llama.cpp makes.

A part of a schema that llama.cpp cannot express becomes an enum of one unlikely value, a mark,
which has the type of the part. `finished` puts our rule where the mark's literal stands.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from edgekv.grammars.characters import ANY, ESCAPE
from edgekv.grammars.counts import repeated

Schema = dict[str, Any]

SHARED = {"ours-char": ANY, "ours-escape": ESCAPE}
"""Rules that others refer to."""
MENDED = {
    r'char ::= [^"\\\x7F\x00-\x1F] | [\\] (["\\bfnrt] | "u" [0-9a-fA-F]{4})': f"char ::= {ANY}",
    **{
        f'{name} ::= ("-"? integral-part) ("." decimal-part)? ([eE] [-+]? integral-part)?': (
            f'{name} ::= ("-"? integral-part) ("." decimal-part)? ([eE] [-+]? [0-9]{{1,2}})?'
        )
        for name in ("number", "root")
    },
}
"""llama.cpp's rules that let through what is no text or no number: half of a surrogate pair, and
1e400."""

RULE = re.compile(r"([a-zA-Z0-9-]+) ::= ")
MARK = re.compile(r'"(?:\\"(made-[0-9a-f]+-\d+-(?:rule|keys|many))\\"|(-7\d{14}(?:\.5)?))"')


class Marks:
    """The marks of one schema. digest: hexadecimal digits that other schemas do not have."""

    def __init__(self, digest: str) -> None:
        self.digest = digest
        self.rules: dict[str, str] = {}
        self._known: dict[tuple[str, str], Any] = {}

    def string(self, rule: str) -> Schema:
        """A string with a rule of its own."""
        return {"enum": [self.name(rule)]}

    def name(self, rule: str) -> str:
        """A text with a rule of its own."""
        return self._name("rule", rule)

    def number(self, rule: str, is_integer: bool) -> Schema:
        """A number with a rule of its own."""
        unlikely = -(7 * 10**14 + int(self.digest, 16) % 10**8 * 10**6 + len(self.rules))
        value: float = unlikely if is_integer else unlikely - 0.5
        value = self._known.setdefault((str(is_integer), rule), value)
        self.rules[repr(value)] = rule
        return {"enum": [value]}

    def keyed(self, value: Schema, rule: str) -> Schema:
        """The values of further properties, whose names have a rule of their own."""
        return {"anyOf": [{"enum": [self._name("keys", rule)]}, value]}

    def many(self, item: Schema, least: int, most: int | None) -> Schema:
        """The last item of a tuple, as many times."""
        counts = f"{max(least - 1, 0)},{'' if most is None else most - 1}"
        return {"anyOf": [{"enum": [self._name("many", counts)]}, item]}

    def _name(self, kind: str, rule: str) -> str:
        new = f"made-{self.digest}-{len(self.rules)}-{kind}"
        name: str = self._known.setdefault((kind, rule), new)
        self.rules[name] = rule
        return name


def finished(grammar: str, rules: Mapping[str, str]) -> str:
    """The grammar with our rules in it, instead of their marks."""
    bodies = _bodies(grammar)
    made: dict[str, str] = {}
    if any(mark.endswith(("-keys", "-many")) for mark in rules):
        _unwrap(bodies, rules, made)

    def put(found: re.Match[str]) -> str:
        mark = found[1] or found[2]
        if mark not in rules:
            return found[0]
        made[_ours(mark)] = rules[mark]
        return _ours(mark)

    lines = [f"{name} ::= {MARK.sub(put, body)}\n" for name, body in bodies.items()]
    ours = "\n".join(f"{name} ::= {rule}" for name, rule in made.items())
    shared = [f"{name} ::= {rule}" for name, rule in SHARED.items() if name in ours]
    further = [*dict.fromkeys(ours.split("\n")), *shared] if ours else []
    return "".join([*lines, *(f"{line}\n" for line in further)])


def _bodies(grammar: str) -> dict[str, str]:
    """The rules of a grammar by name, with llama.cpp's own mended."""
    bodies: dict[str, str] = {}
    name = ""
    for line in grammar.split("\n"):
        start = RULE.match(line)
        if start:
            name = start[1]
            bodies[name] = MENDED.get(line, line)[start.end() :]
        elif name and line:
            bodies[name] += f"\n{line}"
    return bodies


def _ours(mark: str) -> str:
    """The name of a rule of ours. A mark may be a property's name, and so a rule's of llama.cpp."""
    return "ours" + mark.removeprefix("made").replace(".", "-")


def _unwrap(bodies: dict[str, str], rules: Mapping[str, str], made: dict[str, str]) -> None:
    """Mend the rules around marks that have a neighbour: `of ::= mark | item`."""
    keys: dict[str, str] = {}
    needless: set[str] = set()
    for of, body in list(bodies.items()):
        first, bar, item = body.partition(" | ")
        found = MARK.fullmatch(bodies.get(first, "")[1:-1]) if bar else None
        mark = found[1] if found and found[1] in rules else None
        if mark is None or mark.endswith("-rule"):
            continue
        if mark.endswith("-many"):
            least, _, most = rules[mark].partition(",")
            text, lines = repeated(f"ours-next-{of}", int(least), int(most) if most else None)
            bodies[of] = f"{item} {text}"
            made[f"ours-next-{of}"] = "\n".join([f'"," space {item}', *lines])
        else:
            bodies[of], keys[of], made[_ours(mark)] = item, _ours(mark), rules[mark]
        needless.add(first)
    for name, body in list(bodies.items()):
        key, colon, of = body.partition(' ":" space ')
        if colon and of in keys and key in bodies:
            bodies[name] = f"{keys[of]}{colon}{of}"
            needless |= {key} - {"string"}
    for name in needless:
        del bodies[name]
