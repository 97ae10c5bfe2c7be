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

VOCABULARY = "tokenizer."
_WORDS = "tokenizer.ggml.tokens"
_UINT32, _STRING, _ARRAY = 4, 8, 9


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
    size = f"{arch}.vocab_size"  # llama.cpp makes as many words: not what the file says
    keys = [
        header.file[begin:end]
        for name, (begin, end) in header.spans.items()
        if name != size and not name.startswith(VOCABULARY)
    ]
    keys.append(_text("tokenizer.ggml.model") + struct.pack("<I", _STRING) + _text("none"))
    keys.append(_text(size) + struct.pack("<II", _UINT32, _n_words(header)))
    counts = struct.pack("<QQ", header.n_tensors, len(keys))
    tensors = header.file[header.tensors_at : header.ends_at]
    return b"".join([header.file[:8], counts, *keys, tensors])


def _n_words(header: Header) -> int:
    """How many words the vocabulary has; `Header` has walked over them all.

    Raises KeyError or ValueError if there is none.
    """
    begin, _ = header.spans[_WORDS]
    kind, inner, n = struct.unpack_from("<IIQ", header.file, begin + 8 + len(_WORDS))
    if (kind, inner) != (_ARRAY, _STRING):
        raise ValueError("words that are no texts")
    return int(n)


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()
