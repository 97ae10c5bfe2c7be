"""How the reference judges keys: column statistics of the observing queries' attention, and SnapKV's score and choice."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

KERNEL = 7


@dataclass(frozen=True)
class Columns:
    """Column statistics float32 [n_head_kv, n_rows] of attention [n_head_kv, G, n_queries, n_rows].

    mean: over queries and the G heads; var: over queries (population), then mean over the heads; max: over both;
    entropy: -sum of a log a over queries and heads.
    """

    mean: torch.Tensor
    var: torch.Tensor
    max: torch.Tensor
    entropy: torch.Tensor


def columns(attention: torch.Tensor) -> Columns:
    return Columns(mean=attention.mean((1, 2)), var=attention.var(2, correction=0).mean(1), max=attention.amax((1, 2)),
                   entropy=-torch.xlogy(attention, attention).sum((1, 2)))


def snapkv(attention: torch.Tensor) -> torch.Tensor:
    """SnapKV: mean over the window's queries and the G heads, then max-pool along the rows. [n_head_kv, n_rows]."""
    return F.max_pool1d(attention.mean((1, 2)), KERNEL, stride=1, padding=KERNEL // 2)


def keep_best(scores: torch.Tensor, count: int, sink: int = 4, window: int = 32) -> list[np.ndarray]:
    """The rows of each KV head that survive, ascending: sinks, window, then the best scored, ties to the earlier row."""
    n_rows = scores.shape[1]
    protected = scores.clone()
    protected[:, :sink] = torch.inf
    protected[:, n_rows - window:] = torch.inf
    order = np.argsort(-protected.numpy(), axis=1, kind="stable")
    return [np.sort(rows[:count]) for rows in order]
