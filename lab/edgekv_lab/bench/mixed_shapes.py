"""Shapes of models whose layers are not those of a Llama: recurrent ones, sliding windows, experts,
latent attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import gguf

from edgekv_lab.bench.shapes import Matrices, Shape, Vectors


@dataclass(frozen=True)
class Mixed(Shape):
    """Every `every`-th layer attends to everything."""

    every: int = 4

    def attends(self, il: int) -> bool:
        return (il + 1) % self.every == 0

    def _query_norms(self, d: int) -> Vectors:
        return {f"attn_{part}_norm.weight": ((d,), 1.0) for part in "qk"}


@dataclass(frozen=True)
class Qwen35(Mixed):
    """The other layers are gated delta nets: n_delta heads of d_delta values."""

    n_delta: int = 16
    d_delta: int = 128
    d_conv: int = 4

    def layer_matrices(self, il: int) -> Matrices:
        n_values = self.n_delta * self.d_delta
        if self.attends(il):  # queries come with a gate
            mixing = self.attention(2 * self.n_head * self.d_head, self.d_head, self.n_head_kv)
        else:
            mixing = {
                "attn_qkv.weight": (3 * n_values, self.n_embd),
                "attn_gate.weight": (n_values, self.n_embd),
                "ssm_alpha.weight": (self.n_delta, self.n_embd),
                "ssm_beta.weight": (self.n_delta, self.n_embd),
                "ssm_out.weight": (self.n_embd, n_values),
            }
        return mixing | self.feed_forward()

    def layer_vectors(self, il: int) -> Vectors:
        norms = self.norms("attn", "post_attention")
        if self.attends(il):
            return norms | self._query_norms(self.d_head)
        return norms | {
            "ssm_conv1d.weight": ((3 * self.n_delta * self.d_delta, self.d_conv), 0.25),
            "ssm_dt.bias": ((self.n_delta,), 0.0),
            "ssm_a": ((self.n_delta,), -1.0),
            "ssm_norm.weight": ((self.d_delta,), 1.0),
        }

    def n_rotated(self) -> int:
        return self.d_head // 4

    def describe(self, writer: gguf.GGUFWriter) -> None:
        super().describe(writer)
        writer.add_full_attention_interval(self.every)
        writer.add_ssm_conv_kernel(self.d_conv)
        writer.add_ssm_inner_size(self.n_delta * self.d_delta)
        writer.add_ssm_state_size(self.d_delta)
        writer.add_ssm_time_step_rank(self.n_delta)
        writer.add_ssm_group_count(self.n_delta)
        n_pairs = self.n_rotated() // 2
        n_third = n_pairs // 3
        writer.add_rope_dimension_sections([n_pairs - 2 * n_third, n_third, n_third, 0])


@dataclass(frozen=True)
class Gemma4(Mixed):
    """The other layers see n_window tokens, through n_head_kv heads of d_head values; those that
    attend to everything have half as many heads that are twice as long, whose V is K.
    """

    n_window: int = 512

    def kv_heads(self, il: int) -> tuple[int, int]:
        if self.attends(il):
            return max(self.n_head_kv // 2, 1), 2 * self.d_head
        return self.n_head_kv, self.d_head

    def layer_matrices(self, il: int) -> Matrices:
        n_head_kv, d = self.kv_heads(il)
        attention = self.attention(self.n_head * d, d, n_head_kv)
        if self.attends(il):
            del attention["attn_v.weight"]
        return attention | self.feed_forward()

    def layer_vectors(self, il: int) -> Vectors:
        norms = self.norms("attn", "post_attention", "ffn", "post_ffw")
        d = self.kv_heads(il)[1]
        # scores' scale
        return norms | self._query_norms(d) | {"attn_q_norm.weight": ((d,), d**-0.5)}

    def vectors(self) -> Vectors:
        return super().vectors() | {"rope_freqs.weight": ((self.d_head,), 1.0)}

    def describe(self, writer: gguf.GGUFWriter) -> None:
        super().describe(writer)
        layers, key = range(self.n_layer), f"{self.arch}."
        for name in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
            writer.add_uint32(f"{key}{name}_swa", self.d_head)
        writer.add_uint32(f"{key}embedding_length_per_layer_input", 0)
        writer.add_float32(f"{key}rope.freq_base_swa", 10000.0)
        writer.add_sliding_window(self.n_window)
        writer.add_sliding_window_pattern([not self.attends(il) for il in layers])


@dataclass(frozen=True)
class Lfm2Moe(Mixed):
    """The other layers are short convolutions. n_used of n_expert experts answer each token, but
    in the first n_dense layers.
    """

    n_expert: int = 8
    n_used: int = 2
    n_ff_expert: int = 512
    n_dense: int = 2
    d_conv: int = 3

    def kv_heads(self, il: int) -> tuple[int, int]:
        return self.n_head_kv * self.attends(il), self.d_head

    def layer_matrices(self, il: int) -> Matrices:
        if self.attends(il):
            mixing = self.attention(self.n_head * self.d_head, self.d_head, self.n_head_kv)
        else:
            mixing = {
                "shortconv.in_proj.weight": (3 * self.n_embd, self.n_embd),
                "shortconv.out_proj.weight": (self.n_embd, self.n_embd),
            }
        if il < self.n_dense:
            return mixing | self.feed_forward()
        up, down = (self.n_ff_expert, self.n_embd), (self.n_embd, self.n_ff_expert)
        sizes = {"gate": up, "up": up, "down": down}
        return (
            mixing
            | {"ffn_gate_inp.weight": (self.n_expert, self.n_embd)}
            | {f"ffn_{part}_exps.weight": (self.n_expert, *size) for part, size in sizes.items()}
        )

    def layer_vectors(self, il: int) -> Vectors:
        found = self.norms("attn", "ffn")
        if self.attends(il):
            found |= self._query_norms(self.d_head)
        else:
            found["shortconv.conv.weight"] = (self.n_embd, self.d_conv), 1 / self.d_conv
        if il >= self.n_dense:
            found["exp_probs_b.bias"] = (self.n_expert,), 0.0
        return found

    def vectors(self) -> Vectors:
        named = super().vectors()
        return {"token_embd_norm.weight": named.pop("output_norm.weight")} | named

    def describe(self, writer: gguf.GGUFWriter) -> None:
        super().describe(writer)
        writer.add_shortconv_l_cache(self.d_conv)
        writer.add_leading_dense_block_count(self.n_dense)
        writer.add_expert_count(self.n_expert)
        writer.add_expert_used_count(self.n_used)
        writer.add_expert_feed_forward_length(self.n_ff_expert)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


@dataclass(frozen=True)
class Latent(Shape):
    """Latent attention: one KV head of n_latent + n_rope values, whose first n_latent are V too.
    d_head: values of a query head that are not rotated, and of its output.
    """

    n_latent: int = 512
    n_rope: int = 64
    n_query: int = 512

    def kv_heads(self, il: int) -> tuple[int, int]:
        return 1, self.n_latent + self.n_rope

    def n_rotated(self) -> int:
        return self.n_rope

    def d_value(self) -> int:
        return self.n_latent

    def layer_matrices(self, il: int) -> Matrices:
        n_key = self.d_head + self.n_rope
        return {
            "attn_q_a.weight": (self.n_query, self.n_embd),
            "attn_q_b.weight": (self.n_head * n_key, self.n_query),
            "attn_kv_a_mqa.weight": (self.n_latent + self.n_rope, self.n_embd),
            "attn_k_b.weight": (self.n_head, self.n_latent, self.d_head),
            "attn_v_b.weight": (self.n_head, self.d_head, self.n_latent),
            "attn_output.weight": (self.n_embd, self.n_head * self.d_head),
        } | self.feed_forward()

    def layer_vectors(self, il: int) -> Vectors:
        sizes = {"q": self.n_query, "kv": self.n_latent}
        norms = {f"attn_{part}_a_norm.weight": ((n,), 1.0) for part, n in sizes.items()}
        return self.norms("attn", "ffn") | norms

    def describe(self, writer: gguf.GGUFWriter) -> None:
        super().describe(writer)
        writer.add_key_length_mla(self.d_head + self.n_rope)
        writer.add_value_length_mla(self.d_head)
        writer.add_q_lora_rank(self.n_query)
        writer.add_kv_lora_rank(self.n_latent)
        writer.add_leading_dense_block_count(self.n_layer)
        writer.add_expert_feed_forward_length(self.n_ff)  # llama.cpp asks for these
        writer.add_expert_shared_count(0)


SHAPES: dict[str, Shape] = {
    "qwen3.5-0.8b": Qwen35(
        "Qwen3.5-0.8B", "qwen35", 24, 1024, 3584, 8, 2, 256, n_ctx=262144, freq_base=1e7, tied=True
    ),
    "gemma4-1b": Gemma4(
        "a small Gemma 4", "gemma4", 24, 1536, 6144, 8, 2, 256, freq_base=1e6, tied=True, every=6
    ),
    "lfm2-moe-1b": Lfm2Moe(
        "LFM2-8B-A1B with smaller experts",
        "lfm2moe",
        24,
        2048,
        7168,
        32,
        8,
        64,
        freq_base=1e6,
        tied=True,
    ),
    "deepseek2-1b": Latent(
        "a small DeepSeek-V2 without experts", "deepseek2", 24, 1536, 4608, 16, 1, 128, tied=True
    ),
}
"""Sizes of the first as far as they are known; the others are smaller than what there is."""
