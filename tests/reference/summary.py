"""Summary rows of one head, in float64: the regression written as a least-squares problem, attention as a loop over queries."""

from __future__ import annotations

import numpy as np
import torch


def summary(
    keys: np.ndarray, values: np.ndarray, queries: np.ndarray, runs: list[np.ndarray], ridge: float
) -> list[tuple[np.ndarray, np.ndarray, float]]:
    """(key, value, error) for each of `runs`, lists of row numbers; keys, values [n, d] are all rows of the head, queries [m, d]."""
    k, v, q = (torch.from_numpy(np.asarray(x, np.float64)) for x in (keys, values, queries))
    found = []
    for run in runs:
        rows = torch.from_numpy(run)
        weights, wanted, outputs = [], [], []
        for query in q:
            logits = k @ query
            weights.append(logits.softmax(0)[rows].sum() + 1e-6)
            wanted.append(logits[rows].logsumexp(0))
            outputs.append(logits[rows].softmax(0) @ v[rows])
        weight = torch.stack(weights) / sum(weights)
        power = (weight[:, None] * q**2).sum() / q.shape[1]
        left = torch.cat([weight.sqrt()[:, None] * q, (ridge * power).sqrt() * torch.eye(q.shape[1], dtype=q.dtype)])
        right = torch.cat([weight.sqrt() * torch.stack(wanted), torch.zeros(q.shape[1], dtype=q.dtype)])
        key = torch.linalg.lstsq(left, right[:, None]).solution[:, 0]
        error = (weight * (q @ key - torch.stack(wanted)) ** 2).sum().sqrt()
        found.append((key.numpy(), (weight[:, None] * torch.stack(outputs)).sum(0).numpy(), float(error)))
    return found
