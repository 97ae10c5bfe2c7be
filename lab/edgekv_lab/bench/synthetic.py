"""Models of known shapes with random weights, for speed and memory only: they say nothing.

Blocks are random bytes behind a fixed scale, written one tensor at a time, so that writing needs
the memory of one tensor.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import gguf
import numpy as np

from edgekv.base.sizes import size_text
from edgekv.errors import BadInput
from edgekv_lab.bench import mixed_shapes, shapes
from edgekv_lab.bench.shapes import Shape

BLOCK = 32
SHAPES = shapes.SHAPES | mixed_shapes.SHAPES


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
    matrices = sum(
        prod(outer) * TYPES[kind].row_bytes(n_in) for *outer, n_in in shape.matrices().values()
    )
    return matrices + 4 * sum(prod(sizes) for sizes, _ in shape.vectors().values())


def write(path: Path, shape: Shape, kind: str = "q4_0", seed: int = 0) -> None:
    """Write the model to `path`. Raises BadInput if the disk has not the room."""
    need, free = n_bytes(shape, kind), shutil.disk_usage(path.parent).free
    if need > free:
        raise BadInput(
            f"a model of this shape takes {size_text(need)}, and {size_text(free)} are free in"
            f" {path.parent}; let TMPDIR name a larger disk"
        )
    writer = gguf.GGUFWriter(str(path), shape.arch)
    shape.describe(writer)
    _add_tokenizer(writer, shape.n_vocab)
    stored = TYPES[kind]
    for name, (sizes, _) in shape.vectors().items():
        writer.add_tensor_info(name, sizes, np.dtype(np.float32), 4 * prod(sizes))
    for name, (*outer, n_in) in shape.matrices().items():
        size = stored.row_bytes(n_in)
        width, dtype = (n_in, np.float16) if kind == "f16" else (size, np.uint8)
        writer.add_tensor_info(
            name, (*outer, width), np.dtype(dtype), prod(outer) * size, raw_dtype=stored.kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in _data(shape, stored, np.random.default_rng(seed)):
        writer.write_tensor_data(tensor)
    writer.close()


def _data(shape: Shape, stored: Type, rng: np.random.Generator) -> Iterator[np.ndarray]:
    for sizes, value in shape.vectors().values():
        yield np.full(sizes, value, np.float32)
    for *outer, n_in in shape.matrices().values():
        yield stored.make(rng, prod(outer), n_in).reshape(*outer, -1)


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
