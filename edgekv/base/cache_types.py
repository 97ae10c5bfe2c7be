"""The types that K and V can have in a cache, by name."""

from __future__ import annotations

SCALES = {"f16": 0, "bf16": 0, "q8_0": 1, "q5_1": 2, "q5_0": 1, "q4_1": 2, "q4_0": 1, "iq4_nl": 1}
"""Name -> halves at the front of a quantised block, behind which any bits may stand."""
CACHE_TYPES = tuple(SCALES)
