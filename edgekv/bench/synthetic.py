"""Models of known shapes with random weights, for speed and memory only: they say nothing.

Blocks are random bytes behind a fixed scale, written one tensor at a time, so that writing needs
the memory of one tensor. The vocabulary is cut to 32,000, which leaves up to half a billion weights
out of the token table; what a large one costs is not seen here.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

from edgekv.errors import BadInput
from edgekv.memory.sizes import size_text

N_VOCAB = 32000
BLOCK = 32


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

    def matrices(self) -> dict[str, tuple[int, int]]:
        """By GGUF name: (n_out, n_in)."""
        named = {"token_embd.weight": (self.n_vocab, self.n_embd)}
        if not self.tied:
            named["output.weight"] = (self.n_vocab, self.n_embd)
        n_q, n_kv = self.n_head * self.d_head, self.n_head_kv * self.d_head
        layer = {
            "attn_q": (n_q, self.n_embd),
            "attn_k": (n_kv, self.n_embd),
            "attn_v": (n_kv, self.n_embd),
            "attn_output": (self.n_embd, n_q),
            "ffn_gate": (self.n_ff, self.n_embd),
            "ffn_up": (self.n_ff, self.n_embd),
            "ffn_down": (self.n_embd, self.n_ff),
        }
        return named | {
            f"blk.{il}.{part}.weight": size
            for il in range(self.n_layer)
            for part, size in layer.items()
        }

    def vectors(self) -> dict[str, tuple[int, float]]:
        """By GGUF name: (size, value): norms are 1, biases 0."""
        named = {"output_norm.weight": (self.n_embd, 1.0)}
        for il in range(self.n_layer):
            named |= {
                f"blk.{il}.{part}_norm.weight": (self.n_embd, 1.0) for part in ("attn", "ffn")
            }
            if self.qkv_bias:
                sizes = {
                    "q": self.n_head * self.d_head,
                    "k": self.n_head_kv * self.d_head,
                    "v": self.n_head_kv * self.d_head,
                }
                named |= {f"blk.{il}.attn_{part}.bias": (n, 0.0) for part, n in sizes.items()}
        return named


SHAPES = {
    "llama-1b": Shape("Llama-3.2-1B", "llama", 16, 2048, 8192, 32, 8, 64, tied=True),
    "llama-3b": Shape("Llama-3.2-3B", "llama", 28, 3072, 8192, 24, 8, 128, tied=True),
    "llama-8b": Shape("Llama-3.1-8B", "llama", 32, 4096, 14336, 32, 8, 128),
    "qwen-1.5b": Shape(
        "Qwen2.5-1.5B",
        "qwen2",
        28,
        1536,
        8960,
        12,
        2,
        128,
        n_ctx=32768,
        freq_base=1e6,
        qkv_bias=True,
        tied=True,
    ),
    "qwen-7b": Shape(
        "Qwen2.5-7B",
        "qwen2",
        28,
        3584,
        18944,
        28,
        4,
        128,
        n_ctx=131072,
        freq_base=1e6,
        qkv_bias=True,
    ),
    "tiny": Shape("nothing", "llama", 4, 256, 512, 4, 2, 64, n_ctx=8192, tied=True, n_vocab=512),
}
"""Sizes as the models' own configurations give them."""


def _q4_0(rng: np.random.Generator, n_out: int, n_in: int) -> np.ndarray:
    return _blocks(rng, n_out, n_in, 18, 4.61)  # 4.61: standard deviation of (0..15) - 8


def _q8_0(rng: np.random.Generator, n_out: int, n_in: int) -> np.ndarray:
    return _blocks(rng, n_out, n_in, 34, 73.9)  # of -128..127


def _blocks(
    rng: np.random.Generator, n_out: int, n_in: int, n_bytes: int, spread: float
) -> np.ndarray:
    """Random blocks, uint8 [n_out, n_in / 32 * n_bytes], whose values have the standard deviation 1
    / sqrt(n_in).
    """
    blocks = rng.integers(0, 256, (n_out * n_in // BLOCK, n_bytes), dtype=np.uint8)
    blocks[:, :2] = np.frombuffer(np.float16(1 / (spread * np.sqrt(n_in))).tobytes(), np.uint8)
    return blocks.reshape(n_out, -1)


def _f16(rng: np.random.Generator, n_out: int, n_in: int) -> np.ndarray:
    return (rng.standard_normal((n_out, n_in), np.float32) / np.sqrt(n_in)).astype(np.float16)


@dataclass(frozen=True)
class Type:
    """How matrices are stored. make(rng, n_out, n_in): one of them."""

    kind: gguf.GGMLQuantizationType
    row_bytes: Callable[[int], int]
    make: Callable[[np.random.Generator, int, int], np.ndarray]


TYPES = {
    "q4_0": Type(gguf.GGMLQuantizationType.Q4_0, lambda n: n // BLOCK * 18, _q4_0),
    "q8_0": Type(gguf.GGMLQuantizationType.Q8_0, lambda n: n // BLOCK * 34, _q8_0),
    "f16": Type(gguf.GGMLQuantizationType.F16, lambda n: 2 * n, _f16),
}


def parse(text: str) -> tuple[Shape, str]:
    """Shape and type of 'llama-1b' or 'llama-1b:q8_0'. Raises BadInput."""
    name, _, kind = text.partition(":")
    if name not in SHAPES:
        raise BadInput(f"there is no shape '{name}'; choose one of: {', '.join(SHAPES)}")
    if (kind or "q4_0") not in TYPES:
        raise BadInput(f"there is no weight type '{kind}' here; choose one of: {', '.join(TYPES)}")
    return SHAPES[name], kind or "q4_0"


def n_bytes(shape: Shape, kind: str) -> int:
    """Size of the weights."""
    matrices = sum(n_out * TYPES[kind].row_bytes(n_in) for n_out, n_in in shape.matrices().values())
    return matrices + 4 * sum(n for n, _ in shape.vectors().values())


def write(path: Path, shape: Shape, kind: str = "q4_0", seed: int = 0) -> None:
    """Write the model to `path`. Raises BadInput if the disk has not the room."""
    need, free = n_bytes(shape, kind), shutil.disk_usage(path.parent).free
    if need > free:
        raise BadInput(
            f"a model of this shape takes {size_text(need)}, and {size_text(free)} are free in"
            f" {path.parent}; let TMPDIR name a larger disk"
        )
    writer = gguf.GGUFWriter(str(path), shape.arch)
    _add_hyperparameters(writer, shape)
    _add_tokenizer(writer, shape.n_vocab)
    stored = TYPES[kind]
    for name, (n, _) in shape.vectors().items():
        writer.add_tensor_info(name, (n,), np.dtype(np.float32), 4 * n)
    for name, (n_out, n_in) in shape.matrices().items():
        size = stored.row_bytes(n_in)
        width, dtype = (n_in, np.float16) if kind == "f16" else (size, np.uint8)
        writer.add_tensor_info(
            name, (n_out, width), np.dtype(dtype), n_out * size, raw_dtype=stored.kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in _data(shape, stored, np.random.default_rng(seed)):
        writer.write_tensor_data(tensor)
    writer.close()


def _data(shape: Shape, stored: Type, rng: np.random.Generator) -> Iterator[np.ndarray]:
    for n, value in shape.vectors().values():
        yield np.full(n, value, np.float32)
    for n_out, n_in in shape.matrices().values():
        yield stored.make(rng, n_out, n_in)


def _add_hyperparameters(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_name(f"random weights in the shape of {shape.name}")
    writer.add_context_length(shape.n_ctx)
    writer.add_embedding_length(shape.n_embd)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_block_count(shape.n_layer)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_rope_dimension_count(shape.d_head)
    writer.add_key_length(shape.d_head)
    writer.add_value_length(shape.d_head)
    writer.add_rope_freq_base(shape.freq_base)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.n_vocab)


def _add_tokenizer(writer: gguf.GGUFWriter, n_vocab: int) -> None:
    """A vocabulary that loads: specials, bytes and numbered words."""
    special = ["<unk>", "<s>", "</s>"]
    pieces = special + [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += [f"w{index}" for index in range(len(pieces), n_vocab)]
    kinds = [gguf.TokenType.UNKNOWN] + [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.BYTE] * 256
    kinds += [gguf.TokenType.NORMAL] * (n_vocab - len(kinds))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces)
    writer.add_token_scores([0.0] * n_vocab)
    writer.add_token_types(kinds)
