"""Where a prompt meets a conversation in text: `edgekv.conversation.by_text`."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edgekv.conversation import by_text
from tests.test_continued import PIECES, text_of


class Vocabulary:
    """As much of a model as the comparison needs."""

    def __init__(self) -> None:
        self.n_asked = 0

    def detokenize(self, tokens, *, special=False):
        self.n_asked += 1
        return text_of(tokens)


def met(llm, prompt, have, least):
    arrays = np.asarray(prompt, np.int32), np.asarray(have, np.int32)
    return by_text.same_text(llm, *arrays, least)


TOKENS = st.lists(st.integers(0, len(PIECES) - 1), max_size=12)


@given(TOKENS, TOKENS, st.integers(0, 6), st.integers(1, 20), st.integers(1, 4))
def test_the_longest_common_text_is_found(prompt, have, least, first, far):
    """Beside all pairs of beginnings, whatever is looked at first."""
    n = next((i for i, (a, b) in enumerate(zip(prompt, have)) if a != b), None)
    shared = min(len(prompt), len(have)) if n is None else n
    pairs = [
        (i, j)
        for i in range(shared, len(prompt))
        for j in range(max(least, 1), len(have) + 1)
        if text_of(prompt[:i]) == text_of(have[:j])
    ]
    expected = None if shared >= min(least, len(prompt)) else max(pairs, default=None)
    with patch.multiple(by_text, FIRST=first, TIMES=2, FAR=far):
        assert met(Vocabulary(), prompt, have, least) == expected


def test_only_what_is_the_same_is_compared():
    a, b, ab = (PIECES.index(piece) for piece in (b"a", b"b", b"ab"))
    llm = Vocabulary()
    assert met(llm, [ab, a, *[a] * 9999], [a, b, b, *[a] * 9999], 5000) is None
    assert llm.n_asked < 5
    assert met(llm, [ab] * 5000 + [a], [a, b] * 5000, 5000) == (5000, 10_000)
    assert llm.n_asked < 10, "each token's text is looked up once"


def test_texts_are_compared_only_where_tokens_differ():
    a, b, ab = (PIECES.index(piece) for piece in (b"a", b"b", b"ab"))
    rest, compared = [*[b] * by_text.FAR, a] * 10, []

    class Counted(by_text._Pieces):
        def of(self, llm, tokens):
            compared.append(len(tokens))
            return super().of(llm, tokens)

    with patch.object(by_text, "_Pieces", Counted):
        prompt, have = [ab, *rest, ab, *rest, a], [a, b, *rest, a, b, *rest]
        assert met(Vocabulary(), prompt, have, 1) == (len(prompt) - 1, len(have))
    assert sum(compared) <= 4 * by_text.FIRST


def test_texts_that_were_looked_up_are_not_looked_up_again():
    llm, tokens = Vocabulary(), [0, 3, 1]
    by_text.learn(llm, [*tokens, 0])
    assert llm.n_asked == 3
    assert met(llm, [3, 0], [0, 1, 0], 1) == (1, 2)
    assert llm.n_asked == 3
