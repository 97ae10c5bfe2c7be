"""Rules for the JSON strings that a pattern matches."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

from edgekv.grammars.automata import rules_of
from edgekv.grammars.characters import ALL, literal, merged, one_of, within
from edgekv.grammars.counts import AT_ONCE, COUNT_MOST, repeated
from edgekv.grammars.regexes import (
    ANYTHING,
    NOTHING,
    Alternatives,
    Both,
    Chars,
    NotHeld,
    Repeat,
    Seq,
    Tree,
    both,
    children,
    choice,
    extends,
    firsts,
    has_look,
    is_empty,
    repeat,
    sequence,
    tree_of,
    width,
)

SIZE_MOST, AMBIGUOUS_MOST = 10_000, 300
"""Characters of a rule, with its repetitions written out; and of one where the same text may be
read in many ways, which the sampler follows all at once."""


@dataclass(frozen=True)
class Rule:
    """The rule of the strings that patterns match. work: nodes that were looked at for it."""

    text: str
    is_of_length: bool = True
    work: int = 0


def rule_of(
    patterns: tuple[str, ...], least: int = 0, most: int | None = None, other: tuple[str, ...] = ()
) -> Rule:
    """The rule of the strings that all patterns match, as long as asked for.

    other: texts that are left out. Raises NotHeld for patterns that no grammar expresses.
    """
    found = _found(patterns, least, most, other)
    if isinstance(found, NotHeld):
        raise NotHeld(str(found), found.work)
    return found


@lru_cache(maxsize=1000)
def _found(
    patterns: tuple[str, ...], least: int, most: int | None, other: tuple[str, ...]
) -> Rule | NotHeld:
    try:
        tree: Tree = ANYTHING
        for pattern in patterns:
            tree = both(tree, tree_of(pattern))
        if other:
            tree = both(tree, choice(map(_exactly, other)), is_negated=True)
        short = _of_length(tree, least, most)
        return _of_other_length(tree, least, most) if short is None else _rule(short)
    except NotHeld as error:
        return NotHeld(str(error), error.work)


def _of_other_length(tree: Tree, least: int, most: int | None) -> Rule:
    """A rule that counts too, if it is not too long."""
    try:
        return _rule(Both(tree, repeat(Chars(tuple(ALL)), least, most), False))
    except NotHeld as error:
        found = _rule(tree)
        return Rule(found.text, False, found.work + error.work)


def _exactly(text: str) -> Tree:
    return sequence(Chars(((ord(character), ord(character)),)) for character in text)


def _rule(tree: Tree) -> Rule:
    digest = blake2b(repr(tree).encode("utf-8", "replace"), digest_size=5).hexdigest()
    if not has_look(tree):
        with suppress(Ambiguous):
            rules = _Rules(digest)
            plain = _loops(tree, [0])
            if _size(plain) > SIZE_MOST:
                raise NotHeld("it is too large")
            text = f'"\\"" {rules.text(plain)} "\\""'
            return Rule("\n".join([text, *rules.lines]))
    name, lines, work = rules_of(tree, digest)
    return Rule("\n".join([f'"\\"" {name} "\\""', *lines]), work=work)


def _of_length(tree: Tree, least: int, most: int | None) -> Tree | None:
    """The tree with its one repetition of characters as long as asked for, if it has one."""
    low, high = width(tree)
    if low >= least and (most is None or high is not None and high <= most):
        return tree
    if has_look(tree):
        return None
    parts: list[Tree] = list(tree.parts) if isinstance(tree, Seq) else [tree]
    varying = [i for i, part in enumerate(parts) if len(set(width(part))) > 1]
    if len(varying) != 1:
        return None
    part = parts[varying[0]]
    if not isinstance(part, Repeat) or not isinstance(part.part, Chars):
        return None
    others = low - part.least
    wanted = max(part.least, least - others)
    ends = [end for end in (part.most, None if most is None else most - others) if end is not None]
    if ends and min(ends) < wanted:
        raise NotHeld("no match is as long as asked for")
    parts[varying[0]] = repeat(part.part, wanted, min(ends) if ends else None)
    return sequence(parts)


def _loops(tree: Tree, made: list[int]) -> Tree:
    """The same without repetitions of what may be empty: a grammar's parser refuses these."""
    made[0] += 1
    if made[0] > SIZE_MOST:
        raise NotHeld("it is too large")
    if isinstance(tree, Seq):
        return sequence(_loops(part, made) for part in tree.parts)
    if isinstance(tree, Alternatives):
        return choice(_loops(way, made) for way in tree.ways)
    if isinstance(tree, Repeat):
        part = _loops(tree.part, made)
        if is_empty(part):
            full = _full(part, made)
            return NOTHING if full is None else repeat(full, 0, tree.most)
        return repeat(part, tree.least, tree.most)
    return tree


def _full(tree: Tree, made: list[int]) -> Tree | None:
    """What a tree matches but the empty text."""
    made[0] += 1
    if made[0] > SIZE_MOST:
        raise NotHeld("it is too large")
    if not is_empty(tree):
        return tree
    if isinstance(tree, Repeat):
        part = _full(tree.part, made)
        return None if part is None else repeat(part, 1, tree.most)
    if isinstance(tree, Alternatives):
        ways = [full for way in tree.ways if (full := _full(way, made)) is not None]
        return choice(ways) if ways else None
    assert isinstance(tree, Seq)
    ways = []
    for i, part in enumerate(tree.parts):
        full = _full(part, made)
        if full is not None:
            made[0] += len(tree.parts) - i
            ways.append(sequence([full, *tree.parts[i + 1 :]]))
    return choice(ways) if ways else None


def _size(tree: Tree) -> int:
    """How many characters the tree has when all repetitions are written out."""
    if isinstance(tree, (Seq, Alternatives)):
        return sum(map(_size, children(tree)))
    if not isinstance(tree, Repeat):
        return 1
    count = max(tree.least, 1 if tree.most is None else tree.most)
    if count > COUNT_MOST:
        raise NotHeld(f"it repeats something more than {COUNT_MOST:,} times")
    if count > AT_ONCE and isinstance(tree.part, Chars):
        return AT_ONCE  # in blocks
    size = count * _size(tree.part)
    if size > AMBIGUOUS_MOST and count > 1 and _is_ambiguous(tree.part):
        raise Ambiguous
    return size


def _is_ambiguous(tree: Tree) -> bool:
    """Whether it may be unclear where one of many ends."""
    heads = merged(pair for one in firsts(tree) for pair in one)
    return bool(within(extends(tree), heads))


class Ambiguous(Exception):
    """A tree that may read a text in too many ways."""


class _Rules:
    """Writes trees. Every part that is repeated has a rule of its own."""

    def __init__(self, digest: str) -> None:
        self._digest = digest
        self._names: dict[Tree, str] = {}
        self.lines: list[str] = []

    def text(self, tree: Tree) -> str:
        if isinstance(tree, Chars):
            return self._chars(tree)
        if isinstance(tree, Alternatives):
            if not tree.ways:
                raise NotHeld("nothing matches it")
            return f"( {' | '.join(map(self.text, tree.ways))} )"
        if isinstance(tree, Repeat):
            return self._repeated(tree)
        assert isinstance(tree, Seq)
        return self._sequence(tree)

    def _repeated(self, tree: Repeat) -> str:
        plain = {(0, None): "*", (1, None): "+", (0, 1): "?"}
        name = self._named(tree.part, max(tree.least, tree.most or 0) > AT_ONCE)
        if (tree.least, tree.most) in plain:
            return name + plain[tree.least, tree.most]
        text, lines = repeated(name, tree.least, tree.most)
        self.lines += lines
        return text

    def _sequence(self, tree: Seq) -> str:
        out, plain = [], ""
        for part in [*tree.parts, None]:
            if isinstance(part, Chars) and len(part.ranges) == 1 and len({*part.ranges[0]}) == 1:
                plain += chr(part.ranges[0][0])
                continue
            if plain:
                out.append(literal(plain))
                plain = ""
            if part is not None:
                out.append(self.text(part))
        return " ".join(out) or '""'

    def _chars(self, tree: Chars) -> str:
        if tree.ranges == tuple(ALL):
            return "ours-char"
        text = one_of(list(tree.ranges))
        if text is None:
            raise NotHeld("no character is left")
        return text

    def _named(self, tree: Tree, needs_name: bool) -> str:
        text = self.text(tree)
        is_class = text.startswith("[") and text.index("]") == len(text) - 1
        if text == "ours-char" or is_class and not needs_name:
            return text
        if tree not in self._names:
            self._names[tree] = name = f"ours-{self._digest}-{len(self._names)}"
            self.lines.append(f"{name} ::= {text}")
        return self._names[tree]
