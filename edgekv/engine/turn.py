"""What an engine knows of one conversation, apart from the store's rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgekv import native
from edgekv.base.stats import StageClock
from edgekv.engine.past import Past


@dataclass
class EngineTurn:
    """A conversation and its last prompt; one that waits takes its own along, as a whole."""

    past: Past
    clock: StageClock = field(default_factory=StageClock)
    """What compressing the last prompt took."""
    hidden: str = ""
    """Where hidden states of the last prompt waited, as `--kv-hidden`; empty: none was read."""
    excess: tuple[int, int] | None = None
    """Bytes at the last prompt's peak and of its full f16 cache, if that is less."""
    working: int = 0
    """The most that the centroid merge worked with, in bytes, since the conversation began."""
    hidden_states: NDArray[np.float32] | None = None
    """[n, n_embd] of the last prompt's last tokens, see `native.Prefill.hidden`."""
    reading: native.Prefill | None = None
    """The prompt that is being read."""
    lost_archive: bool = False
    """Somebody has been told that the conversation has no archive any more."""
