"""What a model knows of one conversation, apart from its tokens and what the engine knows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from edgekv.conversation.hidden import HiddenStates


@dataclass
class Turn:
    """The prompt that is read and the answer that is written. A model has one at a time; a
    conversation that waits takes its own along, as a whole.
    """

    checkpoints: Any
    """`edgekv.conversation.checkpoints.Checkpoints`, which import what a model is."""
    parts: list[str] = field(default_factory=list)
    """Texts of the next prompt behind which it is cut."""
    cuts: list[int] = field(default_factory=list)
    """The same as numbers of tokens."""
    prompt: Any = None
    """The chat's prompt whose answer is written."""
    answer: object = None
    """Tells the answer under way from an older one."""
    sampler: Any = None
    """The answer's."""
    drafts: Any = None
    """What may follow in it."""
    kept: tuple[int, Any] | None = None
    """Tokens before the last draft was checked, and the state that recurrent layers had there; None
    for the state where the store has kept it.
    """
    hidden: HiddenStates | None = None
    """Those of its last tokens, where the model has heads that take them."""
    prefill_ms: float = 0.0
    """What reading the last prompt took."""
    stage_ms: dict[str, float] = field(default_factory=dict)
    """What compressing took of that; empty if nothing was compressed."""

    def fresh(self) -> Turn:
        """The turn of a conversation that begins now."""
        return Turn(self.checkpoints.fresh())
