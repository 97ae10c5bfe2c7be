"""Writes a GGUF model of Llama-3.2-1B's shape with random q4_0 weights, for speed and memory only: it says nothing.

Blocks are random bytes behind a fixed scale, written one tensor at a time, so that writing needs the memory of one tensor. The
vocabulary is cut to 32,000 (128,256 in the original), which leaves 0.2 billion weights out of the token table.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

N_LAYER, N_EMBD, N_FF, N_HEAD, N_HEAD_KV, D_HEAD, N_VOCAB, N_CTX = 16, 2048, 8192, 32, 8, 64, 32000, 131072
Q4_0 = gguf.GGMLQuantizationType.Q4_0
BLOCK, BLOCK_BYTES = 32, 18
LEVELS_STD = 4.61  # standard deviation of (0..15) - 8


def shapes() -> dict[str, tuple[int, int]]:
    """Matrices by GGUF name: (n_out, n_in). The output shares the token table, as in the original."""
    named = {"token_embd.weight": (N_VOCAB, N_EMBD)}
    for il in range(N_LAYER):
        layer = {"attn_q": (N_HEAD * D_HEAD, N_EMBD), "attn_k": (N_HEAD_KV * D_HEAD, N_EMBD), "attn_v": (N_HEAD_KV * D_HEAD, N_EMBD),
                 "attn_output": (N_EMBD, N_HEAD * D_HEAD), "ffn_gate": (N_FF, N_EMBD), "ffn_up": (N_FF, N_EMBD), "ffn_down": (N_EMBD, N_FF)}
        named |= {f"blk.{il}.{part}.weight": shape for part, shape in layer.items()}
    return named


def norms() -> list[str]:
    return ["output_norm.weight"] + [f"blk.{il}.{part}_norm.weight" for il in range(N_LAYER) for part in ("attn", "ffn")]


def write(path: Path, seed: int = 0) -> None:
    """Write the model to `path`."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(N_CTX)
    writer.add_embedding_length(N_EMBD)
    writer.add_feed_forward_length(N_FF)
    writer.add_block_count(N_LAYER)
    writer.add_head_count(N_HEAD)
    writer.add_head_count_kv(N_HEAD_KV)
    writer.add_rope_dimension_count(D_HEAD)
    writer.add_rope_freq_base(500000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(N_VOCAB)
    add_tokenizer(writer)
    for name in norms():
        writer.add_tensor_info(name, (N_EMBD,), np.dtype(np.float32), N_EMBD * 4)
    for name, (n_out, n_in) in shapes().items():
        row_bytes = n_in // BLOCK * BLOCK_BYTES
        writer.add_tensor_info(name, (n_out, row_bytes), np.dtype(np.uint8), n_out * row_bytes, raw_dtype=Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(seed)
    for _ in norms():
        writer.write_tensor_data(np.ones(N_EMBD, np.float32))
    for n_out, n_in in shapes().values():
        writer.write_tensor_data(random_q4_0(rng, n_out, n_in))
    writer.close()


def random_q4_0(rng: np.random.Generator, n_out: int, n_in: int) -> np.ndarray:
    """Random q4_0 rows, uint8 [n_out, n_in / 32 * 18], of standard deviation 1 / sqrt(n_in)."""
    blocks = rng.integers(0, 256, (n_out * n_in // BLOCK, BLOCK_BYTES), dtype=np.uint8)
    blocks[:, :2] = np.frombuffer(np.float16(1 / (LEVELS_STD * np.sqrt(n_in))).tobytes(), np.uint8)
    return blocks.reshape(n_out, -1)


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """A vocabulary that loads: specials, bytes and numbered words."""
    special = ["<unk>", "<s>", "</s>"]
    pieces = special + [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += [f"w{index}" for index in range(len(pieces), N_VOCAB)]
    kinds = [gguf.TokenType.UNKNOWN] + [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.BYTE] * 256
    kinds += [gguf.TokenType.NORMAL] * (N_VOCAB - len(kinds))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces)
    writer.add_token_scores([0.0] * N_VOCAB)
    writer.add_token_types(kinds)
