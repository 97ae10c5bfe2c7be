"""What makes two model files the same model: shape, and the first rows of the token embedding.

The name and the place of a file do not count, nor does metadata that people edit. Another
quantisation of the same weights is
another model: its heads see other numbers.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from edgekv.errors import BadInput
from edgekv.model.header import DAMAGE, Header, opened

EMBEDDING = "token_embd.weight"
_HASHED = 1 << 16  # bytes of the embedding
_MAX_LAYERS, _MAX_SIZE = 4096, 1 << 20  # numbers that make no sense must not fill the memory


@dataclass(frozen=True)
class Identity:
    """One model: architecture, layers, KV heads of each layer, sizes of a head, SHA-256 (hex) of
    the embedding's first 64 KiB.

    Raises ValueError for numbers that no model has.
    """

    arch: str
    n_layer: int
    n_head_kv: tuple[int, ...]
    d_head_k: int
    d_head_v: int
    embedding: str

    def __post_init__(self) -> None:
        sizes = (*self.n_head_kv, self.d_head_k, self.d_head_v)
        if not all(type(n) is int and 0 <= n <= _MAX_SIZE for n in (self.n_layer, *sizes)):
            raise ValueError("no sizes of a model")
        if len(self.n_head_kv) != self.n_layer or not 0 < self.n_layer <= _MAX_LAYERS:
            raise ValueError("layers and their KV heads")

    @property
    def digest(self) -> str:
        """32 hex digits that name the model in file names."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:32]

    def difference(self, other: Identity) -> str | None:
        """What of `other` is different, in words; None for the same model."""
        for name, what in _WORDS.items():
            mine, others = getattr(self, name), getattr(other, name)
            if mine != others:
                return (
                    f"{what} differ"
                    if name in ("n_head_kv", "embedding")
                    else f"{what} {others}, not {mine}"
                )
        return None


_WORDS = {
    "arch": "architecture",
    "n_layer": "layers:",
    "n_head_kv": "KV heads",
    "d_head_k": "K size of a head",
    "d_head_v": "V size of a head",
    "embedding": "its token embeddings",
}


def identify(path: str) -> Identity:
    """The identity of the GGUF model at `path`.

    Raises BadInput if it cannot be read or is no model.
    """
    try:
        with opened(path) as data:
            return _identity(Header(data))
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror}); name a .gguf file") from None
    except DAMAGE:
        raise BadInput(
            f"{path} is no GGUF model that edgekv can read, or it is incomplete: download it again"
        ) from None


def _identity(header: Header) -> Identity:
    arch, heads, d_head_k, d_head_v = shape(header.meta)
    first = header.n_bytes + header.tensors[EMBEDDING].offset
    embedding = header.file[first : first + _HASHED]
    if not embedding:
        raise ValueError("the embedding is missing")
    return Identity(
        arch, len(heads), heads, d_head_k, d_head_v, hashlib.sha256(embedding).hexdigest()
    )


def shape(meta: dict[str, Any]) -> tuple[str, tuple[int, ...], int, int]:
    """Architecture, KV heads of each layer, sizes of a K and of a V head.

    Raises one of DAMAGE if the metadata lack them or make no sense.
    """
    arch = meta["general.architecture"]
    if not isinstance(arch, str) or not arch.isprintable():
        raise ValueError("the name of the architecture")
    keys = ("block_count", "attention.head_count", "embedding_length")
    n_layer, n_head, n_embd = (meta[f"{arch}.{key}"] for key in keys)
    heads = meta.get(f"{arch}.attention.head_count_kv", n_head)
    if type(n_layer) is not int or not 0 < n_layer <= _MAX_LAYERS:
        raise ValueError("layers")
    heads = tuple(heads) if isinstance(heads, list) else (heads,) * n_layer
    d_head = n_embd // (max(n_head) if isinstance(n_head, list) else n_head)
    d_head_k, d_head_v = (
        meta.get(f"{arch}.attention.{part}_length", d_head) for part in ("key", "value")
    )
    found = Identity(arch, n_layer, heads, d_head_k, d_head_v, "")  # checks the numbers
    return arch, heads, found.d_head_k, found.d_head_v
