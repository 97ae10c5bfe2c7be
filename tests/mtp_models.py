"""Tiny GGUF models with a head for the token after the next one (MTP, "NextN"): a hybrid with
recurrent layers (qwen35), one with attention alone (glm4moe), and the others that have one.

What layers add to a token's embedding is small, so what follows a token depends on it most of all.
The head says what the model says of the token that it is given, so that most of its guesses are
right. Its attention is random, and a wrong row changes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np

from tests import models

ARCHS = ("qwen35", "glm4moe")
OTHERS = ("qwen35moe", "qwen3next", "deepseek2")
N_EMBD, N_FF, N_HEAD, N_HEAD_KV, D_HEAD = 128, 192, 4, 2, 64
N_LAYER = {"qwen35": 4, "qwen35moe": 4, "qwen3next": 4, "glm4moe": 2, "deepseek2": 2}
"""Without the head; of Qwen's every second one is recurrent."""
D_STATE, N_K_HEADS, N_V_HEADS, D_CONV = 32, 2, 4, 4
N_EXPERT = 4
N_LORA, N_ROPE = 64, 32  # of latent attention
Tensors = Iterator[tuple[str, np.ndarray]]


def write(path: Path, arch: str, n_nextn: int = 1, gain: float = 0.1, tied: bool = True) -> Path:
    """Write the model to `path` and return it. n_nextn: heads that the file says it has, of which
    it has one at most; gain: of what layers write; tied: the head says what the model would, else
    something of its own.
    """
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_name(f"tiny {arch}")
    n_layer = N_LAYER[arch]
    writer.add_context_length(4096)
    writer.add_embedding_length(N_EMBD)
    writer.add_feed_forward_length(N_FF)
    writer.add_block_count(n_layer + n_nextn)
    writer.add_head_count(N_HEAD)
    is_latent, recurs = arch == "deepseek2", arch.startswith("qwen")
    writer.add_head_count_kv(1 if is_latent else N_HEAD_KV)
    writer.add_key_length(N_LORA + N_ROPE if is_latent else D_HEAD)
    writer.add_value_length(N_LORA if is_latent else D_HEAD)
    writer.add_rope_dimension_count(N_ROPE if is_latent else D_HEAD)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(models.N_VOCAB)
    if n_nextn:
        writer.add_nextn_predict_layers(n_nextn)
    if is_latent:
        writer.add_q_lora_rank(N_LORA)
        writer.add_kv_lora_rank(N_LORA)
        writer.add_key_length_mla(D_HEAD)
        writer.add_value_length_mla(D_HEAD)
    if recurs:
        if arch != "qwen3next":
            writer.add_rope_dimension_sections([11, 11, 10, 0])
        writer.add_full_attention_interval(2)
        writer.add_ssm_conv_kernel(D_CONV)
        writer.add_ssm_state_size(D_STATE)
        writer.add_ssm_group_count(N_K_HEADS)
        writer.add_ssm_time_step_rank(N_V_HEADS)
        writer.add_ssm_inner_size(N_V_HEADS * D_STATE)
    if arch != "qwen35":
        writer.add_expert_count(N_EXPERT)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(N_FF)
        writer.add_expert_shared_feed_forward_length(N_FF)
        writer.add_expert_shared_count(0 if arch == "glm4moe" else 1)
        writer.add_leading_dense_block_count(0 if recurs else 1)
    models.add_tokenizer(writer)
    for name, data in _Tensors(arch, gain).all(n_layer, n_nextn, tied):
        writer.add_tensor(name, data)
    models.finish(writer)
    return path


class _Tensors:
    def __init__(self, arch: str, gain: float) -> None:
        self._arch, self._gain, self._rng = arch, gain, np.random.default_rng(7)

    def all(self, n_layer: int, n_nextn: int, tied: bool) -> Tensors:
        yield "token_embd.weight", self._matrix(models.N_VOCAB, N_EMBD, np.sqrt(N_EMBD))
        yield "output_norm.weight", self._vector(N_EMBD)
        yield "output.weight", self._matrix(models.N_VOCAB, N_EMBD, 2.5)
        for il in range(n_layer + min(n_nextn, 1)):
            recurs = self._arch.startswith("qwen") and il < n_layer and il % 2 == 0
            for name, data in self._layer(il, recurs):
                yield f"blk.{il}.{name}", data
        if n_nextn:
            for name, data in self._head(tied):
                yield f"blk.{n_layer}.nextn.{name}", data

    def _head(self, tied: bool) -> Tensors:
        mixed = self._matrix(N_EMBD, 2 * N_EMBD, 0.2)
        if tied:  # the token's embedding, and a little of the hidden state
            mixed[:, :N_EMBD] += np.eye(N_EMBD, dtype=np.float32)
        yield "eh_proj.weight", mixed
        yield "enorm.weight", np.ones(N_EMBD, np.float32)
        yield "hnorm.weight", np.ones(N_EMBD, np.float32)

    def _layer(self, il: int, recurs: bool) -> Tensors:
        yield "attn_norm.weight", self._vector(N_EMBD)
        is_latent = self._arch == "deepseek2"
        yield "ffn_norm.weight" if is_latent else "post_attention_norm.weight", self._vector(N_EMBD)
        if recurs:
            yield from self._recurrent()
        else:
            yield from self._latent() if is_latent else self._attention()
        is_dense = self._arch == "qwen35" or (il == 0 and not self._arch.startswith("qwen"))
        for part, n_out, n_in, gain in self._ffn():
            experts = [self._matrix(n_out, n_in, gain) for _ in range(N_EXPERT + 1)]
            if is_dense:
                yield f"ffn_{part}.weight", experts[0]
                continue
            yield f"ffn_{part}_exps.weight", np.stack(experts[1:])
            if self._arch != "glm4moe":
                yield f"ffn_{part}_shexp.weight", experts[0]
        if not is_dense:
            yield "ffn_gate_inp.weight", self._matrix(N_EXPERT, N_EMBD, 1.0)
        if not is_dense and self._arch == "glm4moe":
            yield "exp_probs_b.bias", np.zeros(N_EXPERT, np.float32)
        if not is_dense and self._arch.startswith("qwen"):
            yield "ffn_gate_inp_shexp.weight", self._vector(N_EMBD)

    def _ffn(self) -> list[tuple[str, int, int, float]]:
        down = ("down", N_EMBD, N_FF, self._gain)
        return [("gate", N_FF, N_EMBD, 1.0), ("up", N_FF, N_EMBD, 1.0), down]

    def _attention(self) -> Tensors:
        gate = 2 if self._arch.startswith("qwen") else 1  # of queries: each head's, and its gate
        yield "attn_q.weight", self._matrix(gate * N_HEAD * D_HEAD, N_EMBD, 1.0)
        yield "attn_k.weight", self._matrix(N_HEAD_KV * D_HEAD, N_EMBD, 1.0)
        yield "attn_v.weight", self._matrix(N_HEAD_KV * D_HEAD, N_EMBD, 1.0)
        yield "attn_output.weight", self._matrix(N_EMBD, N_HEAD * D_HEAD, 2 * self._gain)
        for part in "qk":
            yield f"attn_{part}_norm.weight", self._vector(D_HEAD, 1.2)

    def _latent(self) -> Tensors:
        d_nope = D_HEAD - N_ROPE
        yield "attn_q_a.weight", self._matrix(N_LORA, N_EMBD, 1.0)
        yield "attn_q_a_norm.weight", self._vector(N_LORA)
        yield "attn_q_b.weight", self._matrix(N_HEAD * D_HEAD, N_LORA, 1.0)
        yield "attn_kv_a_mqa.weight", self._matrix(N_LORA + N_ROPE, N_EMBD, 1.0)
        yield "attn_kv_a_norm.weight", self._vector(N_LORA)
        for part, n_out, n_in in (("k", N_LORA, d_nope), ("v", D_HEAD, N_LORA)):
            heads = [self._matrix(n_out, n_in, 1.0) for _ in range(N_HEAD)]
            yield f"attn_{part}_b.weight", np.stack(heads)
        yield "attn_output.weight", self._matrix(N_EMBD, N_HEAD * D_HEAD, 2 * self._gain)

    def _recurrent(self) -> Tensors:
        n_key, n_value = N_K_HEADS * D_STATE, N_V_HEADS * D_STATE
        yield "attn_qkv.weight", self._matrix(2 * n_key + n_value, N_EMBD, 1.0)
        yield "attn_gate.weight", self._matrix(n_value, N_EMBD, 1.0)
        yield "ssm_conv1d.weight", self._matrix(2 * n_key + n_value, D_CONV, 1.0)
        yield "ssm_dt.bias", self._vector(N_V_HEADS, 0.5)
        yield "ssm_a", -self._vector(N_V_HEADS, 0.3)
        if self._arch == "qwen3next":
            yield "ssm_ba.weight", self._matrix(2 * N_V_HEADS, N_EMBD, 1.0)
        else:
            yield "ssm_beta.weight", self._matrix(N_V_HEADS, N_EMBD, 1.0)
            yield "ssm_alpha.weight", self._matrix(N_V_HEADS, N_EMBD, 1.0)
        yield "ssm_norm.weight", self._vector(D_STATE)
        yield "ssm_out.weight", self._matrix(N_EMBD, n_value, self._gain)

    def _matrix(self, n_out: int, n_in: int, gain: float) -> np.ndarray:
        found = self._rng.standard_normal((n_out, n_in)) * gain / np.sqrt(n_in)
        return found.astype(np.float32)

    def _vector(self, n: int, mean: float = 1.0) -> np.ndarray:
        return (mean + 0.1 * self._rng.standard_normal(n)).astype(np.float32)
