"""What is known of a conversation besides the entries in its store."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from edgekv.methods.merge import Folding
from edgekv.methods.query_moments import PackedMoments


@dataclass
class Past:
    """What the engine knows of a conversation besides the store. Arrays are never written to."""

    compressed_at: int = 0
    """Tokens seen when the recent buffer was compressed last."""
    folding: Folding | None = None
    queries: dict[int, PackedMoments] = field(default_factory=dict)
    """By layer: queries of the last prompt that had enough, before RoPE."""
    spread: NDArray[np.float64] | None = None
    """[n_layer, n_head_kv] share of its entries that each head kept of the last prompt."""
    ratio: float = 1.0
    """Share of the full f16 cache's bytes that the last prompt was to keep."""

    @property
    def n_bytes(self) -> int:
        """Of the arrays, some of which other copies may hold too."""
        spread = 0 if self.spread is None else self.spread.nbytes
        return spread + sum(x.n_bytes for x in self.queries.values())

    def copy(self) -> Past:
        return replace(self, folding=deepcopy(self.folding), queries=dict(self.queries))
