"""What of a conversation's text the cache has kept, for the page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from edgekv.errors import BadInput
from edgekv.kept import look_page
from edgekv.kept.tokens import kept_by, layers_of, pieces
from edgekv.llama.llama import Llama


@dataclass(frozen=True)
class Kept:
    """Which tokens of a conversation stayed, and in how many heads.

    tokens, and counts: how many of n_heads heads keep each; layers: those that can be looked
    at.
    """

    layers: list[int]
    n_heads: int
    tokens: list[int]
    counts: list[int]


def look(llm: Llama, tokens: list[int], layer: int | None) -> Kept:
    """Of the conversation whose rows the store of `llm` holds: in all layers, or in one.

    Raises BadInput for a layer that does not choose.
    """
    assert llm.engine is not None
    store = llm.engine.store
    layers = layers_of(store)
    if layer is not None and layer not in layers:
        raise BadInput(f"layer {layer} chooses nothing; look at one of {layers}")
    counts, n_heads = kept_by(store, len(tokens), layers if layer is None else [layer])
    return Kept(layers, n_heads, tokens, counts.tolist())


def shown(llm: Llama, kept: Kept) -> dict[str, Any]:
    """JSON for the page: tokens are [text, heads that keep it, level]. Any thread may ask."""
    texts = look_page.texts(pieces(llm, kept.tokens), kept.counts)
    tokens = [(text, n, look_page.level(n, kept.n_heads)) for text, n in texts]
    return {"layers": kept.layers, "n_heads": kept.n_heads, "tokens": tokens}
