"""What is known of the quality at a point: only what docs/methods.md has measured, for the model it was measured on.

The numbers stand in both places because the page is not installed with the package; tests/test_fit.py compares them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


LENGTHS = (2000, 4000)


@dataclass(frozen=True)
class Needles:
    """Needles found in texts of LENGTHS tokens, `cases` of each, the question asked after the text was compressed; cache: type of K and V."""

    model: str
    method: str
    row: str  # what the table of docs/methods.md calls the method
    ratio: float
    found: tuple[int, ...]
    cases: int = 50
    cache: str = "f16"

    def __str__(self) -> str:
        found = ", ".join(f"{n} of {self.cases} in {length:,} tokens" for n, length in zip(self.found, LENGTHS))
        return f"needles found: {found} ({self.method}, {self.cache} cache, asked after the text was compressed; docs/methods.md)"


DEMO = "SmolLM2-135M-Instruct.Q4_1.gguf"
KEYDIFF = "score=keydiff,budget=profile"
MEASURED = (
    *(Needles(DEMO, "auto", "auto", ratio, found, 30, "q8_0") for ratio, found in ((0.5, (30, 28)), (0.2, (29, 28)), (0.1, (30, 28)), (0.05, (29, 26)))),
    *(Needles(DEMO, "edgekv", "edgekv", ratio, found, cases=30) for ratio, found in ((0.2, (30, 26)), (0.1, (30, 26)), (0.05, (26, 17)))),
    *(Needles(DEMO, "kvzap", "kvzap", ratio, found) for ratio, found in ((0.2, (49, 45)), (0.1, (47, 38)), (0.05, (41, 23)))),
    *(Needles(DEMO, KEYDIFF, KEYDIFF, ratio, found) for ratio, found in ((0.5, (50, 47)), (0.2, (50, 44)), (0.1, (31, 17)), (0.05, (14, 6)))),
    *(Needles(DEMO, "lukv", "lukv", ratio, found) for ratio, found in ((0.5, (46, 46)), (0.2, (25, 19)), (0.1, (7, 5)), (0.05, (2, 0)))),
    *(Needles(DEMO, "snapkv", "snapkv", ratio, found) for ratio, found in ((0.5, (6, 5)), (0.2, (1, 0)), (0.1, (1, 0)), (0.05, (1, 0)))),
)
NOT_MEASURED = "not measured"


def known(model_path: str, method: str, ratio: float, type_k: str, type_v: str) -> str:
    """One line: what was measured at this point, or that nothing was."""
    if ratio >= 1:
        return "all rows are kept" if (type_k, type_v) == ("f16", "f16") else f"all rows are kept; what the {type_k}/{type_v} cache costs: {NOT_MEASURED}"
    name = Path(model_path).resolve().name
    for x in MEASURED:
        if (x.model, x.method, x.ratio) == (name, method, ratio) and (type_k, type_v) == (x.cache, x.cache):
            return str(x)
    return f"{NOT_MEASURED} for this model, method, ratio and cache type ('edgekv eval' measures it)"
