"""Shapes of known models whose layers are alike: their tensors and hyperparameters.

The vocabulary is cut to 32,000, which leaves up to half a billion weights out of the token table;
what a large one costs is not seen here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gguf

N_VOCAB = 32000

Matrices = dict[str, tuple[int, ...]]
"""By name: ([n_expert,] n_out, n_in), random weights in the model's type."""
Vectors = dict[str, tuple[tuple[int, ...], float]]
"""By name: (sizes, value), f32 with the same value everywhere."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a model. tied: the output shares the token table."""

    name: str
    arch: str
    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    d_head: int
    n_ctx: int = 131072
    freq_base: float = 500000.0
    qkv_bias: bool = False
    tied: bool = False
    n_vocab: int = N_VOCAB

    def matrices(self) -> Matrices:
        """Random weights by GGUF name."""
        named = {"token_embd.weight": (self.n_vocab, self.n_embd)}
        if not self.tied:
            named["output.weight"] = (self.n_vocab, self.n_embd)
        return named | {
            f"blk.{il}.{part}": size
            for il in range(self.n_layer)
            for part, size in self.layer_matrices(il).items()
        }

    def vectors(self) -> Vectors:
        """What is no random weight, by GGUF name: norms are 1, biases 0."""
        named: Vectors = {"output_norm.weight": ((self.n_embd,), 1.0)}
        return named | {
            f"blk.{il}.{part}": kind
            for il in range(self.n_layer)
            for part, kind in self.layer_vectors(il).items()
        }

    def kv_heads(self, il: int) -> tuple[int, int]:
        """KV heads of layer `il`, and values of each."""
        return self.n_head_kv, self.d_head

    def n_rotated(self) -> int:
        """Values of a head that are rotated."""
        return max(self.kv_heads(il)[1] for il in range(self.n_layer))

    def d_value(self) -> int:
        """Values of V in a head; 0: as many as of K."""
        return 0

    def layer_matrices(self, il: int) -> Matrices:
        """Those of layer `il`, without the layer in their names."""
        n_q = self.n_head * self.d_head
        return self.attention(n_q, self.d_head, self.n_head_kv) | self.feed_forward()

    def attention(self, n_q: int, d: int, n_head_kv: int) -> Matrices:
        """n_q: values that a token's queries have, with what comes with them."""
        return {
            "attn_q.weight": (n_q, self.n_embd),
            "attn_k.weight": (n_head_kv * d, self.n_embd),
            "attn_v.weight": (n_head_kv * d, self.n_embd),
            "attn_output.weight": (self.n_embd, self.n_head * d),
        }

    def feed_forward(self) -> Matrices:
        return {
            "ffn_gate.weight": (self.n_ff, self.n_embd),
            "ffn_up.weight": (self.n_ff, self.n_embd),
            "ffn_down.weight": (self.n_embd, self.n_ff),
        }

    def layer_vectors(self, il: int) -> Vectors:
        """Those of layer `il`, without the layer in their names."""
        sizes = {"q": self.n_head, "k": self.n_head_kv, "v": self.n_head_kv}
        biases: Vectors = {
            f"attn_{part}.bias": ((n * self.d_head,), 0.0) for part, n in sizes.items()
        }
        return self.norms("attn", "ffn") | (biases if self.qkv_bias else {})

    def norms(self, *parts: str) -> Vectors:
        return {f"{part}_norm.weight": ((self.n_embd,), 1.0) for part in parts}

    def describe(self, writer: gguf.GGUFWriter) -> None:
        """Write the hyperparameters."""
        writer.add_name(f"random weights in the shape of {self.name}")
        writer.add_context_length(self.n_ctx)
        writer.add_embedding_length(self.n_embd)
        writer.add_feed_forward_length(self.n_ff)
        writer.add_block_count(self.n_layer)
        writer.add_head_count(self.n_head)
        writer.add_head_count_kv([self.kv_heads(il)[0] for il in range(self.n_layer)])
        writer.add_rope_dimension_count(self.n_rotated())
        d_widest = max(self.kv_heads(il)[1] for il in range(self.n_layer))
        writer.add_key_length(d_widest)
        writer.add_value_length(self.d_value() or d_widest)
        writer.add_rope_freq_base(self.freq_base)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_vocab_size(self.n_vocab)


QWEN: dict[str, Any] = dict(freq_base=1e6, qkv_bias=True)
SHAPES: dict[str, Shape] = {
    "llama-1b": Shape("Llama-3.2-1B", "llama", 16, 2048, 8192, 32, 8, 64, tied=True),
    "llama-3b": Shape("Llama-3.2-3B", "llama", 28, 3072, 8192, 24, 8, 128, tied=True),
    "llama-8b": Shape("Llama-3.1-8B", "llama", 32, 4096, 14336, 32, 8, 128),
    "qwen-1.5b": Shape(
        "Qwen2.5-1.5B", "qwen2", 28, 1536, 8960, 12, 2, 128, n_ctx=32768, tied=True, **QWEN
    ),
    "qwen-7b": Shape("Qwen2.5-7B", "qwen2", 28, 3584, 18944, 28, 4, 128, **QWEN),
    "tiny": Shape("nothing", "llama", 4, 256, 512, 4, 2, 64, n_ctx=8192, tied=True, n_vocab=512),
}
"""Sizes as the models' own configurations give them."""
