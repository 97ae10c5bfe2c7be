"""Whether a context has room for documents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from edgekv.base.defaults import CTX_STEP, whole_ctx
from edgekv.commands.stream import trained_context
from edgekv.errors import BadInput

if TYPE_CHECKING:
    from edgekv import Llama

FOR_A_QUESTION = CTX_STEP // 2
"""Tokens that a proposed context has room for besides, at least."""


def check(llm: Llama, n_ctx: int, documents: Mapping[str, str]) -> None:
    """Raises BadInput, with the names of documents, if they are too long for a context of `n_ctx`
    tokens (0: of as many as the model was trained with), one of them or all together. llm: its
    vocabulary is enough.
    """
    trained = trained_context(llm)
    n_ctx = n_ctx or trained
    if sum(len(text.encode()) for text in documents.values()) < n_ctx:
        return  # a token has a byte or more
    sizes = {
        name: len(llm.tokenize(text.encode(), add_bos=False)) for name, text in documents.items()
    }
    total = sum(sizes.values())
    if total < n_ctx:
        return
    too_long = {name: n for name, n in sizes.items() if n >= n_ctx} or sizes
    names = ", ".join(f"{name} ({n:,} tokens)" for name, n in too_long.items())
    needed = whole_ctx(total + FOR_A_QUESTION)
    advice = f"; this model was trained with {trained:,}"
    if needed <= trained or not trained:
        advice = f", or start with -c {needed}"
    one = "a shorter text" if len(documents) == 1 else "shorter ones"
    raise BadInput(f"the context of {n_ctx:,} tokens has no room for {names}: give {one}{advice}")
