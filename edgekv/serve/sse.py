"""Server-sent events."""

from __future__ import annotations

import json
from typing import Any

DONE = "data: [DONE]\n\n"
"""Ends a stream of OpenAI's."""


def event(data: dict[str, Any], name: str | None = None) -> str:
    """One event with JSON."""
    text = json.dumps(data, ensure_ascii=False)
    return f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n"
