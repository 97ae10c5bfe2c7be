"""Tiny GGUF models of Gemma 4, which upstream's test-llama-archs leaves out: heads of two sizes, V
that is K where its weights are missing, and layers that read the K and V of earlier ones.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from tests import models

N_EMBD, N_FF, N_HEAD, D_FULL, D_WINDOW, D_PER_LAYER, N_WINDOW = 64, 96, 4, 64, 32, 8, 32


def write(path: Path, n_layer: int = 6, n_shared: int = 0, per_layer: bool = False) -> Path:
    """Write the model to `path`. Every third layer attends to everything.

    n_shared: last layers without K and V; per_layer: an embedding of the token in every layer.
    """
    rng = np.random.default_rng(3)
    windows = [il % 3 != 2 for il in range(n_layer)]
    heads = [2 if window else 1 for window in windows]

    def matrix(n_out: int, n_in: int, gain: float = 1.0) -> np.ndarray:
        return (rng.standard_normal((n_out, n_in)) * gain / np.sqrt(n_in)).astype(np.float32)

    def norm(n: int) -> np.ndarray:
        return (1 + 0.1 * rng.standard_normal(n)).astype(np.float32)

    writer = gguf.GGUFWriter(str(path), "gemma4")
    writer.add_context_length(4096)
    writer.add_embedding_length(N_EMBD)
    writer.add_feed_forward_length(N_FF)
    writer.add_block_count(n_layer)
    writer.add_head_count(N_HEAD)
    writer.add_head_count_kv(heads)
    writer.add_key_length(D_FULL)
    writer.add_value_length(D_FULL)
    writer.add_uint32("gemma4.attention.key_length_swa", D_WINDOW)
    writer.add_uint32("gemma4.attention.value_length_swa", D_WINDOW)
    writer.add_uint32("gemma4.attention.shared_kv_layers", n_shared)
    writer.add_uint32("gemma4.embedding_length_per_layer_input", D_PER_LAYER * per_layer)
    writer.add_rope_dimension_count(D_FULL)
    writer.add_uint32("gemma4.rope.dimension_count_swa", D_WINDOW)
    writer.add_rope_freq_base(1e6)
    writer.add_float32("gemma4.rope.freq_base_swa", 10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_sliding_window(N_WINDOW)
    writer.add_sliding_window_pattern(windows)
    writer.add_vocab_size(models.N_VOCAB)
    models.add_tokenizer(writer)
    tensors = {
        "token_embd.weight": matrix(models.N_VOCAB, N_EMBD),
        "output_norm.weight": norm(N_EMBD),
        "rope_freqs.weight": np.ones(D_FULL // 2, np.float32),
    }
    if per_layer:
        tensors |= {
            "per_layer_token_embd.weight": matrix(models.N_VOCAB, D_PER_LAYER * n_layer),
            "per_layer_model_proj.weight": matrix(D_PER_LAYER * n_layer, N_EMBD),
            "per_layer_proj_norm.weight": norm(D_PER_LAYER),
        }
    for il, (window, n_head_kv) in enumerate(zip(windows, heads, strict=True)):
        d = D_WINDOW if window else D_FULL
        parts = {
            "attn_norm.weight": norm(N_EMBD),
            "attn_q.weight": matrix(N_HEAD * d, N_EMBD),
            "attn_q_norm.weight": norm(d) / np.sqrt(np.float32(d)),  # scores are not scaled
            "attn_output.weight": matrix(N_EMBD, N_HEAD * d),
            "post_attention_norm.weight": norm(N_EMBD)
            / 4,  # it makes what attention gives as large as it says
            "ffn_norm.weight": norm(N_EMBD),
            "ffn_gate.weight": matrix(N_FF, N_EMBD),
            "ffn_up.weight": matrix(N_FF, N_EMBD),
            "ffn_down.weight": matrix(N_EMBD, N_FF),
            "post_ffw_norm.weight": norm(N_EMBD),
        }
        if il < n_layer - n_shared:
            parts["attn_k.weight"] = matrix(n_head_kv * d, N_EMBD)
            parts["attn_k_norm.weight"] = norm(d)
        if window and il < n_layer - n_shared:  # elsewhere V is K
            parts["attn_v.weight"] = matrix(n_head_kv * d, N_EMBD)
        if per_layer:
            parts |= {
                "inp_gate.weight": matrix(D_PER_LAYER, N_EMBD),
                "proj.weight": matrix(N_EMBD, D_PER_LAYER),
                "post_norm.weight": norm(N_EMBD),
            }
        tensors |= {f"blk.{il}.{name}": data for name, data in parts.items()}
    for name, data in tensors.items():
        writer.add_tensor(name, data)
    models.finish(writer)
    return path
