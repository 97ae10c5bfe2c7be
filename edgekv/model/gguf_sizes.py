"""Bytes of each tensor of a GGUF file, from its header alone."""

from __future__ import annotations

import math
from pathlib import Path

from edgekv.errors import BadInput
from edgekv.model.header import DAMAGE, Header, opened


def tensor_sizes(path: str | Path) -> dict[str, int]:
    """By name; of a model in several files only those of the one that is named.

    Raises BadInput for a file that cannot be read or is damaged.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        with opened(str(path)) as data:
            tensors = Header(data).tensors
        blocks = {
            name: GGML_QUANT_SIZES[GGMLQuantizationType(t.kind)] for name, t in tensors.items()
        }
    except (OSError, *DAMAGE):
        raise BadInput(f"{path} cannot be read, or it is damaged: download it again") from None
    return {
        name: math.prod(t.dims) // blocks[name][0] * blocks[name][1] for name, t in tensors.items()
    }
