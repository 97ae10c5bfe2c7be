"""What the worker says of an answer while it makes it, in this order."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgekv.base.stats import KVStats
from edgekv.serve.errors import ApiError


@dataclass(frozen=True)
class Counts:
    """Tokens of an answer by now, and the time they took. n_cached of the prompt's tokens were
    there; n_drafted: tokens of the n_drafts that were checked, n_right: those that were right.
    """

    n_prompt: int = 0
    n_cached: int = 0
    n_written: int = 0
    read_ms: float = 0.0
    write_ms: float = 0.0
    n_drafts: int = 0
    n_drafted: int = 0
    n_right: int = 0


@dataclass(frozen=True)
class Progress:
    """The prompt is read: n_cached of its n_total tokens were there, n_done are by now."""

    n_done: int
    n_total: int
    n_cached: int
    ms: float

    @property
    def counts(self) -> Counts:
        return Counts(self.n_done, self.n_cached, read_ms=self.ms)


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
    counts: Counts = field(default_factory=Counts, compare=False)


@dataclass(frozen=True)
class Done:
    """The answer is complete. finish: 'stop' or 'length'."""

    finish: str
    stop_text: str | None
    """The text of the request's that ended it."""
    tokens: tuple[int, ...]
    """Tokens that were written."""
    counts: Counts
    stats: KVStats
    """What the conversation's cache holds."""
    conversation: str
    """A name of it that only this answer says."""
    n_bytes_archives: int
    """Of the archives of all conversations, on disk."""
    n_decodes: int = 0
    """Calls of llama.cpp that it took."""


@dataclass(frozen=True)
class Failed:
    """There is no more."""

    error: ApiError


Event = Progress | Written | Done | Failed
