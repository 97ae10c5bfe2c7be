"""profile: budgets per KV head that were measured beforehand, once per model.

LU-KV and the probe profile are tables of shares: at a ratio, which part of its rows each head
keeps. This module makes whole rows of them; where tables come from and how they are looked up is
`edgekv.choice.choose`'s business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from edgekv.errors import EdgeKVError
from edgekv.methods.budget.base import Fixed, Plan
from edgekv.methods.budget.sharing import ALMOST, flat, protected

LEAST = 0.01
"""Share of the tokens that every head keeps."""


@dataclass(frozen=True)
class ProfileBudget:
    """A profile's budget; `edgekv.choice.choose` puts in the shares of the model at hand."""

    name: str
    title: str
    paper: str = ""
    kind: str = ""
    """The kind of profile that serves; empty: any that is not for one task alone."""
    shares: Callable[[float], NDArray[np.float64]] | None = None
    """ratio -> float [n_layer, n_head_kv], 0..1, for all layers; None: not yet looked up."""
    params: ClassVar[None] = None
    stats: ClassVar[tuple[str, ...]] = ()

    def start(self, plan: Plan) -> Fixed:
        if self.shares is None:
            raise EdgeKVError(
                f"the budget '{self.name}' needs a model's profile: choose the method with the"
                " model"
            )
        return Fixed(from_shares(self.shares(plan.ratio)[list(plan.layers)], plan))


PROFILES = (
    ProfileBudget("profile", "a share for each head, measured once for the model"),
    ProfileBudget(
        "lukv",
        "a share for each head, by what answers of the model needed",
        "LU-KV, arXiv 2602.08585",
        "lukv",
    ),
    ProfileBudget(
        "evolkv", "a share for each layer, evolved on a task", "EvolKV, arXiv 2509.08315", "evolkv"
    ),
)


def from_shares(shares: NDArray[np.float64], plan: Plan) -> NDArray[np.int32]:
    """int32 [n_layer, n_head_kv]: `shares` (0..1, the plan's shape) of the tokens seen as rows,
    with the plan's total exactly.

    Every head keeps its protected rows and LEAST of the tokens, and no more than it has; all shares
    are scaled by one factor until the sum is the total (or all that there is). Rows that rounding
    leaves go to the largest remainders.
    """
    shares = np.asarray(shares, np.float64)
    assert shares.shape == plan.have.shape and (shares >= 0).all() and np.isfinite(shares).all()
    least = np.minimum(plan.have, np.maximum(protected(plan), int(np.ceil(LEAST * plan.n_tokens))))
    if plan.total <= least.sum():
        return flat(plan).counts
    if plan.total >= plan.have.sum():
        return plan.have.astype(np.int32)
    # a head without a share still takes what nobody else can
    wish = np.maximum(shares, ALMOST) * plan.n_tokens
    scaled = np.clip(wish * _factor(wish, least, plan.have, plan.total), least, plan.have)
    rows = np.floor(scaled).astype(np.int64)
    places = np.argsort(rows - scaled, axis=None, kind="stable")
    room = places[rows.flat[places] < plan.have.flat[places]]
    rows.flat[room[: plan.total - int(rows.sum())]] += 1
    return rows.astype(np.int32)


def _factor(
    wish: NDArray[np.float64], least: NDArray[np.int32], most: NDArray[np.int32], total: int
) -> float:
    """The largest factor at which wish * factor, clipped to least..most, is `total` at most."""
    low, high = 0.0, 1.0
    while np.clip(wish * high, least, most).sum() <= total:
        low, high = high, 2 * high
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if np.clip(wish * middle, least, most).sum() <= total else (low, middle)
        )
    return low
