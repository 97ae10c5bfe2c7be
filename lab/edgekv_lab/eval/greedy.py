"""What a model says, behind what a method leaves of a text: the likeliest tokens, one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv import native


def feed(llm: Any, tokens: Sequence[int]) -> NDArray[np.float32]:
    """Append tokens to the recent buffer without compressing; logits [n_vocab] of the last one."""
    llm.engine.settings = replace(llm.engine.settings, tail=1 << 30)
    for i in range(0, len(tokens), native.OUTPUTS):  # so few are not read layer by layer
        llm.eval(list(tokens[i : i + native.OUTPUTS]))
    logits: NDArray[np.float32] = llm.logits()
    return logits.copy()


def say(llm: Any, logits: NDArray[np.float32], n_tokens: int, stop: str = "") -> str:
    """The greedy continuation of the conversation in `llm`, whose next token has these logits, up
    to n_tokens or the text `stop`.
    """
    vocab = native.llama_cpp.llama_model_get_vocab(llm.model)
    out: list[int] = []
    words = ""
    while len(out) < n_tokens:
        token = int(logits.argmax())
        if native.llama_cpp.llama_vocab_is_eog(vocab, token):
            break
        out.append(token)
        words = llm.detokenize(out).decode(errors="replace")
        if stop and stop in words.lstrip("\n"):
            return words.lstrip("\n").split(stop)[0]
        if len(out) < n_tokens:
            logits = feed(llm, [token])
    return words
