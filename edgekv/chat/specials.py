"""Control tokens in people's texts: text, and no tokens.

A user's text, a document or the result of a tool may hold `<|im_end|>`. Its template's own tokens
end turns; the text's must not. Where one stands in a text, a mark goes into the middle of it before
the template is rendered, and the place is cut out of the prompt when it becomes tokens.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from edgekv.chat.model import TextModel
from edgekv.model import words
from edgekv.native import llama_cpp

MARK = "\ue0f0"
"""A character of the private use area, behind the first character of such a text."""
SPELLED = "\\ue0f0"
"""The same, where a template writes JSON with escapes."""
PEOPLE = ("user", "system", "developer", "tool", "function")
"""Roles whose texts are not the model's own."""


class Specials:
    """The control tokens of one model's vocabulary."""

    def __init__(self, llm: TextModel) -> None:
        self._llm = llm

    @cached_property
    def _texts(self) -> frozenset[str]:
        model = self._llm.model
        vocab = llama_cpp.llama_model_get_vocab(model)
        found = (
            words.name(model, token)
            for token in range(self._llm.n_vocab())
            if llama_cpp.llama_vocab_is_control(vocab, token)
        )
        return frozenset(text for text in found if len(text) > 1)

    @cached_property
    def _sizes(self) -> list[int]:
        return sorted({len(text) for text in self._texts}, reverse=True)

    @cached_property
    def _first(self) -> frozenset[str]:
        return frozenset(text[0] for text in self._texts)

    def _at(self, text: str, begin: int) -> str:
        """The control token's text that begins there; empty if none does."""
        pieces = (text[begin : begin + size] for size in self._sizes)
        return next((piece for piece in pieces if piece in self._texts), "")

    def marked(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages, with marks in people's texts."""
        return [
            {**message, "content": self._marked(message["content"])}
            if message["role"] in PEOPLE
            else message
            for message in messages
        ]

    def _marked(self, content: Any) -> Any:
        if isinstance(content, list):
            return [{**part, "text": self._marked(part["text"])} for part in content]
        begins = [
            at for first in self._first for at in _all(content, first) if self._at(content, at)
        ]
        for at in sorted(begins, reverse=True):
            content = content[: at + 1] + MARK + content[at + 1 :]
        return content

    def tokens_of(self, prompt: str) -> list[int]:
        """Tokens of a prompt of marked messages, with one beginning-of-text token at most."""
        tokens: list[int] = []
        for text, is_plain in self._pieces(prompt):
            tokens += self._tokenized(text, is_plain, is_first=not tokens)
        return tokens

    def _pieces(self, prompt: str) -> list[tuple[str, bool]]:
        """Pieces of the prompt without marks, and whether control tokens in them are text."""
        pieces, rest = [], prompt.replace(SPELLED, MARK)
        while (at := rest.find(MARK)) >= 0:
            whole = rest[max(at - 1, 0) : at] + rest[at + 1 : at + 1 + (self._sizes or [0])[0]]
            found = self._at(whole, 0)
            if not found:  # the text's own character, or one that a template has moved
                pieces.append((rest[: at + 1], False))
                rest = rest[at + 1 :]
                continue
            pieces += [(rest[: at - 1], False), (found, True)]
            rest = rest[at + len(found) :]
        return [(text, plain) for text, plain in [*pieces, (rest, False)] if text]

    def _tokenized(self, text: str, is_plain: bool, is_first: bool) -> list[int]:
        if is_first:
            return self._llm.tokenize(encoded(text), add_bos=True, special=not is_plain)
        # SentencePiece puts a blank before a text that it is given: a line before keeps it away
        line = self._llm.tokenize(b"\n", add_bos=False, special=False)
        tokens = self._llm.tokenize(b"\n" + encoded(text), add_bos=False, special=not is_plain)
        if tokens[: len(line)] == line:
            return tokens[len(line) :]
        return self._llm.tokenize(encoded(text), add_bos=False, special=not is_plain)


def without_marks(prompt: str) -> str:
    """The prompt as people read it."""
    return prompt.replace(MARK, "").replace(SPELLED, "")


def encoded(text: str) -> bytes:
    """UTF-8; half of a pair of surrogates, which JSON can hold, becomes a replacement mark."""
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace").encode()


def _all(text: str, letter: str) -> list[int]:
    """Where a letter stands."""
    found, at = [], text.find(letter)
    while at >= 0:
        found.append(at)
        at = text.find(letter, at + 1)
    return found


def end_tokens(llm: TextModel) -> list[int]:
    """The tokens at which the model would stop."""
    vocab = llama_cpp.llama_model_get_vocab(llm.model)
    return [token for token in range(llm.n_vocab()) if llama_cpp.llama_vocab_is_eog(vocab, token)]
