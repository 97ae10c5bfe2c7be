"""Regular expressions as trees: what Python's parser reads, in ECMA-262's sense.

A tree is a class of characters, a sequence, a choice, or a repetition. Its functions keep the
language: what a tree matches stays the same.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from edgekv.grammars.characters import ALL, Ranges, merged, within, without

sre: Any = import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")

CHARACTERS_MOST, DEPTH_MOST = 5000, 50

DIGITS: Ranges = [(0x30, 0x39)]
WORD: Ranges = [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
SPACES = merged(
    [(9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)]
    + [(code, code) for code in (0x202F, 0x205F, 0x3000, 0xFEFF)]
)
LINE_ENDS: Ranges = [(10, 10), (13, 13), (0x2028, 0x2029)]
CATEGORIES = {
    "CATEGORY_DIGIT": DIGITS,
    "CATEGORY_WORD": WORD,
    "CATEGORY_SPACE": SPACES,
    "CATEGORY_NOT_DIGIT": without(ALL, DIGITS),
    "CATEGORY_NOT_WORD": without(ALL, WORD),
    "CATEGORY_NOT_SPACE": without(ALL, SPACES),
}


class NotHeld(Exception):
    """An expression that no grammar expresses. Its text says why. work: what it took to see."""

    def __init__(self, why: str, work: int = 0) -> None:
        super().__init__(why)
        self.work = work


@dataclass(frozen=True)
class Chars:
    """One character of a class."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Seq:
    parts: tuple[Tree, ...]


@dataclass(frozen=True)
class Alternatives:
    ways: tuple[Tree, ...]


@dataclass(frozen=True)
class Repeat:
    part: Tree
    least: int
    most: int | None


@dataclass(frozen=True)
class Anchor:
    is_start: bool


@dataclass(frozen=True)
class Lookaround:
    """What has to follow here, or must not."""

    part: Tree
    is_negated: bool


@dataclass(frozen=True)
class Both:
    """What both trees match, or what the first matches and the second does not."""

    part: Tree
    other: Tree
    is_negated: bool


Tree = Chars | Seq | Alternatives | Repeat | Anchor | Lookaround | Both
NEVER, NOTHING = Alternatives(()), Seq(())
ANYTHING = Repeat(Chars(tuple(ALL)), 0, None)


def tree_of(expression: str) -> Tree:
    """What the whole text of a match may be, where the expression is searched for.

    Raises NotHeld.
    """
    if len(expression) > CHARACTERS_MOST:
        raise NotHeld(f"it is longer than {CHARACTERS_MOST:,} characters")
    try:
        parsed = sre.parse(_in_pythons_words(expression))
        if parsed.state.flags & ~re.UNICODE.value:
            raise NotHeld("it has flags")
        return _looked(_anchored(_sequence(parsed, 0)), NOTHING)
    except (re.error, OverflowError, FutureWarning, ValueError) as error:
        raise NotHeld(f"it is no regular expression: {error}") from None
    except RecursionError:
        raise NotHeld("it nests too deep") from None


ESCAPE = re.compile(
    r"\\u\{([0-9a-fA-F]{1,6})\}|\\u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})"
    r"|\\c([a-zA-Z])|\\([\s\S])|\(\?<(?![=!])|\[\^?\]|[\[\]&|~]"
)
SAME = "dDwWsSbBnrtfvxu0123456789AZ"
"""Letters behind a backslash that Python reads as ECMA-262 does, or nearly."""


def _in_pythons_words(expression: str) -> str:
    is_inside = False

    def put(found: re.Match[str]) -> str:
        nonlocal is_inside
        code, high, low, control, letter = found.groups()
        text = found[0]
        if code:
            return f"\\U{int(code, 16):08x}"
        if high:
            pair = 0x10000 + (int(high, 16) - 0xD800) * 0x400 + int(low, 16) - 0xDC00
            return f"\\U{pair:08x}"
        if control:
            return f"\\x{ord(control) % 32:02x}"
        if letter:
            return _escaped(letter)
        if text == "(?<":
            return text if is_inside else "(?P<"
        if text in ("[]", "[^]") and not is_inside:
            return r"[^\x00-\U0010ffff]" if text == "[]" else r"[\x00-\U0010ffff]"
        if text in "[]" and is_inside == (text == "]"):
            is_inside = text == "["
            return text
        if is_inside and text in ("[]", "[^]"):
            is_inside = False
            return "\\" + text
        return "\\" + text if is_inside or text == "]" else text

    return ESCAPE.sub(put, expression)


def _escaped(letter: str) -> str:
    if letter in "pPk":
        raise NotHeld(rf"it has \{letter}")
    if letter == "z":
        return r"\Z"
    return f"\\{letter}" if letter in SAME or not letter.isalnum() else letter


def _sequence(parsed: Iterable[Any], depth: int) -> Tree:
    if depth > DEPTH_MOST:
        raise NotHeld("it nests too deep")
    return sequence(_node(str(kind), value, depth + 1) for kind, value in parsed)


def _node(kind: str, value: Any, depth: int) -> Tree:
    if kind == "LITERAL":
        return Chars(((value, value),))
    if kind == "NOT_LITERAL":
        return Chars(tuple(without(ALL, [(value, value)])))
    if kind == "ANY":
        return Chars(tuple(without(ALL, LINE_ENDS)))
    if kind == "IN":
        return _class(value)
    if kind == "BRANCH":
        return choice(_sequence(way, depth) for way in value[1])
    if kind == "SUBPATTERN" and not value[1] and not value[2]:
        return _sequence(value[3], depth)
    if kind in ("MAX_REPEAT", "MIN_REPEAT"):
        least, most, part = value
        no_most = most == sre.MAXREPEAT
        return repeat(_sequence(part, depth), least, None if no_most else most)
    if kind == "AT" and str(value) in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
        return Anchor(True)
    if kind == "AT" and str(value) in ("AT_END", "AT_END_STRING"):
        return Anchor(False)
    if kind in ("ASSERT", "ASSERT_NOT") and value[0] == 1:
        return Lookaround(_sequence(value[1], depth), kind == "ASSERT_NOT")
    raise NotHeld(f"it has a part of the kind {kind.lower().replace('_', ' ')}")


def _class(parts: Iterable[Any]) -> Tree:
    is_negated, ranges = False, []
    for kind, value in parts:
        name = str(kind)
        is_negated = is_negated or name == "NEGATE"
        if name == "LITERAL":
            ranges.append((value, value))
        elif name == "RANGE":
            ranges.append(value)
        elif name == "CATEGORY":
            ranges += CATEGORIES[str(value)]
    found = merged(ranges)
    return chars(without(ALL, found) if is_negated else found)


def chars(ranges: Ranges) -> Tree:
    return Chars(tuple(ranges)) if ranges else NEVER


def sequence(parts: Iterable[Tree]) -> Tree:
    """A sequence without sequences in it, in which like repetitions are one."""
    out: list[Tree] = []
    for part in parts:
        for one in part.parts if isinstance(part, Seq) else (part,):
            if out and isinstance(one, (Chars, Repeat)) and isinstance(out[-1], Repeat):
                least, most, inner = _counts(one)
                if inner == out[-1].part:
                    before = out.pop()
                    assert isinstance(before, Repeat)
                    both = None if most is None or before.most is None else before.most + most
                    one = Repeat(inner, before.least + least, both)
            elif out and isinstance(one, Repeat) and out[-1] == one.part:
                out.pop()
                one = Repeat(one.part, one.least + 1, None if one.most is None else one.most + 1)
            out.append(one)
    if NEVER in out:
        return NEVER
    return out[0] if len(out) == 1 else Seq(tuple(out))


def _counts(tree: Chars | Repeat) -> tuple[int, int | None, Tree]:
    return (1, 1, tree) if isinstance(tree, Chars) else (tree.least, tree.most, tree.part)


def choice(ways: Iterable[Tree]) -> Tree:
    """A choice without choices in it; classes of characters are one."""
    flat = [one for way in ways for one in (way.ways if isinstance(way, Alternatives) else (way,))]
    classes = [way for way in flat if isinstance(way, Chars)]
    if len(classes) > 1:
        ranges = tuple(merged(pair for way in classes for pair in way.ranges))
        flat = [Chars(ranges), *(way for way in flat if not isinstance(way, Chars))]
    flat = list(dict.fromkeys(flat))
    return flat[0] if len(flat) == 1 else Alternatives(tuple(flat))


def repeat(part: Tree, least: int, most: int | None) -> Tree:
    """A repetition. One of a repetition is a single one, where no count falls between."""
    if (least, most) == (1, 1) or part == NOTHING:
        return part
    if most == 0 or part == NEVER and least == 0:
        return NOTHING
    if isinstance(part, Repeat) and (part.least <= 1 or part.most is None and least > 0):
        both = None if most is None or part.most is None else most * part.most
        return Repeat(part.part, least * part.least, both)
    return Repeat(part, least, most)


def children(tree: Tree) -> tuple[Tree, ...]:
    """The trees that a tree is made of, but for what a look ahead sees."""
    if isinstance(tree, Seq):
        return tree.parts
    if isinstance(tree, Alternatives):
        return tree.ways
    if isinstance(tree, Both):
        return tree.part, tree.other
    return (tree.part,) if isinstance(tree, Repeat) else ()


def size(tree: Tree) -> int:
    """How many nodes a tree has."""
    return 1 + sum(map(size, children(tree)))


def is_empty(tree: Tree) -> bool:
    """Whether the empty text matches."""
    if isinstance(tree, Both):
        return is_empty(tree.part) and is_empty(tree.other) != tree.is_negated
    if isinstance(tree, Alternatives):
        return any(map(is_empty, tree.ways))
    if isinstance(tree, Seq):
        return all(map(is_empty, tree.parts))
    return isinstance(tree, Repeat) and (tree.least == 0 or is_empty(tree.part))


def width(tree: Tree) -> tuple[int, int | None]:
    """How many characters a match has, at least and at most."""
    if isinstance(tree, Chars):
        return 1, 1
    if isinstance(tree, Repeat):
        least, most = width(tree.part)
        no_most = tree.most is None or most is None
        return least * tree.least, None if no_most else most * tree.most  # type: ignore[operator]
    if isinstance(tree, Both):
        return width(tree.part)
    if isinstance(tree, (Anchor, Lookaround)):
        return 0, 0
    widths = [width(part) for part in children(tree)]
    add, lowest = (sum, sum) if isinstance(tree, Seq) else (max, min)
    mosts = [most for _, most in widths if most is not None]
    most = add(mosts) if len(mosts) == len(widths) and mosts else None
    return lowest([least for least, _ in widths] or [0]), 0 if not widths else most


def firsts(tree: Tree) -> Iterator[tuple[tuple[int, int], ...]]:
    """The classes of characters that a match may begin with."""
    if isinstance(tree, Chars):
        yield tree.ranges
    elif isinstance(tree, Alternatives):
        for way in tree.ways:
            yield from firsts(way)
    elif isinstance(tree, Seq):
        for part in tree.parts:
            yield from firsts(part)
            if not is_empty(part):
                break
    elif isinstance(tree, (Repeat, Both)):
        yield from firsts(tree.part)
        if isinstance(tree, Both):
            yield from firsts(tree.other)


def extends(tree: Tree) -> Ranges:
    """Characters that may stand behind a match and belong to a longer one; perhaps some more."""
    if isinstance(tree, Repeat):
        inner = [*extends(tree.part), *(pair for one in firsts(tree.part) for pair in one)]
        return merged(inner) if tree.least != tree.most else extends(tree.part)
    if isinstance(tree, Seq):
        found: list[tuple[int, int]] = []
        for part in reversed(tree.parts):
            found += extends(part)
            if not is_empty(part):
                break
            found += [pair for one in firsts(part) for pair in one]
        return merged(found)
    if isinstance(tree, Alternatives):
        heads = [merged(pair for one in firsts(way) for pair in one) for way in tree.ways]
        if any(map(is_empty, tree.ways)) or any(
            within(a, b) for i, a in enumerate(heads) for b in heads[:i]
        ):
            return ALL
        return merged(pair for way in tree.ways for pair in extends(way))
    return []


def _anchored(tree: Tree) -> Tree:
    """Without anchors: anything may stand where none is."""
    return _reversed(_fronted(_reversed(_fronted(tree, True)), False))


def _reversed(tree: Tree) -> Tree:
    if isinstance(tree, Seq):
        return Seq(tuple(_reversed(part) for part in reversed(tree.parts)))
    if isinstance(tree, Alternatives):
        return Alternatives(tuple(map(_reversed, tree.ways)))
    return Repeat(_reversed(tree.part), tree.least, tree.most) if isinstance(tree, Repeat) else tree


def _fronted(tree: Tree, is_start: bool) -> Tree:
    return _front([tree], Anchor(is_start), False)


def _front(parts: list[Tree], anchor: Anchor, is_anchored: bool) -> Tree:
    """Parts whose first may be the anchor; without it, anything stands before them."""
    front = [] if is_anchored else [ANYTHING]
    if not parts:
        return sequence(front)
    first, rest = parts[0], parts[1:]
    if first == anchor:
        return _front(rest, anchor, True)
    if not _has(first, anchor):
        if any(_has(part, anchor) for part in rest):
            raise NotHeld("it has an anchor in the middle")
        return sequence([*front, *parts])
    if isinstance(first, Seq):
        return _front([*first.parts, *rest], anchor, is_anchored)
    if isinstance(first, Alternatives):
        return choice(_front([way, *rest], anchor, is_anchored) for way in first.ways)
    if isinstance(first, Repeat) and (first.least, first.most) == (0, 1):
        return choice(_front([*some, *rest], anchor, is_anchored) for some in ([first.part], []))
    raise NotHeld("it repeats an anchor")


def _looked(tree: Tree, behind: Tree) -> Tree:
    """A tree and what comes behind it, without looks ahead: a text ends behind it."""
    if isinstance(tree, Lookaround):
        return both(behind, _anchored_end(tree.part), tree.is_negated)
    if isinstance(tree, Seq) and has_look(tree):
        for part in reversed(tree.parts):
            behind = _looked(part, behind)
        return behind
    if isinstance(tree, Alternatives) and has_look(tree):
        return choice(_looked(way, behind) for way in tree.ways)
    if has_look(tree):
        raise NotHeld("it repeats a look ahead")
    return sequence([tree, behind])


def _anchored_end(tree: Tree) -> Tree:
    """What a look ahead sees: a text that goes on, unless the look has an end."""
    if _has(tree, Anchor(True)):
        tree = _front([tree], Anchor(True), True)
    return _looked(_reversed(_fronted(_reversed(tree), False)), NOTHING)


def both(part: Tree, other: Tree, is_negated: bool = False) -> Tree:
    if other in (ANYTHING, NEVER):
        return part if (other == ANYTHING) != is_negated else NEVER
    if part == ANYTHING and not is_negated:
        return other
    return NEVER if part == NEVER else Both(part, other, is_negated)


def has_look(tree: Tree) -> bool:
    """Whether a tree has parts that only `edgekv.grammars.automata` can write."""
    return isinstance(tree, (Lookaround, Both)) or any(map(has_look, children(tree)))


def _has(tree: Tree, anchor: Anchor) -> bool:
    return tree == anchor or any(_has(part, anchor) for part in children(tree))
