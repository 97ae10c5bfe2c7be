"""What is known of the quality at a point: only what docs/methods.md has measured, for the model it was measured on.

The numbers stand in both places because the page is not installed with the package; tests/test_fit.py compares them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Needles:
    """Needles found in a text of n_tokens, the question asked after it was compressed; f16 cache."""

    model: str
    method: str
    ratio: float
    n_tokens: int
    found: int
    cases: int

    def __str__(self) -> str:
        return (f"{self.found} of {self.cases} needles found in {self.n_tokens:,} tokens ({self.method}, f16 cache, asked after the text was compressed; "
                "docs/methods.md)")


DEMO = "SmolLM2-135M-Instruct.Q4_1.gguf"
PROFILE = "score=keydiff,budget=profile"
MEASURED = (
    Needles(DEMO, PROFILE, 0.2, 1539, 20, 20),
    Needles(DEMO, PROFILE, 0.1, 1537, 8, 12),
    Needles(DEMO, "snapkv", 0.2, 1539, 0, 20),
)
NOT_MEASURED = "not measured"


def known(model_path: str, method: str, ratio: float, type_k: str, type_v: str) -> str:
    """One line: what was measured at this point, or that nothing was."""
    if ratio >= 1:
        return "all rows are kept" if (type_k, type_v) == ("f16", "f16") else f"all rows are kept; what the {type_k}/{type_v} cache costs: {NOT_MEASURED}"
    name = Path(model_path).resolve().name
    for x in MEASURED:
        if (x.model, x.method, x.ratio) == (name, method, ratio) and (type_k, type_v) == ("f16", "f16"):
            return str(x)
    return f"{NOT_MEASURED} for this model, method, ratio and cache type ('edgekv eval' measures it)"
