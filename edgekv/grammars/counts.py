"""Repetitions of more than the grammar's parser has room for at once."""

from __future__ import annotations

AT_ONCE, BLOCK, COUNT_MOST = 2000, 1000, 1_000_000
"""Repetitions that the parser takes; those of a rule for many; and the most that are counted."""


def repeated(name: str, least: int, most: int | None) -> tuple[str, list[str]]:
    """(GBNF of a rule that is repeated, further rules). most: None for any number.

    A thousand at once are a rule. What is left is counted up to two thousand, so that every number
    is met.
    """
    if max(least, most or 0) <= AT_ONCE:
        return f"{name}{{{least},{'' if most is None else most}}}", []
    block = f"{name}-{BLOCK}"
    parts = [(block, least // BLOCK, least // BLOCK), (name, least % BLOCK, least % BLOCK)]
    if most is not None:
        blocks = max(most - least - BLOCK + 1, 0) // BLOCK
        parts += [(block, 0, blocks), (name, 0, most - least - blocks * BLOCK)]
    text = " ".join(f"{part}{{{low},{high}}}" for part, low, high in parts if high)
    text += f" {name}*" if most is None else ""
    return text, [f"{block} ::= {name}{{{BLOCK}}}"]
