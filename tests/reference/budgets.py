"""Budgets as plain loops: what the vectorised ones must give, row for row.

Scores are lists [n_layer][n_head_kv] of 1-D arrays with +inf for protected rows; attention is torch
[n_head_kv, G, n_queries, n_rows].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import torch

Scores = Sequence[Sequence[np.ndarray]]


def best(scores: Scores, n: int) -> np.ndarray:
    """int [n_layer, n_head_kv]: how many of the n best of all scores are each head's; of equal ones
    the earlier head's count.
    """
    everything = sorted(
        (
            (-value, il, k)
            for il, heads in enumerate(scores)
            for k, head in enumerate(heads)
            for value in head
        )
    )
    counts = np.zeros((len(scores), len(scores[0])), int)
    for _, il, k in everything[:n]:
        counts[il, k] += 1
    return counts


def adakv(heads: Sequence[np.ndarray], equal: int, alpha: float = 0.2) -> np.ndarray:
    """int [n_head_kv] of one layer whose heads would get `equal` rows each without competition."""
    raised = []
    for head in heads:
        head = sorted(head, reverse=True)
        head[: int(alpha * equal)] = [math.inf] * int(alpha * equal)
        raised.append(np.array(head))
    return best([raised], equal * len(heads))[0]


def log_preference(attention: torch.Tensor, window: int, tau1: float, tau2: float) -> float:
    """CAKE, eq. 4 to 6, for the window's attention of one layer. The variance is a mean over G, as
    the engine's is.
    """
    outside = attention[..., :-window].double()
    dispersion = -torch.xlogy(outside, outside).sum()
    shift = outside.var(2, correction=0).mean(1).sum()
    return float(dispersion.log() / tau1 + shift.log() / tau2)


def variance(attention: torch.Tensor) -> float:
    """D2O: variance over the rows of the column sums of all queries [n_head_kv, G, n, n], mean over
    the KV heads.
    """
    return float(attention.double().sum(2).mean(1).var(1, correction=0).mean())


def divide(weights: Sequence[float], rows: float, room: Sequence[float]) -> list[float]:
    """Rows of each layer in proportion to its weight; what is above a layer's room goes evenly to
    the others, again and again.
    """
    got = [min(rows * w / sum(weights), r) for w, r in zip(weights, room)]
    for _ in range(len(got)):
        left = rows - sum(got)
        open_layers = [i for i in range(len(got)) if got[i] < room[i]]
        for i in open_layers:
            got[i] = min(got[i] + left / len(open_layers), room[i])
    return got


def cascade(weights: Sequence[Sequence[float]], rows: float, room: float) -> list[list[int]]:
    """Whole rows per head after each layer, when `rows` are divided anew after layer m by
    weights[m] (m + 1 of them).
    """
    have, stages = [], []
    for w in weights:
        have = divide(w, rows, [*have, room])
        stages.append([math.floor(x + 1e-9) for x in have])
    return stages


def unit_weights(variances: Sequence[float]) -> list[float]:
    """D2O: exp(-f) with f brought to 0..1."""
    low, high = min(variances), max(variances)
    return [math.exp(-(f - low) / (high - low)) if high > low else 1.0 for f in variances]


def dynamickv(scores: Scores, total: int, room: int, r_max: float, m: int) -> list[int]:
    """DynamicKV, Algorithm 1, in exact fractions: rows per head of each layer beside the protected
    ones, `total` of all heads together.

    scores without the protected rows; room: rows of a head beside them.
    """
    n_layer, n_head_kv = len(scores), len(scores[0])
    mean = Fraction(total, n_layer * n_head_kv)
    have: list[Fraction] = []
    for il in range(n_layer):
        have.append(min(Fraction(r_max) * mean, Fraction(room)))
        if (il + 1) % m == 0 or il + 1 == n_layer or sum(map(math.floor, have)) > mean * n_layer:
            counts = best(scores[: il + 1], math.floor(mean * n_head_kv * (il + 1))).sum(1).tolist()
            have = divide(
                [Fraction(n) for n in counts] if any(counts) else [Fraction(1)] * len(counts),
                mean * n_layer,
                have,
            )
    return [math.floor(x) for x in have]
