"""Tiny GGUF models with latent attention (MLA): many query heads on one KV head, whose V is the
beginning of its K. Those of upstream's test-llama-archs have a single query head.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from tests import models

N_EMBD, N_FF, N_LAYER, D_PLAIN, D_V, RANK_Q = 64, 96, 3, 32, 24, 48


def write(
    path: Path, arch: str = "deepseek2", n_head: int = 4, d_latent: int = 64, d_rope: int = 32
) -> Path:
    """Write the model to `path`: keys of d_latent + d_rope values. mistral4: later queries are
    longer.
    """
    rng = np.random.default_rng(3)

    def matrix(*sizes: int, gain: float = 1.0) -> np.ndarray:
        return (rng.standard_normal(sizes) * gain / np.sqrt(sizes[-1])).astype(np.float32)

    def norm(n: int) -> np.ndarray:
        return (1 + 0.1 * rng.standard_normal(n)).astype(np.float32)

    d_k = D_PLAIN + d_rope
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_context_length(4096)
    writer.add_embedding_length(N_EMBD)
    writer.add_feed_forward_length(N_FF)
    writer.add_block_count(N_LAYER)
    writer.add_leading_dense_block_count(N_LAYER)
    writer.add_expert_feed_forward_length(N_FF)
    writer.add_expert_shared_count(1)
    writer.add_head_count(n_head)
    writer.add_head_count_kv(1)
    writer.add_key_length(d_latent + d_rope)
    writer.add_value_length(d_latent)
    writer.add_key_length_mla(d_k)
    writer.add_value_length_mla(D_V)
    writer.add_q_lora_rank(RANK_Q)
    writer.add_kv_lora_rank(d_latent)
    writer.add_rope_dimension_count(d_rope)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(models.N_VOCAB)
    if arch == "mistral4":
        writer.add_attn_temperature_scale(0.1)
        writer.add_uint32(f"{arch}.attention.temperature_length", 50)
    models.add_tokenizer(writer)
    tensors = {
        "token_embd.weight": matrix(models.N_VOCAB, N_EMBD),
        "output_norm.weight": norm(N_EMBD),
    }
    for il in range(N_LAYER):
        parts = {
            "attn_norm.weight": norm(N_EMBD),
            "attn_q_a.weight": matrix(RANK_Q, N_EMBD),
            "attn_q_a_norm.weight": norm(RANK_Q),
            "attn_q_b.weight": matrix(n_head * d_k, RANK_Q, gain=2),
            "attn_kv_a_mqa.weight": matrix(d_latent + d_rope, N_EMBD),
            "attn_kv_a_norm.weight": norm(d_latent),
            "attn_k_b.weight": matrix(n_head, D_PLAIN, d_latent).swapaxes(1, 2).copy(),
            "attn_v_b.weight": matrix(n_head, D_V, d_latent),
            "attn_output.weight": matrix(N_EMBD, n_head * D_V),
            "ffn_norm.weight": norm(N_EMBD),
            "ffn_gate.weight": matrix(N_FF, N_EMBD),
            "ffn_up.weight": matrix(N_FF, N_EMBD),
            "ffn_down.weight": matrix(N_EMBD, N_FF),
        }
        tensors |= {f"blk.{il}.{name}": data for name, data in parts.items()}
    for name, data in tensors.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
