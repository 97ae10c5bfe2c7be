"""Trees of regular expressions as rules, one per state: at each character one rule goes on.

States are the tree's derivatives (Brzozowski, 1964): what may follow, once a character was read.
They express what a tree's own form cannot: what both of two trees match, and what one does not.
"""

from __future__ import annotations

from edgekv.grammars.characters import ALL, Ranges, merged, one_of, within, without
from edgekv.grammars.regexes import (
    ANYTHING,
    NEVER,
    NOTHING,
    Alternatives,
    Both,
    Chars,
    NotHeld,
    Repeat,
    Seq,
    Tree,
    both,
    choice,
    firsts,
    is_empty,
    repeat,
    sequence,
    size,
)

STATES_MOST, WORK_MOST = 1500, 150_000
"""Rules of a tree, and nodes of trees that are looked at to find them."""
NO_TEXT = '""'


def matches(tree: Tree, text: str) -> bool:
    """Whether a text matches."""
    for character in text:
        tree = _behind(tree, ord(character))
    return is_empty(tree)


def rules_of(tree: Tree, digest: str) -> tuple[str, list[str], int]:
    """(the name of the rule of a tree, all rules, the work). Raises NotHeld for too many."""
    edges: dict[Tree, list[tuple[Tree, Ranges]]] = {}
    left, work = [tree], 0
    while left:
        state = left.pop()
        if state in edges:
            continue
        edges[state] = _edges(state)
        left += [target for target, _ in edges[state]]
        work += size(state) * (2 + len(edges[state]))
        if len(edges) > STATES_MOST or work > WORK_MOST:
            raise NotHeld("it has too many states", work)
    alive = _alive(edges)
    if tree not in alive:
        raise NotHeld("nothing matches it")
    names = {state: f"ours-{digest}-s{i}" for i, state in enumerate(edges) if state in alive}
    lines = []
    for state, name in names.items():
        ways = [""] if is_empty(state) else []
        for target, ranges in edges[state]:
            text = one_of(ranges) if target in alive else None
            ways += [f"{text} {names[target]}"] if text else []
        body = "ours-char*" if state == ANYTHING else " | ".join(ways)
        lines.append(f"{name} ::= {body or NO_TEXT}")
    return names[tree], lines, work


def _alive(edges: dict[Tree, list[tuple[Tree, Ranges]]]) -> set[Tree]:
    """States from which a match can end."""
    sources: dict[Tree, list[Tree]] = {}
    for state, targets in edges.items():
        for target, ranges in targets:
            if one_of(ranges):
                sources.setdefault(target, []).append(state)
    left, alive = [state for state in edges if is_empty(state)], set()
    while left:
        state = left.pop()
        if state not in alive:
            alive.add(state)
            left += sources.get(state, [])
    return alive


def _edges(tree: Tree) -> list[tuple[Tree, Ranges]]:
    """Where each character leads to. Ranges are in order and apart."""
    classes = [ALL]
    for ranges in set(firsts(tree)):
        parts = [(within(one, list(ranges)), without(one, list(ranges))) for one in classes]
        classes = [part for pair in parts for part in pair if part]
    found: dict[Tree, list[tuple[int, int]]] = {}
    for one in classes:
        target = _behind(tree, one[0][0])
        if target != NEVER:
            found.setdefault(target, []).extend(one)
    return [(target, merged(ranges)) for target, ranges in found.items()]


def _behind(tree: Tree, code: int) -> Tree:
    """What may follow a character."""
    if isinstance(tree, Chars):
        return NOTHING if any(low <= code <= high for low, high in tree.ranges) else NEVER
    if isinstance(tree, Alternatives):
        return choice(way for way in (_behind(way, code) for way in tree.ways) if way != NEVER)
    if isinstance(tree, Repeat):
        most = None if tree.most is None else tree.most - 1
        left = repeat(tree.part, max(tree.least - 1, 0), most)
        return sequence([_behind(tree.part, code), left])
    if isinstance(tree, Both):
        part, other = _behind(tree.part, code), _behind(tree.other, code)
        return both(part, other, tree.is_negated)
    assert isinstance(tree, Seq)
    ways = []
    for i, part in enumerate(tree.parts):
        ways.append(sequence([_behind(part, code), *tree.parts[i + 1 :]]))
        if not is_empty(part):
            break
    return choice(way for way in ways if way != NEVER)
