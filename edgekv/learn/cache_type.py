"""The cache type of a model that is loaded, and another one for it."""

from __future__ import annotations

from typing import Any

from edgekv.model import facts


def kind_of(llm: Any) -> str:
    """The cache type of a model's context, as in `edgekv_lab.eval.sample.Row`."""
    names = {number: name for name, (number, _, _) in facts.cache_types.items()}
    k, v = names[int(llm.context_params.type_k)], names[int(llm.context_params.type_v)]
    return k if k == v else f"{k}/{v}"


def store_as(llm: Any, kind: str, *, plain: bool = False) -> bool:
    """Give a model a cache of another type; the conversation starts anew. plain: rows are stored
    as llama.cpp's cache stores them (`Store.plain`); returns whether that makes a difference.
    Raises EdgeKVError if there is no room."""
    k, _, v = kind.partition("/")
    llm.context_params.type_k = facts.cache_types[k][0]
    llm.context_params.type_v = facts.cache_types[v or k][0]
    llm.renew_context()
    if not plain or not llm.engine or llm.engine.store.plain:
        return False
    llm.engine.store.make_plain()
    return True
