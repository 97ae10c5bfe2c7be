"""Where a prompt meets a conversation in text, although it is cut into other tokens there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from edgekv.session.continued import n_same

if TYPE_CHECKING:
    from edgekv.session.holder import Holder

_pieces: WeakKeyDictionary[Holder, dict[int, bytes]] = WeakKeyDictionary()
"""The text of each token that was compared, for each model."""


def same_text(
    llm: Holder, prompt: Sequence[int], have: Sequence[int], least: int
) -> tuple[int, int] | None:
    """How many tokens of a prompt, and how many of a conversation, are the same text: as many as
    possible, and of the conversation at least `least`. None if there are none, and where the same
    tokens reach so far.

    A chat's text is cut into tokens anew in every turn, and what a model wrote one by one seldom
    comes out as it was. The texts are compared from the first token that differs to the first
    letter that does.
    """
    n = n_have = n_same(prompt, have)
    if n >= min(least, len(prompt)):
        return None
    met, mine, theirs = None, b"", b""  # what is left of each, one of them is empty
    while mine.startswith(theirs) or theirs.startswith(mine):
        n_common = min(len(mine), len(theirs))
        mine, theirs = mine[n_common:], theirs[n_common:]
        if mine == theirs and n_have >= max(least, 1):
            met = n, n_have
        if mine and n_have < len(have):
            theirs, n_have = _piece(llm, have[n_have]), n_have + 1
        elif not mine and n < len(prompt) - 1:  # the last token is read in any case
            mine, n = _piece(llm, prompt[n]), n + 1
        else:
            break
    return met


def _piece(llm: Holder, token: int) -> bytes:
    known = _pieces.setdefault(llm, {})
    if token not in known:
        known[token] = llm.detokenize([token], special=True)
    return known[token]
