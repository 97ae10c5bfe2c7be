"""Haystacks: text up to a number of tokens, and sentences hidden in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import cycle
from random import Random

from edgekv.errors import BadInput

Count = Callable[[str], int]
"""Tokens of a text."""

NOISE = (
    "The kettle is on.",
    "The path is wet.",
    "The clock is slow.",
    "On we walk.",
    "Home once more.",
)
"""The same few sentences over and over, as in RULER: a text with nothing in it but the needle."""


def noise() -> Iterator[str]:
    """Sentences of noise without end."""
    return cycle(NOISE)


def fill(pieces: Iterable[str], n_tokens: int, count: Count) -> list[str]:
    """Pieces from the front as long as together, with a blank before each, they have at most
    n_tokens.
    """
    taken, length = [], 0
    for piece in pieces:
        length += count(" " + piece)
        if length > n_tokens:
            break
        taken.append(piece)
    return taken


def hide(text: Sequence[str], needles: Sequence[str], rng: Random) -> str:
    """The text with the needles in this order at places drawn anew, no two of them side by side if
    there is room.
    """
    n = len(text) + 1
    places = sorted(
        rng.sample(range(n), len(needles))
        if n >= len(needles)
        else rng.choices(range(n), k=len(needles))
    )
    out = list(text)
    for place, needle in reversed(list(zip(places, needles, strict=True))):
        out.insert(place, needle)
    return " ".join(out)


def room(n_tokens: int, fixed: Iterable[str], count: Count) -> int:
    """Tokens left for the haystack when the fixed pieces are in it. Raises BadInput if there are
    none.
    """
    left = n_tokens - sum(count(" " + piece) for piece in fixed)
    if left < 1:
        raise BadInput(
            f"{n_tokens} tokens hold no more than what is hidden in them; give longer --lengths"
        )
    return left


def largest(fits: Callable[[int], bool], start: int) -> int:
    """The largest n >= 0 with fits(n), for something that grows with n; -1 if not even 0 does.
    start: a first guess.
    """
    low, high = -1, max(start, 1)
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
