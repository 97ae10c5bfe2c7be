"""Text at the front of a prompt that changes from request to request: a date, a hash.

It would keep the rest from being found again. So it is not compared: where a conversation is kept
whose first message begins with another such text, that text takes its place.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgekv.base.beginnings import n_shared
from edgekv.conversation.pool import Conversations
from edgekv.llama.llama import Llama
from edgekv.serve.pattern import CHARACTERS
from edgekv.serve.request import Front, Prompt

N_TEXTS = 8
"""Texts of conversations that are tried for one prompt."""


def settled(llm: Llama, conversations: Conversations, prompt: Prompt) -> Prompt:
    """The prompt, or the same with a kept conversation's text in front, if that has more."""
    front = prompt.front
    if front is None:
        return prompt
    found, n_most = prompt, conversations.reachable(prompt.tokens)
    for text in _texts(llm, conversations.tokens(), prompt, front):
        other = front.again(text)
        n = conversations.reachable(other.tokens) if len(other.tokens) < llm.n_ctx() else 0
        if n > n_most and other.front is not None and _ends(llm, other, text) < n:
            found, n_most = other, n
    return found


def _texts(llm: Llama, known: list[NDArray[np.int32]], prompt: Prompt, front: Front) -> list[str]:
    """Other texts that conversations have in this place, of those used last first."""
    tokens = np.asarray(prompt.tokens[: front.n_before], np.int32)
    looked, texts = set[bytes](), dict[str, None]()
    for have in known:
        if n_shared(have, tokens) < front.n_before:
            continue
        begin = have[front.n_before : front.n_before + CHARACTERS]
        if begin.tobytes() in looked:
            continue
        looked.add(begin.tobytes())
        there = text_of(llm, begin.tolist())
        if there.startswith(front.before):
            texts[front.pattern.at_front(there.removeprefix(front.before))] = None
        if len(texts) > N_TEXTS:
            break
    return [text for text in texts if text not in ("", front.text)]


def _ends(llm: Llama, prompt: Prompt, text: str) -> int:
    """Tokens of a prompt through the text at its front: what is shared has to go beyond it."""
    assert prompt.front is not None
    n_wanted, n = len((prompt.front.before + text).encode()), prompt.front.n_before
    while n < len(prompt.tokens) and n_wanted > 0:
        n_wanted -= len(llm.detokenize([prompt.tokens[n]], special=True))
        n += 1
    return n


def text_of(llm: Llama, tokens: list[int]) -> str:
    """Their text, control tokens included."""
    return llm.detokenize(tokens, special=True).decode("utf-8", "replace")
