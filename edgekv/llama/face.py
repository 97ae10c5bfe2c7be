"""What other rooms of the package know of a loaded model, besides its parent's public names."""

from __future__ import annotations

from ctypes import c_bool
from typing import Any

import numpy as np
from numpy.typing import NDArray

import edgekv.llama_cpp as llama_cpp
from edgekv import native
from edgekv.choice.settings import Settings
from edgekv.conversation.guard import Guard
from edgekv.conversation.turn import Turn
from edgekv.engine.engine import Engine
from edgekv.errors import EdgeKVError
from edgekv.llama.draft_model import DraftModel
from edgekv.llama.mtp import MtpHeads
from edgekv.model.adapters import Adapters


class Face(llama_cpp.Llama):
    """A model and its conversation; see `edgekv.conversation.holder`. Not for users."""

    engine: Engine | None
    """Drives the store; None: llama.cpp's own cache holds the conversation."""
    settings: Settings
    """What the options of the cache mean for this model."""
    guard: Guard
    """Who may use the model now."""
    turn: Turn
    """What belongs to the conversation, apart from its tokens and the store's rows."""
    pool: Any
    """The model's `edgekv.Conversations`, or None."""
    adapters: Adapters
    """Its LoRA adapters."""
    n_tokens: int
    """Tokens of the conversation."""
    draft: DraftModel | MtpHeads | None
    """Guesses what it writes next."""
    _kv_stop: c_bool

    @property
    def has_logits(self) -> bool:
        """Whether the last token's logits are there."""
        return not self._requires_eval

    @has_logits.setter
    def has_logits(self, has_logits: bool) -> None:
        self._requires_eval = not has_logits

    @property
    def keeps_logits(self) -> bool:
        """Whether those of all tokens are wanted."""
        return bool(self._logits_all)

    @property
    def stop_flag(self) -> c_bool:
        """Set by `kv_cancel`: what is under way ends."""
        return self._kv_stop

    @property
    def tokens(self) -> NDArray[np.int32]:
        """[n_tokens]: a copy of the conversation's."""
        return self.input_ids[: self.n_tokens].astype(np.int32)

    def logits(self, index: int = -1) -> NDArray[np.float32]:
        """[n_vocab] of a token of the last step, usually of the last one; they change with the next
        step. Raises EdgeKVError where there was no step.
        """
        found = native.logits(self.ctx, self.n_vocab(), index)
        if found is None:
            raise EdgeKVError("there are no logits yet: evaluate a token first")
        return found

    def back_to(self, n_tokens: int) -> bool:
        """Take the conversation and its cache back to its first n_tokens. False where the cache
        cannot go; all is as before then.
        """
        if n_tokens == self.n_tokens:
            return True
        if not native.take_back(self.ctx, n_tokens):
            return False
        self.n_tokens, self._requires_eval = n_tokens, True
        return True
