"""The texts that come with edgekv, which profiles and contests are made with."""

from __future__ import annotations

from pathlib import Path

TEXTS = Path(__file__).parent.parent / "data" / "calibration"


def named_texts() -> dict[str, str]:
    """By name, 500 to 1,100 words each: prose, talk, instructions, figures, records and code."""
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(TEXTS.glob("*.txt"))}
