"""What a GGUF file is that is no model to chat with, by what it says of itself."""

from __future__ import annotations

import os
from contextlib import suppress

from edgekv.model.header import DAMAGE, Header, opened

VOCABULARY = "tokenizer."
EMBEDDERS = ("bert", "embed", "t5encoder")
"""Parts of the names of architectures that only give embeddings."""
EMBEDDING = (
    "is an embedding model, which writes no text: name a model that answers; in Python"
    " edgekv.Llama(PATH, embedding=True) gives embeddings"
)
_OF_TYPE = {
    "adapter": "is a LoRA adapter, no model: name its model, and give this file with --lora",
    "mmproj": "is a projector of images or sound (mmproj), which edgekv does not use: name the"
    " model that it belongs to",
    "imatrix": "is an importance matrix for quantising, no model: name a model",
    "kvbudget": "is a profile of edgekv's, no model: name its model, and give this file with"
    " --kv-profile",
}
_VOCABULARY_ALONE = "has a vocabulary and no weights: name the model that it is of"


def why_no_model(path: str) -> str:
    """'is a LoRA adapter ...': what stands behind the file's name in a message; empty for a model.

    A file that cannot be read is left to whoever loads it.
    """
    header = _beginning(path)
    if header is None:
        return ""
    kind = header.meta.get("general.type")
    if header.meta.get("general.architecture") == "clip":
        kind = "mmproj"
    if isinstance(kind, str) and kind in _OF_TYPE:
        return _OF_TYPE[kind]
    # of a model in several files the first may have no tensors
    is_whole = not header.meta.get("split.count")
    return _VOCABULARY_ALONE if not header.n_tensors and is_whole else ""


def gives_embeddings(path: str) -> bool:
    """Whether a model is one for embeddings or for ranking: it pools, or its architecture says so.

    False for a file that cannot be read.
    """
    header = _beginning(path)
    arch = header.meta.get("general.architecture") if header else None
    if header is None or not isinstance(arch, str):
        return False
    pools = header.meta.get(f"{arch}.pooling_type", 0)
    return any(part in arch for part in EMBEDDERS) or type(pools) is int and pools > 0


def _beginning(path: str) -> Header | None:
    """A header up to the vocabulary, behind which a converter writes nothing about the kind."""
    with suppress(OSError, *DAMAGE), opened(os.fspath(path)) as data:
        return Header(data, until=VOCABULARY)
    return None
