"""How long a model stays loaded without a request, as Ollama writes it."""

from __future__ import annotations

import re

from edgekv.errors import BadInput

UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600}
_PART = re.compile(r"(\d+\.?\d*)(ns|us|µs|ms|s|m|h)")
_DURATION = re.compile(rf"-?(?:{_PART.pattern})+|-?\d+\.?\d*")


def seconds(keep_alive: float | str) -> float:
    """Of seconds, or of a duration as Go writes it; infinite for less than nothing.

    Raises BadInput for what is neither.
    """
    text = str(keep_alive).strip()
    if not _DURATION.fullmatch(text):
        raise BadInput(f"{text!r:.40} is no duration: give seconds, '5m' or '1h30m'")
    if text.startswith("-"):
        return float("inf")
    parts = _PART.findall(text)
    return sum(float(n) * UNITS_S[unit] for n, unit in parts) if parts else float(text)
