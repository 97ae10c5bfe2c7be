"""Whether tokens are recalled where that is left to `auto`: by the model's contest."""

from __future__ import annotations

from edgekv.methods import Preset

ON_GPU = "nobody has measured how fast that is beside a GPU: a share of tokens asks for it"
"""The rows of a GPU are recalled on the CPU."""


def nothing_evicted(preset: Preset, compresses: bool) -> str:
    """Why nothing can be recalled, whatever was measured; else empty."""
    return "nothing is evicted" if not compresses or preset.keeps_all else ""


def why_not(preset: Preset, compresses: bool) -> str:
    """Why `auto` recalls nothing with this preset; empty where it does."""
    if why := nothing_evicted(preset, compresses):
        return why
    if not preset.measured:
        return "no contest of this model was held with these options"
    if preset.recall_gain is None:
        return "this model's contest did not try it at this ratio"
    if not preset.gains_by_recall:
        return "this model's contest found answers no nearer with it at this ratio"
    return ""
