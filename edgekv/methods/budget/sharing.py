"""share: rows of a plan in proportion to something, and what every head keeps before that."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgekv.methods.budget.base import Fixed, Plan, fit

ALMOST = 1e-9  # a number of rows that is whole but for rounding counts as whole


def protected(plan: Plan) -> NDArray[np.int32]:
    """int32 [n_layer, n_head_kv]: every head's sinks and window, into which no budget cuts."""
    return np.minimum(plan.have, plan.sink + plan.window).astype(np.int32)


def free(plan: Plan) -> int:
    """Rows left to hand out beside protected ones; 0 or less: there is nothing to decide."""
    return plan.total - int(protected(plan).sum())


def flat(plan: Plan) -> Fixed:
    """The same for every head, where the budget does not even hold the protected rows."""
    return Fixed(fit(np.full(plan.have.shape, plan.n_rows, np.int32), plan.have))


def in_proportion(
    weights: NDArray[np.float64],
    total: float,
    room: NDArray[np.float64],
    n_heads: NDArray[np.int64],
) -> NDArray[np.float64]:
    """float [n_layer]: rows per head if `total` rows go to layers of n_heads heads in proportion to
    `weights` per head.

    weights: finite, 0 or more; all zero counts as all equal. room: rows per head that a layer can
    take, at most. What a layer cannot take goes evenly to those that still have room.
    """
    heavy = weights if (weights * n_heads).sum() > 0 else np.ones_like(weights)
    wish = heavy * (total / max(float((heavy * n_heads).sum()), 1e-300))
    fits = np.minimum(wish, room)
    return fits + _evenly(total - float((fits * n_heads).sum()), room - fits, n_heads)


def _evenly(
    total: float, room: NDArray[np.float64], n_heads: NDArray[np.int64]
) -> NDArray[np.float64]:
    """float [n_layer]: the same rows per head for all layers, but none above its room."""
    share = np.zeros(len(room))
    left, heads = max(total, 0.0), int(n_heads.sum())
    # the fullest layer first: what it cannot take is the others'
    for il in np.argsort(room, kind="stable"):
        share[il] = min(room[il], left / max(heads, 1))
        left -= share[il] * n_heads[il]
        heads -= int(n_heads[il])
    return share


def whole(rows: NDArray[np.float64]) -> NDArray[np.int32]:
    """Rows rounded down."""
    return np.floor(rows + ALMOST).astype(np.int32)


def top(scores: NDArray[np.float32], n: int) -> NDArray[np.bool_]:
    """bool [n_scores]: the `n` highest, equal ones from the front. NaN counts as the lowest."""
    if n >= len(scores):
        return np.ones(len(scores), bool)
    if n <= 0:
        return np.zeros(len(scores), bool)
    scores = np.where(np.isnan(scores), -np.inf, scores)
    threshold = np.partition(scores, len(scores) - n)[len(scores) - n]
    chosen = scores > threshold
    chosen[np.flatnonzero(scores == threshold)[: n - int(chosen.sum())]] = True
    return chosen
