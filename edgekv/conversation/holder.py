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
    """A model that holds a conversation: `edgekv.Llama`, as other rooms of the package know it."""

    input_ids: NDArray[np.intc]
    """[n_ctx]; the first n_tokens are the conversation's."""
    n_tokens: int
    n_evaluated: int
    """Tokens that went through the model since it was loaded."""
    model_path: str
    context_params: Any
    kv_overrides: dict[str, Any] | None
    adapters: Adapters
    kv_progress: Callable[[int, int], None] | None
    """Called while a prompt is read."""
    engine: Engine | None
    """None: llama.cpp's own cache holds the conversation."""
    guard: Guard
    turn: Turn
    """What else belongs to the conversation."""
    pool: Pool | None
    """Its `edgekv.Conversations`."""

    has_logits: bool
    """Whether the last token's logits are there."""

    @property
    def keeps_logits(self) -> bool:
        """Whether those of all tokens are wanted."""
        ...

    @property
    def ctx(self) -> Any:
        """The llama_context."""
        ...

    @property
    def model(self) -> Any:
        """Its llama_model."""
        ...

    @property
    def tokens(self) -> NDArray[np.int32]:
        """[n_tokens]: a copy of the conversation's."""
        ...

    def logits(self, index: int = -1) -> NDArray[np.float32]:
        """[n_vocab] of a token of the last step; they change with the next one."""
        ...

    def back_to(self, n_tokens: int) -> bool:
        """Take the conversation back to its first n_tokens. False where it cannot go."""
        ...

    def settle(self) -> None:
        """Let the cache hold the conversation's tokens, where recurrent layers have read wrong ones
        of a draft. Raises EdgeKVError.
        """
        ...

    def n_ctx(self) -> int: ...

    def n_vocab(self) -> int: ...

    def reset(self) -> None: ...

    def detokenize(self, tokens: list[int], *, special: bool = False) -> bytes: ...

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]: ...

    def stop_answer(self) -> None: ...


class Pool(Protocol):
    """Who keeps many conversations, and the states of their beginnings instead of `Checkpoints`."""

    def keep_beginning(self, llm: Holder) -> None:
        """What the conversation is now, it cannot be taken back to later."""
        ...

    def keep_end(self, llm: Holder) -> None:
        """A prompt was read to its end."""
        ...
