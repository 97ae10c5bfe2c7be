"""Server-sent events."""

from __future__ import annotations

from typing import Any

from edgekv.serve.encoding import as_json

DONE = "data: [DONE]\n\n"
"""Ends a stream of OpenAI's."""


def event(data: dict[str, Any], name: str | None = None) -> str:
    """One event with JSON."""
    text = as_json(data)
    return f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n"
