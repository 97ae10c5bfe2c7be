"""Pieces of OpenAI's answers that several of its protocols share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgekv.serve.events import Done, Progress, TokenLogprob


def usage(done: Done) -> dict[str, Any]:
    return {
        "prompt_tokens": done.n_prompt,
        "completion_tokens": done.n_written,
        "total_tokens": done.n_prompt + done.n_written,
        "prompt_tokens_details": {"cached_tokens": done.n_cached},
    }


def timings(done: Done) -> dict[str, Any]:
    """llama-server's field of this name."""
    n_read = done.n_prompt - done.n_cached
    return {
        "cache_n": done.n_cached,
        "prompt_n": n_read,
        "prompt_ms": round(done.read_ms, 3),
        "prompt_per_second": _rate(n_read, done.read_ms),
        "predicted_n": done.n_written,
        "predicted_ms": round(done.write_ms, 3),
        "predicted_per_second": _rate(done.n_written, done.write_ms),
    }


def cache(done: Done) -> dict[str, Any]:
    """edgekv's own field `kv`: what the conversation's cache takes, and would take in full."""
    kept = done.cache
    return {
        "method": kept.method,
        "bytes": kept.n_bytes,
        "bytes_full": kept.n_bytes_full,
        "conversation": kept.conversation,
    }


def progress(now: Progress) -> dict[str, Any]:
    """llama-server's `prompt_progress`."""
    return {
        "total": now.n_total,
        "cache": now.n_cached,
        "processed": now.n_done,
        "time_ms": round(now.ms),
    }


def chat_logprobs(logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
    """A choice's `logprobs` in a chat."""
    if not logprobs:
        return None
    return {"content": [with_rivals(one) for one in logprobs], "refusal": None}


def with_rivals(one: TokenLogprob) -> dict[str, Any]:
    """A token's entry; `id` is llama-server's addition."""
    rivals = [_token(*rival) for rival in one.top]
    return {**_token(one.token, one.data, one.logprob), "top_logprobs": rivals}


def _token(token: int, data: bytes, logprob: float) -> dict[str, Any]:
    return {"id": token, "token": text(data), "logprob": logprob, "bytes": list(data)}


def text(data: bytes) -> str:
    """Of one token, which may be a part of a character."""
    return data.decode("utf-8", "replace")


def _rate(n: int, ms: float) -> float | None:
    return round(1e3 * n / ms, 3) if ms > 0 else None
