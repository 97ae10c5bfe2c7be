"""Where a prompt meets a conversation in text, although it is cut into other tokens there."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from edgekv.base.beginnings import n_shared

if TYPE_CHECKING:
    from edgekv.conversation.holder import Holder

Bytes = NDArray[np.uint8]
Ends = NDArray[np.int32]

FIRST, TIMES = 16, 8
"""Tokens that are compared at first, and how many times as many then: most texts part early."""


def same_text(
    llm: Holder, prompt: NDArray[np.int32], have: NDArray[np.int32], least: int
) -> tuple[int, int] | None:
    """How many tokens of a prompt, and how many of a conversation, are the same text: as many as
    possible, and of the conversation at least `least`. None if there are none, and where the same
    tokens reach so far.

    A chat's text is cut into tokens anew in every turn, and what a model wrote one by one seldom
    comes out as it was. The texts are compared from the first token that differs to the first
    letter that does.
    """
    n = n_shared(prompt, have)
    if n >= min(least, len(prompt)):
        return None
    mine, theirs = prompt[n:-1], have[n:]  # the last token is read in any case
    n_text, my_ends, their_ends = _compared(llm, mine, theirs)
    first = max(least, 1) - n
    is_end = np.zeros(n_text + 1, np.bool_)
    is_end[their_ends[first : _n_within(their_ends, n_text)]] = True
    met = is_end[my_ends[: _n_within(my_ends, n_text)]]
    if not met.any():
        return None
    n_mine = len(met) - 1 - int(met[::-1].argmax())
    n_have = int(np.searchsorted(their_ends, my_ends[n_mine], side="right")) - 1
    return n + n_mine, n + n_have


def _n_within(ends: Ends, n_text: int) -> int:
    return int(np.searchsorted(ends, n_text, side="right"))


def _compared(
    llm: Holder, mine: NDArray[np.int32], theirs: NDArray[np.int32]
) -> tuple[int, Ends, Ends]:
    """Bytes that two texts have in common at the beginning, and where the tokens of each begin, as
    far as was looked.
    """
    pieces, size = _known.setdefault(llm, _Pieces()), FIRST
    while True:
        (a, my_ends), (b, their_ends) = pieces.of(llm, mine[:size]), pieces.of(llm, theirs[:size])
        n, is_all = n_shared(a, b), size >= len(mine if len(a) <= len(b) else theirs)
        if is_all or n < min(len(a), len(b)):
            return n, my_ends, their_ends
        size *= TIMES


class _Pieces:
    """The texts of the tokens that were compared, of one model, behind each other."""

    def __init__(self) -> None:
        self._text = bytearray()
        self._begins = np.zeros(0, np.int32)
        self._sizes = np.zeros(0, np.int32)
        """Bytes of each token; -1: it was never asked for."""

    def of(self, llm: Holder, tokens: NDArray[np.int32]) -> tuple[Bytes, Ends]:
        """Their text, and int32 [tokens + 1]: where each begins in it, and where the last ends."""
        self._learn(llm, tokens)
        sizes, begins = self._sizes[tokens], self._begins[tokens]
        ends = np.concatenate([[0], sizes.cumsum()], dtype=np.int32)
        places = np.repeat(begins - ends[:-1], sizes) + np.arange(ends[-1], dtype=np.int32)
        return np.frombuffer(bytes(self._text), np.uint8)[places], ends

    def _learn(self, llm: Holder, tokens: NDArray[np.int32]) -> None:
        n_more = int(tokens.max(initial=-1)) + 1 - len(self._sizes)
        if n_more > 0:
            self._sizes = np.pad(self._sizes, (0, n_more), constant_values=-1)
            self._begins = np.pad(self._begins, (0, n_more))
        for token in np.unique(tokens[self._sizes[tokens] < 0]).tolist():
            piece = llm.detokenize([token], special=True)
            self._begins[token], self._sizes[token] = len(self._text), len(piece)
            self._text += piece


_known: WeakKeyDictionary[Holder, _Pieces] = WeakKeyDictionary()
