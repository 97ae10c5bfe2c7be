"""Which tokens of a text stay in the store of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from edgekv import Llama
    from edgekv.native.store import Store


def layers_of(store: Store) -> list[int]:
    """Layers that attend to everything and have KV entries of their own."""
    return [
        il for il, layer in enumerate(store.layers) if layer.selects and layer.reads in (-1, il)
    ]


def kept_by(
    store: Store, n_tokens: int, layers: Sequence[int] | None = None
) -> tuple[NDArray[np.int32], int]:
    """int32 [n_tokens]: how many KV heads kept each token; and how many heads there are.

    layers: whose heads; None: of all that `layers_of` has.
    """
    counts, n_heads = np.zeros(n_tokens, np.int32), 0
    for il in layers_of(store) if layers is None else layers:
        for head in range(store.layers[il].n_head_kv):
            counts[np.unique(store.positions(il, head))] += 1
            n_heads += 1
    return counts, n_heads


def pieces(llm: Llama, tokens: list[int]) -> list[bytes]:
    """The bytes that each token stands for; a character may be spread over several."""
    return [llm.detokenize([token], special=True) for token in tokens]
