"""What a GGUF file is, if it is not a model that writes text.

Projectors, adapters, vocabularies and profiles are GGUF files too, and lie beside models.
"""

from __future__ import annotations

from edgekv.errors import BadInput
from edgekv.model.header import Header, header_of

_CLASSES = {
    "mmproj": "the projector of a model that sees or hears (mmproj); give the model's own file,"
    " edgekv reads text only",
    "adapter": "an adapter (LoRA); give the model that it was made for, and this file with --lora",
    "imatrix": "an importance matrix, from which models are quantised; give the model's own file",
    "kvbudget": "a profile of edgekv's; give the model's own file, and this one with --kv-profile",
}
_BY_ARCHITECTURE = {"clip": "mmproj", "imatrix": "imatrix"}
_VOCABULARY = "a vocabulary without weights; give the model's own file"
EMBEDDER = (
    "it gives embeddings and writes no text: take another model; for embeddings there are"
    " edgekv serve, and embedding=True in Python"
)
_ENCODERS = (
    *("bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2"),
    *("jina-bert-v3", "eurobert", "gemma-embedding", "llama-embed", "t5encoder"),
)
_N_POOLINGS = 4
"""llama.cpp's number 0 is none; mean, first token, last token and rank are the ways to pool."""


def not_a_model(header: Header) -> str:
    """What the file is, and what to do; empty for a model."""
    arch = str(header.meta.get("general.architecture", ""))
    kind = str(header.meta.get("general.type", ""))
    found = _CLASSES.get(kind) or _CLASSES.get(_BY_ARCHITECTURE.get(arch, ""))
    if found:
        return found
    in_parts = header.meta.get("split.count", 0)  # the first part may have no tensors
    return _VOCABULARY if not header.tensors and not in_parts else ""


def is_embedder(header: Header) -> bool:
    """Whether a model was made for embeddings or for ranking, so that what it writes is noise."""
    arch = str(header.meta.get("general.architecture", ""))
    pooling = header.meta.get(f"{arch}.pooling_type", 0)
    return arch in _ENCODERS or pooling in range(1, _N_POOLINGS + 1)


def check(path: str, writes: bool = False, vocab_only: bool = False) -> None:
    """Raises BadInput, one line, for a GGUF file that is no model. writes: also for one that was
    made for embeddings; vocab_only: not for a vocabulary. A damaged file is left to whoever loads
    it.
    """
    header = header_of(path)
    if header is None:
        return
    why = not_a_model(header)
    if why and not (vocab_only and why == _VOCABULARY):
        raise BadInput(f"{path} is {why}")
    if writes and is_embedder(header):
        raise BadInput(f"{path}: {EMBEDDER}")
