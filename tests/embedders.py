"""Tiny models that write no text, or not as others do: an embedding Llama, T5 and its encoder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np

from tests import models

N_BUCKETS = 8
SHAPES = {
    name: replace(models.SHAPES["llama-mha"], arch=name, n_layer=2)
    for name in ("llama-embed", "t5", "t5encoder")
}


def write(name: str, folder: Path) -> Path:
    """Write the model `name` of SHAPES into `folder` and return its path."""
    shape, path = SHAPES[name], folder / f"{name}.gguf"
    writer = gguf.GGUFWriter(str(path), shape.arch)
    models._add_hyperparameters(writer, shape)
    models.add_tokenizer(writer)
    if name != "llama-embed":
        writer.add_relative_attn_buckets_count(N_BUCKETS)
    for tensor, data in models.tensors(shape) if name == "llama-embed" else _t5(name):
        writer.add_tensor(tensor, data)
    models.finish(writer)
    return path


def _t5(name: str) -> list[tuple[str, np.ndarray]]:
    """Tensors of T5, or of its encoder alone, by name."""
    shape = SHAPES[name]
    n, n_qkv, rng = shape.n_embd, shape.n_head * shape.d_head, np.random.default_rng(1)

    def matrix(n_out: int, n_in: int) -> np.ndarray:
        return (rng.standard_normal((n_out, n_in)) / np.sqrt(n_in)).astype(np.float32)

    def attention(prefix: str) -> list[tuple[str, np.ndarray]]:
        return [
            (f"{prefix}_norm.weight", np.ones(n, np.float32)),
            *((f"{prefix}_{part}.weight", matrix(n_qkv, n)) for part in "qkv"),
            (f"{prefix}_o.weight", matrix(n, n_qkv)),
        ]

    found = [("token_embd.weight", matrix(models.N_VOCAB, n))]
    for side in ("enc", "dec") if name == "t5" else ("enc",):
        found.append((f"{side}.output_norm.weight", np.ones(n, np.float32)))
        for il in range(shape.n_layer):
            block = f"{side}.blk.{il}"
            found += attention(f"{block}.attn")
            found.append((f"{block}.attn_rel_b.weight", matrix(N_BUCKETS, shape.n_head)))
            if side == "dec":
                found += attention(f"{block}.cross_attn")
            found += [
                (f"{block}.ffn_norm.weight", np.ones(n, np.float32)),
                (f"{block}.ffn_up.weight", matrix(shape.n_ff, n)),
                (f"{block}.ffn_down.weight", matrix(n, shape.n_ff)),
            ]
    return found
