"""A prompt that goes on from a conversation in other tokens than the model wrote."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from edgekv.base.beginnings import n_shared

TextOf = Callable[[list[int]], bytes]
TokensOf = Callable[[bytes], list[int]]


def continued(
    tokens: list[int], have: list[int], fixed: int, text_of: TextOf, tokens_of: TokensOf
) -> list[int]:
    """`tokens`, or the same text in other tokens that begin with the first `fixed` ones of the
    conversation `have`.

    fixed: tokens that cannot be taken back, because rows were chosen with knowledge of them. A
    chat's text is cut into tokens anew in
    every turn, and what a model wrote one by one seldom comes out as it was: a reply that begins
    with a line break shares a token with the end of its prompt then. Without this, one such token
    would have the whole conversation read again. llama.cpp's own chat keeps its tokens too.
    """
    same = n_shared(tokens, have)
    if same >= min(fixed, len(tokens)):
        return tokens
    text = text_of(tokens)
    n_text = n_shared(text, text_of(have))
    n_kept = (
        bisect_right(range(len(have) + 1), n_text, lo=fixed, key=lambda n: len(text_of(have[:n])))
        - 1
    )
    if n_kept < fixed:
        return tokens
    again = have[:n_kept] + tokens_of(text[len(text_of(have[:n_kept])) :])
    return again if text_of(again) == text else tokens
