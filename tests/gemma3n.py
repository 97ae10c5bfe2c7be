"""Tiny GGUF models of Gemma 3n, which upstream's test-llama-archs leaves out: hidden states of four
streams, and layers behind the twentieth that read the K and V of the last ones before it.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from tests import models

N_EMBD, N_FF, N_LAYER, N_HEAD, N_HEAD_KV, D_HEAD, N_WINDOW = 64, 96, 25, 4, 2, 32, 32
N_STREAM, D_PER_LAYER, RANK = 4, 256, 64
"""As llama.cpp has them, whatever the file says."""


def write(path: Path) -> Path:
    """Write the model to `path`. Every fifth layer attends to everything."""
    rng = np.random.default_rng(3)

    def matrix(*sizes: int, gain: float = 1.0) -> np.ndarray:
        return (rng.standard_normal(sizes) * gain / np.sqrt(sizes[-1])).astype(np.float32)

    def norm(n: int, gain: float = 1.0) -> np.ndarray:
        return (gain * (1 + 0.1 * rng.standard_normal(n))).astype(np.float32)

    writer = gguf.GGUFWriter(str(path), "gemma3n")
    writer.add_context_length(4096)
    writer.add_embedding_length(N_EMBD)
    writer.add_feed_forward_length(N_FF)
    writer.add_block_count(N_LAYER)
    writer.add_head_count(N_HEAD)
    writer.add_head_count_kv(N_HEAD_KV)
    writer.add_key_length(D_HEAD)
    writer.add_value_length(D_HEAD)
    writer.add_rope_dimension_count(D_HEAD)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_sliding_window(N_WINDOW)
    writer.add_sliding_window_pattern([il % 5 != 4 for il in range(N_LAYER)])
    writer.add_vocab_size(models.N_VOCAB)
    models.add_tokenizer(writer)
    tensors = {
        "token_embd.weight": matrix(models.N_VOCAB, N_EMBD),
        "output_norm.weight": norm(N_EMBD),
        "altup_proj.weight": matrix(N_STREAM - 1, N_EMBD, N_EMBD),
        "altup_unembd_proj.weight": matrix(N_STREAM - 1, N_EMBD, N_EMBD),
        "per_layer_token_embd.weight": matrix(models.N_VOCAB, D_PER_LAYER * N_LAYER),
        "per_layer_model_proj.weight": matrix(D_PER_LAYER * N_LAYER, N_EMBD),
        "per_layer_proj_norm.weight": norm(D_PER_LAYER),
    }
    for il in range(N_LAYER):
        parts = {
            "attn_norm.weight": norm(N_EMBD),
            "attn_q.weight": matrix(N_HEAD * D_HEAD, N_EMBD),
            "attn_k.weight": matrix(N_HEAD_KV * D_HEAD, N_EMBD),
            "attn_v.weight": matrix(N_HEAD_KV * D_HEAD, N_EMBD),
            "attn_output.weight": matrix(N_EMBD, N_HEAD * D_HEAD),
            "attn_q_norm.weight": norm(D_HEAD, 1 / np.sqrt(D_HEAD)),  # scores are not scaled
            "attn_k_norm.weight": norm(D_HEAD),
            "post_attention_norm.weight": norm(N_EMBD, 0.25),
            "ffn_norm.weight": norm(N_EMBD),
            "ffn_gate.weight": matrix(N_FF, N_EMBD),
            "ffn_up.weight": matrix(N_FF, N_EMBD),
            "ffn_down.weight": matrix(N_EMBD, N_FF),
            "post_ffw_norm.weight": norm(N_EMBD, 0.25),
            "inp_gate.weight": matrix(D_PER_LAYER, N_EMBD),
            "proj.weight": matrix(N_EMBD, D_PER_LAYER),
            "post_norm.weight": norm(N_EMBD, 0.25),
            "altup_correct_coef.weight": matrix(N_STREAM, N_STREAM, gain=0.1),
            "altup_correct_scale.weight": norm(N_EMBD),
            "altup_predict_coef.weight": matrix(N_STREAM**2, N_STREAM, gain=0.1),
            "altup_router.weight": matrix(N_STREAM, N_EMBD),
            "altup_router_norm.weight": norm(N_EMBD),
            "laurel_l.weight": matrix(RANK, N_EMBD),
            "laurel_r.weight": matrix(N_EMBD, RANK),
            "laurel_post_norm.weight": norm(N_EMBD, 0.25),
        }
        tensors |= {f"blk.{il}.{name}": data for name, data in parts.items()}
    for name, data in tensors.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
