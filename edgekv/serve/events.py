"""What the worker says of an answer while it makes it, in this order."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgekv.base.stats import KVStats
from edgekv.serve.errors import ApiError


@dataclass
class Progress:
    """How far an answer is, and the time it took; an event of its own while the prompt is read.

    n_read of the n_prompt tokens of its prompt are there, n_cached of them without being read;
    n_drafted: tokens of the n_drafts that were checked, n_right: those that were right.
    """

    n_prompt: int = 0
    n_read: int = 0
    n_cached: int = 0
    n_written: int = 0
    read_ms: float = 0.0
    write_ms: float = 0.0
    n_drafts: int = 0
    n_drafted: int = 0
    n_right: int = 0


@dataclass(frozen=True)
class TokenLogprob:
    """One written token with its likeliest rivals: (token, its bytes, natural log)."""

    token: int
    data: bytes
    logprob: float
    top: tuple[tuple[int, bytes, float], ...] = ()
    is_drawn: bool = False
    """Behind the samplers."""


@dataclass(frozen=True)
class Written:
    """Text that is certain by now, and the tokens that it took."""

    text: str
    logprobs: list[TokenLogprob] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    progress: Progress = field(default_factory=Progress, compare=False)


@dataclass(frozen=True)
class Done:
    """The answer is complete. finish: 'stop' or 'length'."""

    finish: str
    stop_text: str | None
    """The text of the request's that ended it."""
    tokens: tuple[int, ...]
    """Tokens that were written."""
    progress: Progress
    stats: KVStats
    """What the conversation's cache holds."""
    conversation: str
    """A name of it that only this answer says."""
    n_bytes_archives: int
    """Of the archives of all conversations, on disk."""
    n_decodes: int = 0
    """Calls of llama.cpp that it took."""


Event = Progress | Written | Done | ApiError
"""An error is the last one: there is no more."""
