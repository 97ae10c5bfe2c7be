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
from edgekv.methods.late import Late, LateParams
from edgekv.methods.layer import LayerStats
from edgekv.methods.pooling import check_kernel


@dataclass(frozen=True)
class JointParams(KVzapParams):
    kernel: int = 3
    """Width of late's pool in tokens, odd."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_kernel(self.kernel)


@dataclass(frozen=True)
class Joint(KVzap):
    name: ClassVar[str] = "joint"
    title: ClassVar[str] = "tokens that kvzap and late both rank high"
    paper: ClassVar[str] = ""
    observe: ClassVar[Observe] = Late.observe
    params: ClassVar[JointParams] = JointParams()

    def score(self, layer: LayerStats, params: KVzapParams | None = None) -> NDArray[np.float32]:
        params = params or self.params
        assert isinstance(params, JointParams)
        needed = super().score(layer, params)
        wanted = Late().score(layer, LateParams(params.kernel))
        out = np.full(layer.pos.shape, -np.inf, np.float32)
        for k, there in enumerate(~layer.absent):
            out[k, there] = rank(needed[k, there]) + rank(wanted[k, there])
        return out
