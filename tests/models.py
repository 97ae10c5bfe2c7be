"""Tiny GGUF models of every architecture under test, written with `gguf` from a fixed seed.

The weights are random but not degenerate: attention scores spread by a few units (a uniform
attention would hide a wrong row), values pass through the residual stream at its own scale, and
logits spread by a few units. Nothing here needs a library of llama.cpp; `tests/test_reference.py`
shows that the unpatched one loads them and agrees with `tests/reference`.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path

import gguf
import numpy as np

N_VOCAB = 320
N_SPECIAL = 6  # token ids below are control tokens
BOS, EOS, USER, ASSISTANT = 1, 2, 3, 4
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|user|>' if message['role'] == 'user' else"
    " '<|assistant|>' if message['role'] == 'assistant' else '' }}{{ message['content'] }}{{"
    " eos_token if message['role'] == 'assistant' else '' }}{% endfor %}{% if add_generation_prompt"
    " %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class Shape:
    """One tiny model: architecture, sizes and what its attention block has besides the four
    projections.
    """

    arch: str
    n_layer: int = 3
    n_embd: int = 128
    n_ff: int = 192
    n_head: int = 4
    n_head_kv: int = 2
    d_head: int = 64
    n_ctx: int = 4096
    freq_base: float = 10000.0
    sliding_window: int = 0
    swa_layers: tuple[bool, ...] = ()
    qkv_bias: bool = False
    key_bias: float = 0.0
    """Size of a bias in the pairs of a key that positions turn least, as Qwen 2 has learned it."""
    qk_norm: bool = False
    uneven: float = 1.0
    """Norms of queries grow from 1/uneven to uneven with the pairs, and those of keys fall."""
    post_norm: bool = False
    fused: bool = False
    n_expert: int = 0
    """Experts in place of each layer's feed-forward block, of which a token goes through two."""
    weights: str = "f32"
    seed: int = field(default=1)


SHAPES: dict[str, Shape] = {
    "llama-mha": Shape("llama", n_head=2, n_head_kv=2),
    "llama-gqa": Shape("llama"),
    "llama-d128": Shape("llama", n_layer=2, d_head=128),
    "qwen2": Shape("qwen2", n_layer=2, n_embd=256, qkv_bias=True, freq_base=1e6),
    "qwen3": Shape("qwen3", qk_norm=True, freq_base=1e6),
    "gemma3": Shape(
        "gemma3",
        n_layer=4,
        n_head_kv=1,
        qk_norm=True,
        post_norm=True,
        freq_base=1e6,
        sliding_window=64,
        swa_layers=(True, False, True, False),
    ),
    "phi3": Shape("phi3", n_layer=2, n_embd=256, fused=True),
    "refact": Shape(
        "refact", n_layer=2, n_head=6, n_head_kv=3
    ),  # ALiBi, and slopes for a number of heads that is no power of two
}
SHAPES["llama-32k"] = replace(SHAPES["llama-gqa"], n_ctx=32768, weights="q8_0")
SHAPES["llama-q4"] = replace(SHAPES["llama-gqa"], weights="q4_0")
SHAPES["llama-moe"] = replace(SHAPES["llama-gqa"], n_expert=4, weights="f16")

ARCHITECTURES = tuple(name for name, shape in SHAPES.items() if shape.weights == "f32")
"""Names of the models with f32 weights, one per attention variant: what the torch reference is
compared with.
"""
SHAPES["gemma3-q8"] = replace(SHAPES["gemma3"], weights="q8_0")
SHAPES["qwen3-uneven"] = replace(SHAPES["qwen3"], uneven=4.0)
SHAPES["qwen2-bias"] = replace(SHAPES["qwen2"], key_bias=60.0)


def finish(writer: gguf.GGUFWriter, path: Path | None = None) -> None:
    """Write what was added, into the writer's own file or the one named here."""
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_in_parts(name: str, folder: Path, n_tensors: int = 12) -> Path:
    """Write the model `name` of SHAPES into `folder` as several files; returns the first."""
    writer = gguf.GGUFWriter(None, SHAPES[name].arch, split_max_tensors=n_tensors)
    _fill(writer, SHAPES[name], name)
    finish(writer, folder / f"{name}.gguf")
    return min(folder.glob(f"{name}-*.gguf"))


def write(name: str, folder: Path) -> Path:
    """Write the model `name` of SHAPES into `folder` (once) and return its path."""
    path = folder / f"{name}.gguf"
    if not path.exists():
        partial = path.with_suffix(".partial")
        _write(SHAPES[name], name, partial)
        partial.replace(path)
    return path


def _write(shape: Shape, name: str, path: Path) -> None:
    writer = gguf.GGUFWriter(str(path), shape.arch)
    _fill(writer, shape, name)
    finish(writer)


def _fill(writer: gguf.GGUFWriter, shape: Shape, name: str) -> None:
    writer.add_name(f"tiny {name}")
    _add_hyperparameters(writer, shape)
    add_tokenizer(writer)
    for tensor_name, data in tensors(shape):
        _add_tensor(writer, shape, tensor_name, data)


def _add_hyperparameters(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_context_length(shape.n_ctx)
    writer.add_embedding_length(shape.n_embd)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_block_count(shape.n_layer)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_key_length(shape.d_head)
    writer.add_value_length(shape.d_head)
    writer.add_rope_dimension_count(shape.d_head)
    writer.add_rope_freq_base(shape.freq_base)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(N_VOCAB)
    if shape.n_expert:
        writer.add_expert_count(shape.n_expert)
        writer.add_expert_used_count(2)
    if shape.sliding_window:
        writer.add_sliding_window(shape.sliding_window)
        writer.add_sliding_window_pattern(shape.swa_layers)


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """A SentencePiece vocabulary: specials, one token per byte, letters, and a few longer
    pieces.
    """
    letters = "abcdefghijklmnopqrstuvwxyz"
    # llama.cpp asks phi3 for the last one
    pieces = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|endoftext|>"]
    kinds = [gguf.TokenType.UNKNOWN] + [gguf.TokenType.CONTROL] * 5
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    kinds += [gguf.TokenType.BYTE] * 256
    normal = [
        "\u2581",
        *letters,
        "th",
        "the",
        "in",
        "an",
        "er",
        "\u2581a",
        "\u2581th",
        "\u2581the",
        "\u2581s",
        "on",
        "re",
    ]
    normal += [f"{first}{second}" for first in "bcdfg" for second in "aeiou"]
    normal = normal[: N_VOCAB - len(pieces)]
    pieces += normal
    kinds += [gguf.TokenType.NORMAL] * len(normal)
    while len(pieces) < N_VOCAB:
        pieces.append(f"<unused{len(pieces)}>")
        kinds.append(gguf.TokenType.UNUSED)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces)
    writer.add_token_scores([-float(index) for index in range(N_VOCAB)])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _add_tensor(writer: gguf.GGUFWriter, shape: Shape, name: str, data: np.ndarray) -> None:
    kind = gguf.GGMLQuantizationType[shape.weights.upper()]
    if data.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, data)
    else:
        writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)


def tensors(shape: Shape) -> list[tuple[str, np.ndarray]]:
    """All tensors of a model by GGUF name, float32 [n_out, n_in] or [n]."""
    # models of one architecture share weights: only their storage differs
    identity = repr(
        (shape.arch, shape.n_layer, shape.n_embd, shape.n_head, shape.n_head_kv, shape.d_head)
    )
    rng = np.random.default_rng([shape.seed, zlib.crc32(identity.encode())])

    def matrix(n_out: int, n_in: int, gain: float) -> np.ndarray:
        return (rng.standard_normal((n_out, n_in)) * gain / np.sqrt(n_in)).astype(np.float32)

    def vector(n: int, mean: float, spread: float) -> np.ndarray:
        return (mean + spread * rng.standard_normal(n)).astype(np.float32)

    # gemma multiplies by sqrt(n_embd) itself
    embd_gain = 1.0 if shape.arch == "gemma3" else np.sqrt(shape.n_embd)
    named = [
        ("token_embd.weight", matrix(N_VOCAB, shape.n_embd, embd_gain)),
        ("output_norm.weight", vector(shape.n_embd, 1.0, 0.1)),
        ("output.weight", matrix(N_VOCAB, shape.n_embd, 2.5)),
    ]
    for il in range(shape.n_layer):
        named += [(f"blk.{il}.{part}", data) for part, data in _layer(shape, matrix, vector)]
    return named


def _layer(shape: Shape, matrix, vector) -> list[tuple[str, np.ndarray]]:
    n_q, n_kv = shape.n_head * shape.d_head, shape.n_head_kv * shape.d_head
    # scores q.k/sqrt(d) spread by qk_gain^2 units; under QK norm the norm's weights carry that gain
    qk_gain = 1.0 if shape.qk_norm else 1.5
    q, k, v = (
        matrix(n, shape.n_embd, gain) for n, gain in ((n_q, qk_gain), (n_kv, qk_gain), (n_kv, 1.0))
    )

    def ffn(n_out: int, n_in: int) -> np.ndarray:
        one = [matrix(n_out, n_in, 1.0) for _ in range(shape.n_expert or 1)]
        return np.stack(one) if shape.n_expert else one[0]

    gate, up = (ffn(shape.n_ff, shape.n_embd) for _ in range(2))
    kind = "_exps" if shape.n_expert else ""
    parts = [
        ("attn_norm.weight", vector(shape.n_embd, 1.0, 0.1)),
        ("ffn_norm.weight", vector(shape.n_embd, 1.0, 0.1)),
    ]
    if shape.fused:
        parts += [
            ("attn_qkv.weight", np.concatenate([q, k, v])),
            ("ffn_up.weight", np.concatenate([gate, up])),
        ]
    else:
        parts += [
            ("attn_q.weight", q),
            ("attn_k.weight", k),
            ("attn_v.weight", v),
            (f"ffn_gate{kind}.weight", gate),
            (f"ffn_up{kind}.weight", up),
        ]
    if shape.qkv_bias:
        parts += [
            (f"attn_{part}.bias", vector(n, 0.0, 0.5))
            for part, n in (("q", n_q), ("k", n_kv), ("v", n_kv))
        ]
        half = shape.d_head // 2
        for head in range(shape.n_head_kv if shape.key_bias else 0):
            for first in (half, 2 * half):  # the last pairs are (half - i, d_head - i)
                parts[-2][1][head * 2 * half + first - half // 4 :][: half // 4] += shape.key_bias
    if shape.qk_norm:
        sizes = np.tile(shape.uneven ** np.linspace(-1, 1, shape.d_head // 2), 2)
        parts += [
            (f"attn_{part}_norm.weight", (vector(shape.d_head, 1.2, 0.2) * by).astype(np.float32))
            for part, by in (("q", sizes), ("k", 1 / sizes))
        ]
    if shape.post_norm:
        parts += [
            (f"post_{part}_norm.weight", vector(shape.n_embd, 0.7, 0.1))
            for part in ("attention", "ffw")
        ]
    if shape.n_expert:
        parts.append(("ffn_gate_inp.weight", matrix(shape.n_expert, shape.n_embd, 1.0)))
    return parts + [
        ("attn_output.weight", matrix(shape.n_embd, n_q, 1.5)),
        (f"ffn_down{kind}.weight", ffn(shape.n_embd, shape.n_ff)),
    ]


def write_adapter(path: Path, name: str, rank: int = 4, kind: type = np.float32) -> Path:
    """Write a LoRA of the model `name` of SHAPES to `path`, for its queries and outputs, and
    return it. It changes what the model says a good deal.
    """
    shape, rng = SHAPES[name], np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(path), shape.arch)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(rank))
    n_q = shape.n_head * shape.d_head
    sizes = {"attn_q": (n_q, shape.n_embd), "attn_output": (shape.n_embd, n_q)}
    for il in range(shape.n_layer):
        for part, (n_out, n_in) in sizes.items():
            for letter, rows in (("a", (rank, n_in)), ("b", (n_out, rank))):
                data = rng.standard_normal(rows) / np.sqrt(rows[1])
                writer.add_tensor(f"blk.{il}.{part}.weight.lora_{letter}", data.astype(kind))
    finish(writer)
    return path
