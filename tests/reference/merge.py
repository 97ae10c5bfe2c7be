"""D2O's merge as a plain loop over the tokens of one head."""

from __future__ import annotations

import math

import numpy as np


def merge(
    evicted: tuple[np.ndarray, np.ndarray],
    kept: tuple[np.ndarray, np.ndarray],
    threshold: float | None,
    beta: float = 0.7,
) -> tuple[np.ndarray, np.ndarray, float | None]:
    """Kept keys and values [n_kept, d] after the evicted ones were merged into them, and the new
    threshold (float64).
    """
    k_out, v_out = (x.astype(np.float64).copy() for x in kept)
    if not len(evicted[0]) or not len(kept[0]):
        return k_out, v_out, threshold
    similar, nearest = [], []
    for key in evicted[0].astype(np.float64):
        u = [
            float(key @ other / (np.linalg.norm(key) * np.linalg.norm(other)))
            for other in kept[0].astype(np.float64)
        ]
        nearest.append(int(np.argmax(u)))
        similar.append(max(u))
    mean = sum(similar) / len(similar)
    threshold = mean if threshold is None else beta * mean + (1 - beta) * threshold
    for j in range(len(kept[0])):
        mine = [i for i in range(len(similar)) if nearest[i] == j and similar[i] >= threshold]
        total = sum(math.exp(similar[i]) for i in mine) + math.e
        for out, rows in ((k_out, evicted[0]), (v_out, evicted[1])):
            out[j] = out[j] * (math.e / total) + sum(
                (math.exp(similar[i]) / total * rows[i] for i in mine), np.zeros(out.shape[1])
            )
    return k_out, v_out, threshold
