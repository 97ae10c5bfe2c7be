"""What says how the next token is drawn: llama.cpp's samplers, their order and their values."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

SAMPLERS = (
    *("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc"),
    *("temperature", "adaptive_p"),
)
"""llama.cpp's names, in its order."""


@dataclass(frozen=True)
class Sampling:
    """Names, defaults and meaning are llama-server's. seed: None, another one each time.

    logit_bias: token -> what is added to its logit; -inf: it is never drawn.
    """

    temperature: float = 0.8
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    adaptive_target: float = -1.0
    adaptive_decay: float = 0.9
    min_keep: int = 0
    samplers: tuple[str, ...] | None = None
    """Their order; None: llama.cpp's."""
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def settings(self, n_ctx: int) -> dict[str, Any]:
        """As the native sampler takes them. n_ctx: what a range of -1 tokens means."""
        said = asdict(self)
        for name in ("repeat_last_n", "dry_penalty_last_n"):
            said[name] = n_ctx if said[name] < 0 else min(said[name], n_ctx)
        if self.samplers is None:
            del said["samplers"]
        said["seed"] = random.getrandbits(32) if self.seed is None else self.seed % 2**32
        said["logit_bias"] = {
            str(token): False if bias == float("-inf") else bias
            for token, bias in self.logit_bias.items()
        }
        return said
