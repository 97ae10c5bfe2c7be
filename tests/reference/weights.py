"""Reads a GGUF file into torch: hyper-parameters and dequantised float32 tensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch


@dataclass(frozen=True)
class Weights:
    """One model. `tensors` are float32 [n_out, n_in] or [n] by their GGUF name; `swa` says which
    layers slide.
    """

    arch: str
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    d_head: int
    eps: float
    freq_base: float
    freq_base_swa: float
    n_swa: int
    swa: tuple[bool, ...]
    tensors: dict[str, torch.Tensor]

    def get(self, il: int, part: str) -> torch.Tensor | None:
        """The layer's tensor `blk.<il>.<part>`, or None where the architecture has none."""
        return self.tensors.get(f"blk.{il}.{part}")


def load(path: Path | str) -> Weights:
    """Read and dequantise the whole file (float32: 4 bytes per weight of memory)."""
    reader = gguf.GGUFReader(str(path))
    arch = reader.fields["general.architecture"].contents()

    def value(key: str, default=None):
        field = reader.fields.get(f"{arch}.{key}")
        return default if field is None else field.contents()

    n_layer = value("block_count")
    n_embd = value("embedding_length")
    n_head = value("attention.head_count")
    n_swa = value("attention.sliding_window", 0)
    return Weights(
        arch=arch,
        n_layer=n_layer,
        n_embd=n_embd,
        n_head=n_head,
        n_head_kv=value("attention.head_count_kv", n_head),
        d_head=value("attention.key_length", n_embd // n_head),
        eps=value("attention.layer_norm_rms_epsilon"),
        freq_base=value("rope.freq_base", 10000.0),
        freq_base_swa=value("rope.freq_base_swa", 10000.0),
        n_swa=n_swa,
        swa=tuple(value("attention.sliding_window_pattern")) if n_swa else (False,) * n_layer,
        tensors={tensor.name: _dequantise(tensor) for tensor in reader.tensors},
    )


def _dequantise(tensor: gguf.ReaderTensor) -> torch.Tensor:
    data = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    return torch.from_numpy(np.array(data, dtype=np.float32))
