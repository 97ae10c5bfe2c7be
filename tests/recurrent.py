"""A tiny GGUF model without a KV cache (mamba): what edgekv must leave alone."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from tests import models

N_LAYER, N_EMBD, D_CONV, D_STATE, DT_RANK = 2, 64, 4, 8, 4
D_INNER = 2 * N_EMBD


def write(path: Path) -> Path:
    """Write the model to `path`."""
    rng = np.random.default_rng(1)

    def matrix(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    writer = gguf.GGUFWriter(str(path), "mamba")
    writer.add_context_length(4096)
    writer.add_embedding_length(N_EMBD)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(N_LAYER)
    writer.add_ssm_conv_kernel(D_CONV)
    writer.add_ssm_inner_size(D_INNER)
    writer.add_ssm_state_size(D_STATE)
    writer.add_ssm_time_step_rank(DT_RANK)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(models.N_VOCAB)
    models.add_tokenizer(writer)
    writer.add_tensor("token_embd.weight", matrix(models.N_VOCAB, N_EMBD))
    writer.add_tensor("output_norm.weight", np.ones(N_EMBD, np.float32))
    for il in range(N_LAYER):
        parts = {
            "attn_norm.weight": np.ones(N_EMBD, np.float32),
            "ssm_in.weight": matrix(2 * D_INNER, N_EMBD),
            "ssm_conv1d.weight": matrix(D_INNER, D_CONV),
            "ssm_conv1d.bias": np.zeros(D_INNER, np.float32),
            "ssm_x.weight": matrix(DT_RANK + 2 * D_STATE, D_INNER),
            "ssm_dt.weight": matrix(D_INNER, DT_RANK),
            "ssm_dt.bias": np.zeros(D_INNER, np.float32),
            "ssm_a": -np.ones((D_INNER, D_STATE), np.float32),
            "ssm_d": np.ones(D_INNER, np.float32),
            "ssm_out.weight": matrix(N_EMBD, D_INNER),
        }
        for part, data in parts.items():
            writer.add_tensor(f"blk.{il}.{part}", data)
    models.finish(writer)
    return path
