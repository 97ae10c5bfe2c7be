"""What a chat needs of a model that is loaded."""

from __future__ import annotations

from typing import Any, Protocol


class TextModel(Protocol):
    """`edgekv.Llama`, as far as this room knows it."""

    _model: Any
    _ctx: Any

    def n_ctx(self) -> int: ...
    def n_vocab(self) -> int: ...
    def token_bos(self) -> int: ...
    def token_eos(self) -> int: ...
    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]: ...
