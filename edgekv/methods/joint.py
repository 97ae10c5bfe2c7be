"""joint: what repeating the text would need, and what the last few hundred tokens needed, together.

Two scores of this package judge by what comes next in two ways: kvzap by whatever may be asked
about the text, late by how the text goes on. Each loses what only the other one sees. Rows are
ranked by both within their head, and the ranks are added. This mix is edgekv's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from edgekv.methods.base import Observe
from edgekv.methods.kvzap import KVzap, KVzapParams, rank
from edgekv.methods.late import Late
from edgekv.methods.layer import LayerStats


@dataclass(frozen=True)
class Joint(KVzap):
    name: ClassVar[str] = "joint"
    title: ClassVar[str] = "rows that kvzap and late both rank high"
    paper: ClassVar[str] = ""
    observe: ClassVar[Observe] = Late.observe

    def score(self, layer: LayerStats, params: KVzapParams | None = None) -> NDArray[np.float32]:
        needed, wanted = super().score(layer, params), Late().score(layer)
        out = np.full(layer.pos.shape, -np.inf, np.float32)
        for k, there in enumerate(~layer.absent):
            out[k, there] = rank(needed[k, there]) + rank(wanted[k, there])
        return out
