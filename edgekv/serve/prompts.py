"""Prompts of chats, and what changes at their front."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import cache

from edgekv.base.beginnings import n_shared
from edgekv.chat.messages import Message
from edgekv.chat.template import Chat, ChatTemplate
from edgekv.llama.llama import Llama
from edgekv.serve.front import N_TEXTS, text_of
from edgekv.serve.pattern import CHARACTERS, Pattern
from edgekv.serve.request import Front, Prompt
from edgekv.serve.room import Room

N_AROUND = 64
"""Characters behind a changing text by which its place in the prompt is found."""


class Prompts:
    """Makes prompts of chats, and marks what changes at their front.

    text: a template in the place of the model's; changing: what is not compared of the first
    message. Raises BadInput for a template that is broken.
    """

    def __init__(self, llm: Llama, text: str = "", changing: Pattern | None = None) -> None:
        self._llm, self._changing = llm, changing
        self.template = ChatTemplate(llm, text, Room(llm).check)
        self._fronts: deque[str] = deque(maxlen=N_TEXTS)
        """Changing texts of the last prompts."""

    def of(self, chat: Chat) -> Prompt:
        """Raises BadInput for messages, tools and schemas that cannot be used."""
        prompt = self._of(chat)
        if prompt.front is not None:
            self._make_others(prompt.front)
        return prompt

    def _make_others(self, front: Front) -> None:
        """The prompt with other texts in front, for which the worker is going to ask."""
        others = [text for text in self._fronts if text != front.text]
        if len(others) == len(self._fronts):
            self._fronts.append(front.text)
        for text in others:
            front.again(text)

    def _of(self, chat: Chat) -> Prompt:
        made = self.template.prompt(chat)
        front = None
        if self._changing is not None:
            front = self._front(chat.messages[0], made.text, made.tokens, self._again(chat))
        return Prompt(made.tokens, made.parts, made.cuts, made.syntax, made.text, front)

    def _again(self, chat: Chat) -> Callable[[Message], Prompt]:
        return lambda first: self._of(replace(chat, messages=[first, *chat.messages[1:]]))

    def _front(
        self, first: Message, whole: str, tokens: list[int], again: Callable[[Message], Prompt]
    ) -> Front | None:
        """What changes at the beginning of the first message, if the template has it as it is."""
        assert self._changing is not None
        said = _first_text(first)
        text = self._changing.at_front(said)
        at = whole.find(said[: len(text) + N_AROUND].rstrip()) if text.strip() else -1
        if at < 0:
            return None
        n = n_shared(self.template.tokens_of(whole[:at]), tokens)
        there = text_of(self._llm, tokens[n : n + CHARACTERS])
        before, found, _ = there.partition(text)
        if not found:
            return None

        @cache  # the worker asks for it more than once
        def with_other(other: str) -> Prompt:
            return again(_with_first_text(first, other + said[len(text) :]))

        return Front(self._changing, text, n, before, with_other)


def _first_text(message: Message) -> str:
    """A message's text, or of several the first."""
    content = message.get("content")
    if isinstance(content, list):
        content = content[0].get("text") if content else ""
    return content if isinstance(content, str) else ""


def _with_first_text(message: Message, text: str) -> Message:
    content = message["content"]
    if isinstance(content, list):
        return {**message, "content": [{**content[0], "text": text}, *content[1:]]}
    return {**message, "content": text}
