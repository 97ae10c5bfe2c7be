"""pyramid: rows fall linearly from the first layer to the last, the same for all KV heads of a
layer.

Paper: Cai et al., PyramidKV, arXiv 2406.02069, section 3.2: the last layer keeps 1/beta of the
mean, the first 2 - 1/beta of it; every layer keeps its window beside that (8 rows there, what the
plan protects here). Different from it, the sum is exact (the authors round each layer down), and a
first layer that would keep more than a head has is cut by `edgekv.methods.budget.clip`, which
spreads the rest evenly; the authors flatten the whole slope instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from edgekv.errors import BadInput
from edgekv.methods.budget.base import Fixed, Plan, fit
from edgekv.methods.budget.sharing import in_proportion, whole


@dataclass(frozen=True)
class PyramidParams:
    beta: float = 20.0
    """The last layer keeps 1/beta of the mean, beside what is protected."""

    def __post_init__(self) -> None:
        if not 1 <= self.beta < float("inf"):
            raise BadInput(
                f"beta {self.beta:g} gives no pyramid; give a number, 1 or more, such as 20"
            )


@dataclass(frozen=True)
class Pyramid:
    params: PyramidParams = PyramidParams()
    name: ClassVar[str] = "pyramid"
    title: ClassVar[str] = "more in the first layers than in the last"
    paper: ClassVar[str] = "PyramidKV, arXiv 2406.02069"
    stats: ClassVar[tuple[str, ...]] = ()

    def start(self, plan: Plan) -> Fixed:
        n_layer, n_head_kv = plan.have.shape
        wish = pyramid(
            plan.n_rows, n_layer, n_head_kv, self.params.beta, window=plan.sink + plan.window
        )
        n_heads = (plan.have > 0).sum(axis=1)
        # a layer with fewer heads weighs less, so the slope is scaled to the total
        if (n_heads != n_heads[0]).any():
            base = min(plan.sink + plan.window, plan.n_rows)
            room = np.maximum(plan.have.max(axis=1) - base, 0).astype(np.float64)
            rows = base + in_proportion(
                (wish[:, 0] - base).astype(np.float64),
                plan.total - base * plan.n_heads,
                room,
                n_heads,
            )
            wish = np.broadcast_to(whole(rows)[:, None], wish.shape)
        return Fixed(fit(wish, plan.have))


def pyramid(
    n_rows: int, n_layer: int, n_head_kv: int, beta: float = 20.0, window: int = 8
) -> NDArray[np.int32]:
    """int32 [n_layer, n_head_kv] that falls with the layer and has the mean `n_rows` exactly."""
    assert n_rows >= 0 and beta >= 1
    base = min(window, n_rows)
    share = n_rows - base
    wish = (
        np.linspace(share * (2 - 1 / beta), share / beta, n_layer)
        if n_layer > 1
        else np.array([float(share)])
    )
    rows = base + round_to_sum(wish, share * n_layer)
    return np.repeat(rows[:, None], n_head_kv, axis=1).astype(np.int32)


def round_to_sum(wish: NDArray[np.floating], total: int) -> NDArray[np.int64]:
    """Integers next to `wish` with the sum `total`: largest remainders go up, ties in order."""
    down = np.floor(wish).astype(np.int64)
    missing = total - int(down.sum())
    assert 0 <= missing <= len(wish), "the wishes add up to the total"
    order = np.argsort(-(wish - down), kind="stable")
    down[order[:missing]] += 1
    return down
