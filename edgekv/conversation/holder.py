"""The part of `edgekv.Llama` that saving, restoring and checkpoints work on.

They take this interface instead of the class, which imports them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from edgekv.conversation.guard import Guard
    from edgekv.conversation.turn import Turn
    from edgekv.engine.engine import Engine
    from edgekv.model.adapters import Adapters


class Holder(Protocol):
    """A model that holds a conversation. Names that begin with `_` are those of `Llama`."""

    input_ids: NDArray[np.intc]
    """[n_ctx]; the first n_tokens are the conversation's."""
    n_tokens: int
    model_path: str
    context_params: Any
    _model: Any
    _ctx: Any
    _requires_eval: bool
    """Whether the last token's logits are missing."""
    _logits_all: bool
    """Whether those of all tokens are wanted."""
    kv_overrides: dict[str, Any] | None
    _kv_adapters: Adapters
    kv_progress: Callable[[int, int], None] | None
    """Called while a prompt is read."""
    _kv: Engine | None
    """None: llama.cpp's own cache holds the conversation."""
    _guard: Guard
    turn: Turn
    """What else belongs to the conversation."""
    _kv_pool: Pool | None
    """Its `edgekv.conversations.Conversations`."""

    def n_ctx(self) -> int: ...

    def n_vocab(self) -> int: ...

    def reset(self) -> None: ...

    def detokenize(self, tokens: list[int], *, special: bool = False) -> bytes: ...

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]: ...

    def _kv_stop_answer(self) -> None: ...


class Pool(Protocol):
    """Who keeps many conversations, and the states of their beginnings instead of `Checkpoints`."""

    def keep_beginning(self, llm: Holder) -> None:
        """What the conversation is now, it cannot be taken back to later."""
        ...

    def keep_end(self, llm: Holder) -> None:
        """A prompt was read to its end."""
        ...
