"""Summary rows of one head, in float64: groups by SciPy, the regressions as least-squares problems,
attention as a loop over queries.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.cluster.vq import kmeans2


def groups(
    keys: np.ndarray, values: np.ndarray, queries: np.ndarray, n: int, rounds: int, jitter: float
) -> np.ndarray:
    """Which group each row is in. The logits of all queries are a row's place, and `jitter` of
    their power its key itself.
    """
    k, v, q = (np.asarray(x, np.float64) for x in (keys, values, queries))
    spread = (q - q.mean(axis=0)) / np.sqrt(len(q))
    logits = np.concatenate(
        [k @ spread.T, k * np.sqrt(jitter * np.square(spread).sum() / q.shape[1])], axis=1
    )
    points = np.concatenate(
        [logits / np.sqrt(logits.var(axis=0).sum()), v / np.sqrt(v.var(axis=0).sum())], axis=1
    )
    first = points[np.linspace(0, len(points) - 1, n).astype(int)]
    return kmeans2(points, first, iter=rounds, minit="matrix")[1]


def summary(
    keys: np.ndarray,
    values: np.ndarray,
    queries: np.ndarray,
    groups: list[np.ndarray],
    ridge: float,
) -> list[tuple[np.ndarray, np.ndarray, float]]:
    """(key, value, error) for each of `groups`, lists of row numbers; keys, values [n, d] are all
    rows of the head, queries [m, d].
    """
    k, v, q = (torch.from_numpy(np.asarray(x, np.float64)) for x in (keys, values, queries))
    found = []
    for group in groups:
        rows = torch.from_numpy(group)
        weights, wanted, slopes, outputs = [], [], [], []
        for query in q:
            logits = k @ query
            weights.append(logits.softmax(0)[rows].sum() + 1e-6)
            wanted.append(logits[rows].logsumexp(0))
            slopes.append(logits[rows].softmax(0) @ k[rows])
            outputs.append(logits[rows].softmax(0) @ v[rows])
        weight = torch.stack(weights) / sum(weights)
        slope = (weight[:, None] * torch.stack(slopes)).sum(0)
        power = (weight[:, None] * q**2).sum() / q.shape[1]
        left = torch.cat(
            [
                weight.sqrt()[:, None] * q,
                (ridge * power).sqrt() * torch.eye(q.shape[1], dtype=q.dtype),
            ]
        )
        right = torch.cat(
            [
                weight.sqrt() * (torch.stack(wanted) - q @ slope),
                torch.zeros(q.shape[1], dtype=q.dtype),
            ]
        )
        key = slope + torch.linalg.lstsq(left, right[:, None]).solution[:, 0]
        error = (weight * (q @ key - torch.stack(wanted)) ** 2).sum().sqrt()
        found.append(
            (key.numpy(), (weight[:, None] * torch.stack(outputs)).sum(0).numpy(), float(error))
        )
    return found


def fitted(
    keys: np.ndarray,
    values: np.ndarray,
    queries: np.ndarray,
    kept: np.ndarray,
    rows: tuple[np.ndarray, np.ndarray],
    ridge: float,
) -> np.ndarray:
    """The values of the summary `rows`, keys [n, d] and values [n, d_v], such that attention over
    the rows `kept` and them is what it was over all.
    """
    new_keys, new_values = (torch.from_numpy(np.asarray(x, np.float64)) for x in rows)
    k, v, q = (torch.from_numpy(np.asarray(x, np.float64)) for x in (keys, values, queries))
    stays = torch.from_numpy(kept)
    there, then = torch.cat([k[stays], new_keys]), torch.cat([v[stays], new_values])
    weights = [(there @ query).softmax(0) for query in q]
    missing = [(k @ x).softmax(0) @ v - w @ then for x, w in zip(q, weights, strict=True)]
    part = torch.stack(weights)[:, len(stays) :]
    power = ridge * part.square().sum() / len(q)
    left = torch.cat([part, power.sqrt() * torch.eye(len(new_keys), dtype=q.dtype)])
    right = torch.cat([torch.stack(missing), torch.zeros_like(new_values)])
    return (new_values + torch.linalg.lstsq(left, right).solution).numpy()
