"""All stores, in the order in which names are looked up."""

from __future__ import annotations

from collections.abc import Iterator

from edgekv.models.found import demo, hugging_face, llama_cpp, ollama, remembered
from edgekv.models.found.found import Found
from edgekv.models.found.plain import gpt4all, jan, lm_studio

STORES = (demo, ollama, hugging_face, llama_cpp, lm_studio, jan, gpt4all)


def everything() -> Iterator[Found]:
    """All models of all stores; a file that two stores hold comes twice."""
    for store in STORES:
        yield from store.find()
    yield from remembered.find_in_folders()
    yield from remembered.find_used()
