"""Where a prompt meets a conversation in text, although it is cut into other tokens there."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from edgekv.base.beginnings import n_shared
from edgekv.conversation.holder import Holder

Tokens = NDArray[np.int32]

FIRST, TIMES = 16, 8
"""Tokens whose texts are compared at first, and how many times as many then: most texts part early.
"""
FAR = 2048
"""Behind so many tokens that are the same, few texts are compared again at the next difference.
Where differences lie closer, one comparison of many texts takes less time.
"""


def same_text(llm: Holder, prompt: Tokens, have: Tokens, least: int) -> tuple[int, int] | None:
    """How many tokens of a prompt, and how many of a conversation, are the same text: as many as
    possible, and of the conversation at least `least`. None if there are none, and where the same
    tokens reach so far.

    A chat's text is cut into tokens anew in every turn, and what a model wrote one by one seldom
    comes out as it was. Texts are compared where tokens differ, until both end at the same place.
    """
    i = j = n_shared(prompt, have)
    if i >= min(least, len(prompt)):
        return None
    mine, size, goes_on = prompt[:-1], FIRST, True  # the last token is read in any case
    while goes_on:
        n_mine, n_theirs, goes_on = _met(llm, mine[i:], have[j:], size)
        i, j = i + n_mine, j + n_theirs
        n = n_shared(mine[i:], have[j:]) if goes_on else 0
        i, j, size = i + n, j + n, FIRST if n >= FAR else size * TIMES
    return (i, j) if j >= max(least, 1) else None


def learn(llm: Holder, tokens: Sequence[int]) -> None:
    """Look up texts of tokens that are going to be compared. Any thread may call this."""
    _pieces(llm).learn(llm, np.asarray(tokens, np.int32))


def _met(llm: Holder, mine: Tokens, theirs: Tokens, size: int) -> tuple[int, int, bool]:
    """How many of the first `size` tokens of each are the same text, and whether it may go on."""
    pieces = _pieces(llm)
    (a, my_ends), (b, their_ends) = pieces.of(llm, mine[:size]), pieces.of(llm, theirs[:size])
    n_text = n_shared(a, b)
    is_end = np.zeros(n_text + 1, np.bool_)
    is_end[their_ends[: _n_within(their_ends, n_text)]] = True
    met = is_end[my_ends[: _n_within(my_ends, n_text)]]
    n_mine = len(met) - 1 - int(met[::-1].argmax())
    n_theirs = _n_within(their_ends, int(my_ends[n_mine])) - 1
    is_all = size >= len(mine if len(a) <= len(b) else theirs)
    return n_mine, n_theirs, not is_all and n_text == min(len(a), len(b))


def _n_within(ends: Tokens, n_text: int) -> int:
    return int(np.searchsorted(ends, n_text, side="right"))


class _Pieces:
    """The texts of the tokens that were compared, of one model, behind each other."""

    def __init__(self) -> None:
        self._lock, self._text = Lock(), bytearray()
        self._begins = np.zeros(0, np.int32)
        self._sizes = np.zeros(0, np.int32)
        """Bytes of each token; -1: it was never asked for."""

    def of(self, llm: Holder, tokens: Tokens) -> tuple[NDArray[np.uint8], Tokens]:
        """Their text, and int32 [tokens + 1]: where each begins in it, and where the last ends."""
        self.learn(llm, tokens)
        sizes, begins = self._sizes[tokens], self._begins[tokens]
        ends = np.concatenate([[0], sizes.cumsum()], dtype=np.int32)
        places = np.repeat(begins - ends[:-1], sizes) + np.arange(ends[-1], dtype=np.int32)
        return np.frombuffer(bytes(self._text), np.uint8)[places], ends

    def learn(self, llm: Holder, tokens: Tokens) -> None:
        """Look up what is not known yet."""
        n = int(tokens.max(initial=-1)) + 1
        if n <= len(self._sizes) and self._sizes[tokens].min(initial=0) >= 0:
            return
        with self._lock:
            n_more = max(n - len(self._sizes), 0)
            self._begins = np.pad(self._begins, (0, n_more))
            self._sizes = np.pad(self._sizes, (0, n_more), constant_values=-1)
            for token in np.unique(tokens[self._sizes[tokens] < 0]).tolist():
                piece = llm.detokenize([token], special=True)
                self._begins[token] = len(self._text)
                self._text += piece
                self._sizes[token] = len(piece)  # last: another thread goes by it


def _pieces(llm: Holder) -> _Pieces:
    return _known.setdefault(llm, _Pieces())


_known: WeakKeyDictionary[Holder, _Pieces] = WeakKeyDictionary()
