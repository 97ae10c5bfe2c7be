"""Whether a model file has heads for further tokens (MTP)."""

from __future__ import annotations

from edgekv.errors import BadInput
from edgekv.model.header import header_of


def none(path: str, why: str) -> BadInput:
    """An error for a model without heads. why: there are none."""
    return BadInput(
        f"{path}: this model has no MTP heads to draft with ({why}): use --spec-type ngram-simple,"
        " or a draft model (-md)"
    )


def n_heads(path: str) -> int:
    """Heads that a model file says it has; 0 of a damaged one."""
    header = header_of(path)
    meta = header.meta if header else {}
    found = meta.get(f"{meta.get('general.architecture')}.nextn_predict_layers", 0)
    return found if isinstance(found, int) else 0


def check(path: str) -> None:
    """Raises BadInput for a model file without heads, or with several."""
    n = n_heads(path)
    if n != 1:
        raise none(path, "it has several, one behind the other" if n else "its file has none")
