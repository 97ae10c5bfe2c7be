"""What storing a row in a KV cache does to it: rounding to the cache type, behind a Hadamard
rotation for quantised types.

The rotation is orthonormal and its own inverse, so instead of rotating queries and outputs as
llama.cpp does, a row is rotated,
rounded and rotated back: attention over the result is the same.
"""

from __future__ import annotations

from functools import lru_cache

import gguf
import numpy as np
import torch

QUANTISED = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
ROTATION = 64  # llama.cpp rotates where the head size is a multiple of this


def round_keys(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Rows [..., d_head] as a K cache of type `kind` gives them back; K uses the largest rotation
    that divides d_head.
    """
    return _round(x, kind, _key_rotation(x.shape[-1]))


def round_values(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Rows [..., d_head] as a V cache of type `kind` gives them back; V always uses rotations of
    64.
    """
    return _round(x, kind, ROTATION)


def turned_back(k: torch.Tensor, v: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V rows [..., d_head] as a cache of type `kind` holds them, without its rotation."""
    if kind not in QUANTISED or k.shape[-1] % ROTATION:
        return k, v
    return _rotate(k, _key_rotation(k.shape[-1])), _rotate(v, ROTATION)


def round_queries(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Queries [..., d_head] as ggml's CPU attention takes them against keys of type `kind`: q8_0
    where those are quantised.

    Left out, this alone is an NMSE of 1e-4 (q8_0) to 7e-3 (q4_0) in the tiny models' logits.
    """
    return round_keys(x, "q8_0") if kind in QUANTISED else x


def _key_rotation(d_head: int) -> int:
    size = ROTATION
    while d_head % (2 * size) == 0:
        size *= 2
    return size


def _round(x: torch.Tensor, kind: str, size: int) -> torch.Tensor:
    if kind == "f32":
        return x
    if kind in ("f16", "bf16"):
        return x.to({"f16": torch.float16, "bf16": torch.bfloat16}[kind]).float()
    if x.shape[-1] % ROTATION:
        return _quantise(x, kind)
    return _rotate(_quantise(_rotate(x, size), kind), size)


def _quantise(x: torch.Tensor, kind: str) -> torch.Tensor:
    qtype = gguf.GGMLQuantizationType[kind.upper()]
    rows = np.ascontiguousarray(x.reshape(-1, x.shape[-1]).numpy())
    return torch.from_numpy(
        gguf.quants.dequantize(gguf.quants.quantize(rows, qtype), qtype)
    ).reshape(x.shape)


def _rotate(x: torch.Tensor, size: int) -> torch.Tensor:
    return (x.reshape(*x.shape[:-1], -1, size) @ hadamard(size)).reshape(x.shape)


@lru_cache
def hadamard(size: int) -> torch.Tensor:
    """The normalised Walsh-Hadamard matrix [size, size], size a power of two (Sylvester's
    construction).
    """
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5
