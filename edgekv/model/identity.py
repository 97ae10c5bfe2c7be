"""What makes two model files the same model: shape, the first rows of the token embedding, and
pieces of every layer's attention weights.

The name and the place of a file do not count, nor do metadata that people edit or the order of
tensors. Another quantisation of the same weights is another model: its heads see other numbers.
(Files whose embeddings are quantised alike share the profiles that were made before attention
weights counted; those name no attention weights and stay accepted.)

Only pieces of the attention weights are hashed. Further training and merging change some of them,
and so do permuted KV heads, unless a layer has more than 16 and only heads between the pieces
change places. A change of a few values between the pieces is not seen, nor is one of feed-forward
layers alone.
"""

from __future__ import annotations

import hashlib
import mmap
import re
from dataclasses import dataclass, field, replace
from typing import Any

from edgekv.errors import BadInput
from edgekv.model import fingerprint, kind
from edgekv.model.header import DAMAGE, Header, opened

EMBEDDING = "token_embd.weight"
_HASHED = 1 << 16  # bytes of the embedding
_ATTENTION = re.compile(r"blk\.\d+\.attn")
_N_PIECES, _PIECE = 16, 1 << 10
"""Pieces of each attention tensor, and bytes of each: one in every KV head of most models, and a
few MiB of a model of 8B."""
_MAX_LAYERS, _MAX_SIZE = 4096, 1 << 20  # numbers that make no sense must not fill the memory


@dataclass(frozen=True)
class Identity:
    """One model: architecture, layers, KV heads of each layer, sizes of a head, SHA-256 (hex) of
    the embedding's first 64 KiB and of pieces of the attention weights.

    attention: empty if unknown, as in older profiles; it then fits any.
    Raises ValueError for numbers that no model has.
    """

    arch: str
    n_layer: int
    n_head_kv: tuple[int, ...]
    d_head_k: int
    d_head_v: int
    embedding: str
    attention: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        sizes = (*self.n_head_kv, self.d_head_k, self.d_head_v)
        if not all(type(n) is int and 0 <= n <= _MAX_SIZE for n in (self.n_layer, *sizes)):
            raise ValueError("no sizes of a model")
        if len(self.n_head_kv) != self.n_layer or not 0 < self.n_layer <= _MAX_LAYERS:
            raise ValueError("layers and their KV heads")

    @property
    def digest(self) -> str:
        """32 hex digits that name the model in file names."""
        return hashlib.sha256((repr(self) + self.attention).encode()).hexdigest()[:32]

    @property
    def older(self) -> Identity:
        """The same without attention weights, as edgekv named models before these counted."""
        return replace(self, attention="")

    def difference(self, other: Identity) -> str | None:
        """What of `other` is different, in words; None for the same model."""
        for name, what in _WORDS.items():
            mine, others = getattr(self, name), getattr(other, name)
            if mine == others or name == "attention" and not (mine and others):
                continue
            return f"{what} differ" if name in _LONG else f"{what} {others}, not {mine}"
        return None


_WORDS = {
    "arch": "architecture",
    "n_layer": "layers:",
    "n_head_kv": "KV heads",
    "d_head_k": "K size of a head",
    "d_head_v": "V size of a head",
    "embedding": "its token embeddings",
    "attention": "its attention weights",
}
_LONG = ("n_head_kv", "embedding", "attention")
"""Too long to be shown."""


def identify(path: str) -> Identity:
    """The identity of the GGUF model at `path`.

    Raises BadInput if it cannot be read or is no model.
    """
    try:
        with opened(path) as data:
            return _identity(Header(data), data)
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror}); name a .gguf file") from None
    except DAMAGE:
        kind.check(path)  # what it is, if it is something else
        raise BadInput(
            f"{path} is no GGUF model that edgekv can read, or it is incomplete: download it again"
        ) from None


def _identity(header: Header, file: mmap.mmap) -> Identity:
    arch, heads, d_head_k, d_head_v = shape(header.meta)
    first = header.n_bytes + header.tensors[EMBEDDING].offset
    embedding = file[first : first + _HASHED]
    if not embedding:
        raise ValueError("the embedding is missing")
    embedded = hashlib.sha256(embedding).hexdigest()
    return Identity(arch, len(heads), heads, d_head_k, d_head_v, embedded, _attention(header, file))


def _attention(header: Header, file: mmap.mmap) -> str:
    """SHA-256 (hex) of pieces of all attention tensors, by name; empty if there are none.

    A tensor ends where the next one begins, so types of numbers need not be known.
    """
    begins = sorted({tensor.offset for tensor in header.tensors.values()})
    ends = dict(zip(begins, [*begins[1:], len(file) - header.n_bytes], strict=True))
    names = sorted(filter(_ATTENTION.match, header.tensors))
    if not names:
        return ""
    offsets = (header.tensors[name].offset for name in names)
    spans = [(header.n_bytes + begin, ends[begin] - begin) for begin in offsets]
    if any(size <= 0 for _, size in spans):
        raise ValueError("the file ends before a tensor")
    return fingerprint.of(file, spans, _N_PIECES, _PIECE)


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
