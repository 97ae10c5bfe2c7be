"""Tiny GGUF models with a head for the token after the next one (MTP, "NextN"): a hybrid with
recurrent layers (qwen35), and one with attention alone (glm4moe).

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
N_EMBD, N_FF, N_HEAD, N_HEAD_KV, D_HEAD = 128, 192, 4, 2, 64
N_LAYER = {"qwen35": 4, "glm4moe": 2}
"""Without the head; of qwen35 every second one is recurrent."""
D_STATE, N_K_HEADS, N_V_HEADS, D_CONV = 32, 2, 4, 4
N_EXPERT = 4
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
    writer.add_head_count_kv(N_HEAD_KV)
    writer.add_key_length(D_HEAD)
    writer.add_value_length(D_HEAD)
    writer.add_rope_dimension_count(D_HEAD)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(models.N_VOCAB)
    if n_nextn:
        writer.add_nextn_predict_layers(n_nextn)
    if arch == "qwen35":
        writer.add_rope_dimension_sections([11, 11, 10, 0])
        writer.add_full_attention_interval(2)
        writer.add_ssm_conv_kernel(D_CONV)
        writer.add_ssm_state_size(D_STATE)
        writer.add_ssm_group_count(N_K_HEADS)
        writer.add_ssm_time_step_rank(N_V_HEADS)
        writer.add_ssm_inner_size(N_V_HEADS * D_STATE)
    else:
        writer.add_expert_count(N_EXPERT)
        writer.add_expert_used_count(2)
        writer.add_expert_shared_count(0)
        writer.add_expert_feed_forward_length(N_FF)
        writer.add_leading_dense_block_count(1)
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
            recurs = self._arch == "qwen35" and il < n_layer and il % 2 == 0
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
        yield "post_attention_norm.weight", self._vector(N_EMBD)
        yield from self._recurrent() if recurs else self._attention()
        if self._arch == "glm4moe" and il > 0:
            yield "ffn_gate_inp.weight", self._matrix(N_EXPERT, N_EMBD, 1.0)
            yield "exp_probs_b.bias", np.zeros(N_EXPERT, np.float32)
            for part, n_out, n_in, gain in self._ffn():
                experts = [self._matrix(n_out, n_in, gain) for _ in range(N_EXPERT)]
                yield f"ffn_{part}_exps.weight", np.stack(experts)
        else:
            for part, n_out, n_in, gain in self._ffn():
                yield f"ffn_{part}.weight", self._matrix(n_out, n_in, gain)

    def _ffn(self) -> list[tuple[str, int, int, float]]:
        down = ("down", N_EMBD, N_FF, self._gain)
        return [("gate", N_FF, N_EMBD, 1.0), ("up", N_FF, N_EMBD, 1.0), down]

    def _attention(self) -> Tensors:
        gate = 2 if self._arch == "qwen35" else 1  # of queries: each head's, and its gate
        yield "attn_q.weight", self._matrix(gate * N_HEAD * D_HEAD, N_EMBD, 1.0)
        yield "attn_k.weight", self._matrix(N_HEAD_KV * D_HEAD, N_EMBD, 1.0)
        yield "attn_v.weight", self._matrix(N_HEAD_KV * D_HEAD, N_EMBD, 1.0)
        yield "attn_output.weight", self._matrix(N_EMBD, N_HEAD * D_HEAD, 2 * self._gain)
        for part in "qk":
            yield f"attn_{part}_norm.weight", self._vector(D_HEAD, 1.2)

    def _recurrent(self) -> Tensors:
        n_key, n_value = N_K_HEADS * D_STATE, N_V_HEADS * D_STATE
        yield "attn_qkv.weight", self._matrix(2 * n_key + n_value, N_EMBD, 1.0)
        yield "attn_gate.weight", self._matrix(n_value, N_EMBD, 1.0)
        yield "ssm_conv1d.weight", self._matrix(2 * n_key + n_value, D_CONV, 1.0)
        yield "ssm_dt.bias", self._vector(N_V_HEADS, 0.5)
        yield "ssm_a", -self._vector(N_V_HEADS, 0.3)
        yield "ssm_beta.weight", self._matrix(N_V_HEADS, N_EMBD, 1.0)
        yield "ssm_alpha.weight", self._matrix(N_V_HEADS, N_EMBD, 1.0)
        yield "ssm_norm.weight", self._vector(D_STATE)
        yield "ssm_out.weight", self._matrix(N_EMBD, n_value, self._gain)

    def _matrix(self, n_out: int, n_in: int, gain: float) -> np.ndarray:
        found = self._rng.standard_normal((n_out, n_in)) * gain / np.sqrt(n_in)
        return found.astype(np.float32)

    def _vector(self, n: int, mean: float = 1.0) -> np.ndarray:
        return (mean + 0.1 * self._rng.standard_normal(n)).astype(np.float32)
