"""Where a prompt meets a conversation in text, although it is cut into other tokens there."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from edgekv.session.continued import continued, n_same

if TYPE_CHECKING:
    from edgekv.session.holder import Holder


def same_text(
    llm: Holder, prompt: list[int], have: list[int], least: int
) -> tuple[int, int] | None:
    """How many tokens of a prompt, and how many of a conversation, are the same text: as many as
    possible, and of the conversation at least `least`. None if there are none.

    A chat's text is cut into tokens anew in every turn, and what a model wrote one by one seldom
    comes out as it was.
    """
    again = continued(
        prompt,
        have,
        least,
        lambda some: llm.detokenize(some, special=True),
        lambda text: llm.tokenize(text, add_bos=False, special=True),
    )
    if again is prompt:
        return None
    mine, theirs = _ends(llm, prompt[:-1]), _ends(llm, have[: n_same(again, have)])
    for n_have in range(len(theirs) - 1, max(least, 1) - 1, -1):
        n = bisect_right(mine, theirs[n_have]) - 1
        if n > 0 and mine[n] == theirs[n_have]:
            return n, n_have
    return None


def _ends(llm: Holder, tokens: Sequence[int]) -> list[int]:
    """Where each token's text ends, in bytes, behind a 0."""
    return [0, *accumulate(len(llm.detokenize([x], special=True)) for x in tokens)]
