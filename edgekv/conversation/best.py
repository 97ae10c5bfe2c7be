"""Which conversation shares most with a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgekv.base.beginnings import n_shared
from edgekv.conversation.by_text import same_text
from edgekv.conversation.holder import Holder
from edgekv.conversation.talk import Entry
from edgekv.memory.limit import APPEND_MAX

N_NEAR = 3
"""Conversations that are compared with a prompt as text."""


class Best(NamedTuple):
    """The conversation that shares most with a prompt.

    n: tokens of the prompt that the conversation has; n_have: how many of its own those are.
    """

    entry: Entry | None
    n: int
    n_have: int


def best(
    llm: Holder, prompt: NDArray[np.int32], name: str | None, now: Entry, others: Sequence[Entry]
) -> Best:
    """The conversation that most of a prompt need not be read behind, None if there is none.

    name: goes before others that share as much; now: what `llm` holds; others: those of the same
    settings that wait.
    """
    if np.array_equal(prompt, now.tokens) and llm.has_logits:
        return Best(now, len(prompt), len(prompt))  # it is answered at once
    known = [now, *others]

    def usable(x: Entry) -> int:
        n = x.reachable(prompt)
        if n in (len(prompt), x.begin_of(prompt)) or _is_worth(llm, x, n, n):
            return n
        return max((end for end in (x.least, x.mark) if 0 < end <= n), default=0)

    def order(x: Entry) -> tuple[object, ...]:
        named = name is not None and x.name == name
        n = usable(x)
        # what is asked again is read as it was; from the front only where there is nothing else
        is_again = n == len(prompt) or bool(x.begin_of(prompt))
        return is_again, n, named, n >= x.least, x is now, x.parked is not None, x.last_used

    first = max(known, key=order)
    n = usable(first)
    found = Best(first, n, n)
    if llm.engine is not None:
        found = _by_text(llm, prompt, known, found)
    return found if found.n else Best(None, 0, 0)


def _by_text(llm: Holder, prompt: NDArray[np.int32], known: Sequence[Entry], found: Best) -> Best:
    """`found`, or a conversation that shares more with a prompt in text than that in tokens."""
    shared = {x: n_shared(prompt, x.tokens) for x in known}
    most = max(shared.values())
    if most <= found.n:
        return found
    near = sorted((x for x in known if shared[x] == most), key=lambda x: -len(x.tokens))
    for x in near[:N_NEAR]:
        met = same_text(llm, prompt, x.tokens, x.first)
        if met and met[0] > found.n and _is_worth(llm, x, *met):
            found = Best(x, *met)
    return found


def _is_worth(llm: Holder, x: Entry, n: int, n_have: int) -> bool:
    """Whether a prompt goes on from so many of a conversation's tokens. What it keeps depends on
    where its reading begins, and an answer should not depend on what others asked: one chunk is
    read anew rather than found in the middle of a turn. Where nothing is compressed, only the last
    bits of logits depend on it, and it is a few tokens.
    """
    few = APPEND_MAX if llm.engine is None else llm.context_params.n_ubatch
    return n_have == len(x.tokens) or n > few
