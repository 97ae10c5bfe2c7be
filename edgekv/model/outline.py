"""A model's header without its vocabulary, which llama.cpp loads in milliseconds.

Reading 150,000 words into tables is nearly all that it does where no weights are read. Nothing that
a model's shape, cache or buffers depend on is left out but the number of words, which is put in.
"""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from edgekv.model.header import Header
from edgekv.model.kind import VOCABULARY

_WORDS = "tokenizer.ggml.tokens"
_STRING, _UINT32 = 8, 4


@contextmanager
def outline(header: Header) -> Iterator[str]:
    """A `with` block that has the path of the outline of a model in one file.

    The outline is as long as the model, and takes as much of the disk as the model's header without
    vocabulary. Raises OSError, or one of `header.DAMAGE` for a header without a vocabulary.
    """
    begin = _shortened(header)
    begin += bytes(-len(begin) % header.meta.get("general.alignment", 32))
    n_bytes = len(begin) + max(len(header.file) - header.n_bytes, 0)
    with tempfile.TemporaryDirectory(prefix="edgekv-") as folder:
        name = os.path.join(folder, "outline.gguf")
        with open(name, "wb") as file:
            file.write(begin)
            file.truncate(n_bytes)  # llama.cpp checks that tensors end within the file
        yield name


def _shortened(header: Header) -> bytes:
    """The header's bytes without the vocabulary, before the padding."""
    arch = header.meta["general.architecture"]
    kept = {name: span for name, span in header.spans.items() if not name.startswith(VOCABULARY)}
    keys = [header.file[begin:end] for begin, end in kept.values()]
    keys.append(_key("tokenizer.ggml.model", struct.pack("<I", _STRING) + _text("none")))
    size = f"{arch}.vocab_size"
    if size not in kept:
        keys.append(_key(size, struct.pack("<II", _UINT32, _n_words(header))))
    counts = struct.pack("<QQ", header.n_tensors, len(keys))
    tensors = header.file[header.tensors_at : header.ends_at]
    return b"".join([header.file[:8], counts, *keys, tensors])


def _n_words(header: Header) -> int:
    """How many words the vocabulary has. Raises KeyError if there is none."""
    begin, _ = header.spans[_WORDS]
    at = begin + 8 + len(_WORDS) + 8  # behind the key, the type, and the words' type
    n: int = struct.unpack_from("<Q", header.file, at)[0]
    return n


def _key(name: str, value: bytes) -> bytes:
    return _text(name) + value


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()
