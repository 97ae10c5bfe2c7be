"""GBNF as llama.cpp's parser reads it: whether a text fits a grammar, and texts that fit one.

A grammar is read into rules of alternatives; an alternative is a list of elements, each a class of
characters or the name of a rule. Repetitions become rules, as in llama.cpp.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
ESCAPES = {"t": "\t", "r": "\r", "n": "\n", **{c: c for c in '\\"[]-'}}
LIKELY = [
    *"aZ_ 09",
    '"',
    "\\",
    "/",
    "-",
    "\n",
    "\t",
    "\x7f",
    "é",
    "€",
    "\u2028",
    "😀",
    "\U0010ffff",
]


@dataclass(frozen=True)
class Chars:
    """A class of characters: those in the ranges, or all others."""

    ranges: tuple[tuple[str, str], ...]
    is_negated: bool = False

    def has(self, character: str) -> bool:
        is_in = any(first <= character <= last for first, last in self.ranges)
        return is_in != self.is_negated

    def drawn(self, draw: random.Random) -> str:
        if self.is_negated:
            return draw.choice([c for c in LIKELY if self.has(c)] or ["q"])
        some = [c for c in LIKELY if self.has(c)] if draw.random() < 0.5 else []
        if some:
            return draw.choice(some)
        while True:
            first, last = draw.choice(self.ranges)
            drawn = chr(draw.randint(ord(first), ord(last)))
            if not "\ud800" <= drawn <= "\udfff":
                return drawn


class Grammar:
    """Raises ValueError for a text that is no grammar."""

    def __init__(self, text: str, root: str = "root") -> None:
        self.rules: dict[str, list[list[Any]]] = {}
        self._root = root
        _Reader(text, self.rules).read()
        names = {part for ways in self.rules.values() for way in ways for part in way}
        missing = {name for name in names if isinstance(name, str)} - self.rules.keys()
        if missing or root not in self.rules:
            raise ValueError(f"there are no rules {missing or root}")
        self._cells: dict[tuple[int, int, int], tuple] = {}

    def fits(self, text: str) -> bool:
        """Whether the whole text is one of the grammar's."""
        states = self._closed([([self._root], 0, None)])
        for character in text:
            states = self._closed(
                self._cell(way, at + 1, tail)
                for way, at, tail in (state for state in states if state is not None)
                if way[at].has(character)
            )
            if not states:
                return False
        return None in states

    def _cell(self, way: list, at: int, tail: Any) -> Any:
        """What is left of an alternative, and what comes behind it: the same object each time."""
        if at == len(way):
            return tail
        return self._cells.setdefault((id(way), at, id(tail)), (way, at, tail))

    def _closed(self, states: Any) -> list[Any]:
        """States that wait for a character (None: for the end), without doubles."""
        left, seen, out = list(states), set(), []
        while left:
            state = left.pop()
            if id(state) in seen:
                continue
            seen.add(id(state))
            if state is None or isinstance(state[0][state[1]], Chars):
                out.append(state)
                continue
            way, at, tail = state
            behind = self._cell(way, at + 1, tail)
            left += [self._cell(inner, 0, behind) for inner in self.rules[way[at]]]
        return out

    def drawn(self, draw: random.Random, depth: int = 12) -> str:
        """A text of the grammar. depth: of rules; a text that needs more has more."""
        if not hasattr(self, "_costs"):
            self._costs = self._depths()
        out: list[str] = []
        left: list[tuple[Any, int]] = [(self._root, 0)]
        while left:
            part, at = left.pop()
            if isinstance(part, Chars):
                out.append(part.drawn(draw))
                continue
            ways = self.rules[part]
            costs = [max((self._costs.get(p, 0) for p in way), default=0) for way in ways]
            room = max(depth - at, min(costs)) if len(out) < 2000 else min(costs)
            way = draw.choice([way for way, cost in zip(ways, costs) if cost <= room])
            left += [(part, at + 1) for part in reversed(way)]
        return "".join(out)

    def _depths(self) -> dict[Any, int]:
        """How many rules deep each rule goes at least."""
        depths: dict[Any, int] = {}
        while True:
            found = {
                name: 1 + min(known)
                for name, ways in self.rules.items()
                if (known := [d for way in ways if (d := _deepest(way, depths)) is not None])
            }
            if found == depths:
                return {name: depths.get(name, 10**6) for name in self.rules}
            depths = found


def _deepest(way: list[Any], depths: dict[Any, int]) -> int | None:
    found = [0 if isinstance(part, Chars) else depths.get(part) for part in way]
    return None if None in found else max((d for d in found if d is not None), default=0)


class _Reader:
    def __init__(self, text: str, rules: dict[str, list[list[Any]]]) -> None:
        self._text, self._at, self._rules = text, 0, rules

    def read(self) -> None:
        self._space(True)
        while self._here():
            name = self._name()
            self._space(False)
            self._take("::=")
            self._space(True)
            self._rules[name] = self._ways(name, False)
            if self._here() not in ("", "\r", "\n"):
                raise ValueError(f"a line should end at {self._text[self._at : self._at + 40]!r}")
            self._space(True)

    def _here(self, n: int = 1) -> str:
        return self._text[self._at : self._at + n]

    def _take(self, text: str) -> None:
        if not self._text.startswith(text, self._at):
            raise ValueError(f"{text!r} should stand at {self._text[self._at : self._at + 40]!r}")
        self._at += len(text)

    def _space(self, lines: bool) -> None:
        while self._here() and self._here() in (" \t#\r\n" if lines else " \t#"):
            if self._here() == "#":
                while self._here() not in ("", "\r", "\n"):
                    self._at += 1
            else:
                self._at += 1

    def _name(self) -> str:
        start = self._at
        while self._here() and (
            self._here().isascii() and self._here().isalnum() or self._here() == "-"
        ):
            self._at += 1
        if start == self._at:
            raise ValueError(f"a name should stand at {self._text[start : start + 40]!r}")
        return self._text[start : self._at]

    def _number(self) -> int:
        start = self._at
        while self._here().isdigit():
            self._at += 1
        return int(self._text[start : self._at])

    def _ways(self, name: str, is_inside: bool) -> list[list[Any]]:
        ways = [self._way(name, is_inside)]
        while self._here() == "|":
            self._at += 1
            self._space(True)
            ways.append(self._way(name, is_inside))
        return ways

    def _way(self, name: str, is_inside: bool) -> list[Any]:
        way: list[Any] = []
        last = 0
        while (here := self._here()) and here not in "|)\r\n":
            before = len(way)
            if here == '"':
                way += self._literal()
            elif here == "[":
                way.append(self._class())
            elif here == ".":
                self._at += 1
                way.append(Chars((), True))
            elif here == "(":
                self._at += 1
                self._space(True)
                way.append(self._new(name, self._ways(name, True)))
                self._take(")")
            elif here in "*+?{":
                if last == len(way):
                    raise ValueError("there is nothing to repeat")
                way[last:] = self._repeated(name, way[last:], *self._counts())
                before = last
            else:
                way.append(self._name())
            self._space(is_inside)
            last = before
        return way

    def _new(self, name: str, ways: list[list[Any]]) -> str:
        made = f"{name}_{len(self._rules)}"
        self._rules[made] = ways
        return made

    def _counts(self) -> tuple[int, int | None]:
        here = self._here()
        self._at += 1
        if here != "{":
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[here]  # type: ignore[return-value]
        self._space(True)
        least = most = self._number()
        if self._here() == ",":
            self._at += 1
            most = self._number() if self._here().isdigit() else None
        self._take("}")
        if least > 2000:
            raise ValueError("there are too many repetitions")
        return least, most

    def _repeated(self, name: str, part: list[Any], least: int, most: int | None) -> list[Any]:
        if most is None:
            more = self._new(name, [[]])
            self._rules[more] = [[*part, more], []]
            return [*part * least, more]
        behind: list[Any] = []
        for _ in range(most - least):
            behind = [self._new(name, [[*part, *behind], []])]
        return [*part * least, *behind]

    def _literal(self) -> Iterator[Chars]:
        self._at += 1
        while self._here() != '"':
            character = self._character()
            yield Chars(((character, character),))
        self._at += 1

    def _class(self) -> Chars:
        self._at += 1
        is_negated = self._here() == "^"
        self._at += is_negated
        ranges = []
        while self._here() != "]":
            first = last = self._character()
            if self._here() == "-" and self._here(2) != "-]":
                self._at += 1
                last = self._character()
            ranges.append((first, last))
        self._at += 1
        return Chars(tuple(ranges), is_negated)

    def _character(self) -> str:
        here = self._here()
        self._at += 1
        if not here:
            raise ValueError("the text ends in the middle")
        if here != "\\":
            return here
        kind = self._here()
        self._at += 1
        if kind in ESCAPES:
            return ESCAPES[kind]
        digits = self._here(HEX_DIGITS.get(kind, 0))
        if len(digits) != HEX_DIGITS.get(kind):
            raise ValueError(f"there is no escape \\{kind}")
        self._at += len(digits)
        return chr(int(digits, 16))
