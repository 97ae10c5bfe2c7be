"""What a chat needs of a model that is loaded."""

from __future__ import annotations

from ctypes import c_bool
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class TextModel(Protocol):
    """`edgekv.Llama`, as far as this room knows it."""

    @property
    def model(self) -> Any:
        """A llama_model."""
        ...

    @property
    def stop_flag(self) -> c_bool:
        """Set where somebody wants that what is under way ends."""
        ...

    def logits(self, index: int = -1) -> NDArray[np.float32]: ...
    def n_ctx(self) -> int: ...
    def n_vocab(self) -> int: ...
    def token_bos(self) -> int: ...
    def token_eos(self) -> int: ...
    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]: ...
