"""The text of tokens."""

from __future__ import annotations

import ctypes
from typing import Any

from edgekv.llama_cpp import llama_cpp
from edgekv.llama_cpp.llama_tokenizer import LlamaTokenizer

USUAL = 64
"""Bytes of a token's text that nearly all have room in."""


class Tokenizer(LlamaTokenizer):
    """The parent's, which loses the text of tokens that have more than 32 bytes, such as deep
    indentation, and whose time grows with the square of the number of tokens.
    """

    def detokenize(
        self, tokens: list[int], prev_tokens: list[int] | None = None, special: bool = False
    ) -> bytes:
        text = b"".join(self._piece(token, special) for token in tokens)
        # as the parent does: some models begin a text with a space of their own
        is_begun = len(tokens) > 0 and tokens[0] == self._model.token_bos()
        return text[1:] if is_begun and text[:1] == b" " else text

    def _piece(self, token: int, special: bool, n_bytes: int = USUAL) -> bytes:
        buffer = ctypes.create_string_buffer(n_bytes)
        n = llama_cpp.llama_token_to_piece(self._model.vocab, token, buffer, n_bytes, 0, special)
        return buffer.raw[:n] if n >= 0 else self._piece(token, special, -n)


def name(model: Any, token: int) -> str:
    """What a llama_model's vocabulary calls a token: of a control token its text, such as </s>."""
    vocab = llama_cpp.llama_model_get_vocab(model)
    return str(llama_cpp.llama_vocab_get_text(vocab, token).decode())
