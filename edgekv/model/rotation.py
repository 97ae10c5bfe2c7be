"""rotation: what llama.cpp multiplies the rows of a quantised cache by, and how to take it back.

Values of a quantised K or V go into the cache times a Walsh-Hadamard matrix, block by block, which
spreads outliers; queries and outputs are turned to match. The matrix is its own inverse. Sizes as
in upstream's llama-kv-cache.cpp; LLAMA_ATTN_ROT_DISABLE switches it off there.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from edgekv.native import LayerInfo

LEAST = 64
"""Size of the smallest matrix, and of V's."""
FLOATS = (0, 1, 30)
"""ggml's numbers of f32, f16 and bf16, which are stored as they are."""


def blocks(layer: LayerInfo) -> tuple[int, int]:
    """Sizes of the matrices that K and V of a layer are multiplied by; 0: stored as they are, as
    latent attention's are in any case.
    """
    if layer.v_in_k:
        return 0, 0
    k, v = (
        kind not in FLOATS and d > 0 and d % LEAST == 0 and not _disabled()
        for kind, d in ((layer.type_k, layer.d_k), (layer.type_v, layer.d_v))
    )
    return (layer.d_k & -layer.d_k if k else 0), (LEAST if v else 0)


def undo(rows: NDArray[np.float32], size: int) -> NDArray[np.float32]:
    """rows [n, d] before their blocks of `size` were turned (0: they were not)."""
    return (rows.reshape(-1, size) @ _hadamard(size)).reshape(rows.shape) if size else rows


@lru_cache
def _hadamard(size: int) -> NDArray[np.float32]:
    found: NDArray[np.float64] = np.ones((1, 1))
    while len(found) < size:
        found = np.block([[found, found], [found, -found]])
    return (found / np.sqrt(size)).astype(np.float32)


def _disabled() -> bool:
    text = os.environ.get("LLAMA_ATTN_ROT_DISABLE", "").strip()
    return text.lstrip("+-").isdigit() and int(text) != 0
