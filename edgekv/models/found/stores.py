"""All stores, in the order in which names are looked up."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from edgekv.models.found import (
    demo,
    gpt4all,
    hugging_face,
    jan,
    llama_cpp,
    lm_studio,
    ollama,
    remembered,
)
from edgekv.models.found.found import Found

STORES: tuple[tuple[str, Callable[[], Iterator[Found]]], ...] = (
    *(
        (store.NAME, store.find)
        for store in (demo, ollama, hugging_face, llama_cpp, lm_studio, jan, gpt4all)
    ),
    (remembered.FOLDER, remembered.find_in_folders),
    (remembered.USED, remembered.find_used),
)
"""What begins a name, and what lists the models there."""


def everything() -> Iterator[Found]:
    """All models of all stores; a file that two stores hold comes twice."""
    for _, find in STORES:
        yield from find()
