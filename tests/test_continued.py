"""Text that goes on from a conversation, cut into other tokens: `edgekv.conversation.continued`."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgekv.base.beginnings import n_shared
from edgekv.conversation.continued import continued

PIECES = [b"a", b"b", b"c", b"ab", b"bc", b"abc", b"\n", b"\n\n", b"\xc3", b"\xa4", "ä".encode()]
"""Of a vocabulary in which most texts can be cut in several ways; a token is an index."""


def text_of(tokens: list[int]) -> bytes:
    return b"".join(PIECES[t] for t in tokens)


def tokens_of(text: bytes) -> list[int]:
    """The longest piece first, as a tokenizer would."""
    tokens = []
    while text:
        tokens.append(
            max(
                (t for t, p in enumerate(PIECES) if text.startswith(p)),
                key=lambda t: len(PIECES[t]),
            )
        )
        text = text[len(PIECES[tokens[-1]]) :]
    return tokens


def single(text: bytes) -> list[int]:
    """One token per byte."""
    return [PIECES.index(bytes([byte])) for byte in text]


@pytest.mark.parametrize(
    ("have", "fixed", "text", "expected"),
    [
        (
            single(b"ca\n") + single(b"\nb"),
            3,
            b"ca\n\nbcc",
            single(b"ca\n\nb") + tokens_of(b"cc"),
        ),  # a reply that begins with a line break
        (
            single(b"cca\n") + single(b"\nbb"),
            4,
            b"cca\n\nca",
            single(b"cca\n\n") + tokens_of(b"ca"),
        ),  # of which something was cut off
        (single(b"ca") + single(b"bc"), 2, b"cabc", single(b"cabc")),  # nothing new
        (
            single(b"ca") + single(b"bc"),
            2,
            b"caccc",
            tokens_of(b"caccc"),
        ),  # what is fixed comes in the same tokens: the rest can be taken back
        (
            single(b"cab"),
            3,
            b"cabc",
            [*single(b"cab"), *tokens_of(b"c")],
        ),  # the last fixed token would be another one
        (single(b"cab"), 3, b"bca", tokens_of(b"bca")),  # another text
        (single(b"cab"), 3, b"ca", tokens_of(b"ca")),  # less
        ([], 0, b"abc", tokens_of(b"abc")),
    ],
)
def test_what_is_fixed_stays_where_the_text_is_the_same(have, fixed, text, expected):
    assert continued(tokens_of(text), have, fixed, text_of, tokens_of) == expected


@given(
    st.lists(st.integers(0, len(PIECES) - 1)),
    st.lists(st.integers(0, len(PIECES) - 1)),
    st.integers(0, 8),
    st.integers(0, 8),
)
def test_the_text_is_never_another_one(have, more, fixed, cut):
    fixed = min(fixed, len(have))
    text = text_of(have)[: len(text_of(have)) - cut] + text_of(more)
    tokens = tokens_of(text)
    found = continued(tokens, have, fixed, text_of, tokens_of)
    assert text_of(found) == text
    assert found == tokens or n_shared(found, have) >= fixed


@given(st.binary(max_size=700), st.binary(max_size=20), st.binary(max_size=20))
def test_what_two_rows_share_is_what_a_loop_finds(shared, a, b):
    one, other = shared + a, shared + b
    pairs = list(zip(one, other, strict=False))
    expected = next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))
    for kind in (bytes, list, lambda row: np.frombuffer(row, np.uint8)):
        assert n_shared(kind(one), kind(other)) == expected
    assert n_shared(list(one), np.frombuffer(other, np.uint8)) == expected


def test_a_tokenizer_that_puts_something_in_front_changes_nothing():
    """Those of the first Llama put a space in front of whatever they are given."""
    have, tokens = single(b"cab"), tokens_of(b"cabc")
    assert continued(tokens, have, 3, text_of, lambda text: [6, *tokens_of(text)]) == tokens
