"""Pieces of OpenAI's answers that several of its protocols share."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Sequence
from typing import Any

from edgekv.serve.events import Done, Progress, TokenLogprob
from edgekv.version import __version__

FINGERPRINT = f"b-edgekv-{__version__}"
"""What wrote an answer. llama-server's begins with a b, too."""


def head(prefix: str, kind: str, model: str) -> dict[str, Any]:
    """What stands in front of an answer, and of each chunk of it. prefix: of its id."""
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": FINGERPRINT,
    }


def usage(dones: Sequence[Done], n: int = 1) -> dict[str, Any]:
    """Of answers of which n each share a prompt, which counts once."""
    n_prompt = sum(done.progress.n_prompt for done in dones[::n])
    n_written = sum(done.progress.n_written for done in dones)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_written,
        "total_tokens": n_prompt + n_written,
        "prompt_tokens_details": {
            "cached_tokens": sum(done.progress.n_cached for done in dones[::n])
        },
    }


def timings(now: Progress) -> dict[str, Any]:
    """llama-server's field. The first token takes no time: the prompt's logits gave it."""
    n_read, n_steps = now.n_read - now.n_cached, max(now.n_written - 1, 0)
    read_ms, write_ms = round(now.read_ms, 3), round(now.write_ms, 3)
    drafts = {"draft_n": now.n_drafted, "draft_n_accepted": now.n_right}
    return {
        "cache_n": now.n_cached,
        "prompt_n": n_read,
        "prompt_ms": read_ms,
        "prompt_per_token_ms": _ratio(read_ms, n_read),
        "prompt_per_second": _ratio(1e3 * n_read, read_ms),
        "predicted_n": now.n_written,
        "predicted_ms": write_ms,
        "predicted_per_token_ms": _ratio(write_ms, n_steps),
        "predicted_per_second": _ratio(1e3 * n_steps, write_ms),
        **(drafts if now.n_drafts else {}),
    }


def input_tokens(n: int) -> dict[str, Any]:
    """llama-server's answer where a prompt's tokens are counted."""
    return {"object": "response.input_tokens", "input_tokens": n}


def cache(done: Done) -> dict[str, Any]:
    """edgekv's own field `kv`: what the conversation's cache takes, and would take in full."""
    kept = done.stats
    archive = {"bytes_archive": kept.n_bytes_archive} if kept.n_bytes_archive else {}
    if kept.n_bytes_index:
        archive |= {"bytes_index": kept.n_bytes_index, "bytes_recalled": kept.n_bytes_recalled}
    return {
        "method": kept.method,
        "bytes": kept.n_bytes_used,
        "bytes_full": kept.n_bytes_full,
        **archive,
        "conversation": done.conversation,
    }


def progress(now: Progress) -> dict[str, Any]:
    """llama-server's `prompt_progress`."""
    return {
        "total": now.n_prompt,
        "cache": now.n_cached,
        "processed": now.n_read,
        "time_ms": round(now.read_ms),
    }


def chat_logprobs(logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
    """A choice's `logprobs` in a chat."""
    if not logprobs:
        return None
    return {"content": [with_rivals(one) for one in logprobs], "refusal": None}


def with_rivals(one: TokenLogprob) -> dict[str, Any]:
    """A token's entry; `id` is llama-server's addition, and what stands behind the samplers."""
    rivals = [_token(*rival, one.is_drawn) for rival in one.top]
    own = _token(one.token, one.data, one.logprob, one.is_drawn)
    return {**own, "top_probs" if one.is_drawn else "top_logprobs": rivals}


def _token(token: int, data: bytes, logprob: float, is_drawn: bool) -> dict[str, Any]:
    value = {"prob": min(math.exp(logprob), 1.0)} if is_drawn else {"logprob": logprob}
    return {"id": token, "token": text(data), **value, "bytes": list(data)}


def text(data: bytes) -> str:
    """The bytes of one token, which may be a part of a character."""
    return data.decode("utf-8", "replace")


def _ratio(one: float, other: float) -> float:
    return one / other if other > 0 else 0.0
