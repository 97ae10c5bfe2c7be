"""What `edgekv eval` measured of a model on this machine, in words for `edgekv fit`."""

from __future__ import annotations

from edgekv.commands import lab

NOT_MEASURED = "not measured on this model"


def known(model_path: str, method: str, ratio: float, type_k: str, type_v: str) -> str:
    """One line: what was measured of the model at this point, or that nothing was."""
    if ratio >= 1:
        if (type_k, type_v) == ("f16", "f16"):
            return "all tokens are kept"
        return f"all tokens are kept; what the {type_k}/{type_v} cache costs: {NOT_MEASURED}"
    results = lab.part("eval.results")
    found = results.lines(model_path, method, ratio, type_k, type_v) if results else []
    return "; ".join(found) or f"{NOT_MEASURED} ('edgekv eval' measures it)"
