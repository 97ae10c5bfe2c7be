"""Numbers that several rooms take where nobody says others, and llama.cpp's unit of a context."""

from __future__ import annotations

SINK = 4
"""First tokens that always stay."""
WINDOW = 32
"""Last tokens that always stay, and whose attention is observed."""
MIN_TOKENS = 128
"""A ratio never keeps fewer tokens."""
TAIL = 512
"""New tokens that a layer holds before it is compressed again."""
N_UBATCH = 512
"""Tokens of a prompt that are computed at once, as in llama.cpp."""

CTX_STEP = 256
"""llama.cpp rounds contexts up to a multiple of it; the bindings' own arrays must be as long."""


def whole_ctx(n_tokens: int) -> int:
    """The context that llama.cpp makes for n_tokens."""
    return -(-n_tokens // CTX_STEP) * CTX_STEP
