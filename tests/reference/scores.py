"""How the reference judges keys: column statistics of the observing queries' attention, every
method's score, and the choice.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

KERNEL = 7


@dataclass(frozen=True)
class Columns:
    """Column statistics float32 [n_head_kv, n_rows] of attention [n_head_kv, G, n_queries, n_rows].

    mean: over queries and the G heads; var: over queries (population), then mean over the heads;
    max: over both;
    entropy: -sum of a log a over queries and heads.
    """

    mean: torch.Tensor
    var: torch.Tensor
    max: torch.Tensor
    entropy: torch.Tensor


def columns(attention: torch.Tensor) -> Columns:
    return Columns(
        mean=attention.mean((1, 2)),
        var=attention.var(2, correction=0).mean(1),
        max=attention.amax((1, 2)),
        entropy=-torch.xlogy(attention, attention).sum((1, 2)),
    )


def snapkv(attention: torch.Tensor) -> torch.Tensor:
    """SnapKV: mean over the window's queries and the G heads, then max-pool along the rows.
    [n_head_kv, n_rows].
    """
    return F.max_pool1d(attention.mean((1, 2)), KERNEL, stride=1, padding=KERNEL // 2)


def cake(attention: torch.Tensor, gamma: float = 200.0, kernel: int = 5) -> torch.Tensor:
    """CAKE, eq. 11: mean + gamma * variance over the window's queries, then a mean pool.
    [n_head_kv, n_rows].
    """
    indicator = attention.mean(2) + gamma * attention.var(2, correction=0)
    return F.avg_pool1d(indicator, kernel, stride=1, padding=kernel // 2).mean(1)


def h2o(attention: torch.Tensor) -> torch.Tensor:
    """H2O: the column sums over all queries, mean over the G heads. [n_head_kv, n_rows]."""
    return attention.sum(2).mean(1)


def tova(attention: torch.Tensor) -> torch.Tensor:
    """TOVA: what the last query pays, mean over the G heads. [n_head_kv, n_rows]."""
    return attention[:, :, -1].mean(1)


def kvzip(attention: torch.Tensor) -> torch.Tensor:
    """KVzip: the most that any query of the probe pays in any of the G heads. [n_head_kv,
    n_rows].
    """
    return attention.amax((1, 2))


def knorm(keys: torch.Tensor) -> torch.Tensor:
    """-length of keys [n_head_kv, n_rows, d]. [n_head_kv, n_rows]."""
    return -keys.norm(dim=-1)


def keydiff(keys: torch.Tensor) -> torch.Tensor:
    """KeyDiff: -cosine of keys [n_head_kv, n_rows, d] with the mean of the normalised keys of their
    head. [n_head_kv, n_rows].
    """
    return -F.cosine_similarity(keys, F.normalize(keys, dim=-1).mean(1, keepdim=True), dim=-1)


def kvzap(
    keys: torch.Tensor, values: torch.Tensor, weights: torch.Tensor, pairs: str
) -> torch.Tensor:
    """KVzap: what linear maps [n_head_kv, n_features + 1] predict of keys [n_head_kv, n_rows, d_k]
    and values [.., d_v]. [n_head_kv, n_rows].
    """
    turned = (
        keys.unflatten(-1, (-1, 2)).norm(dim=-1)
        if pairs == "neighbours"
        else torch.stack(keys.chunk(2, -1)).norm(dim=0)
    )
    lengths = torch.cat(
        [turned, keys.norm(dim=-1, keepdim=True), values.norm(dim=-1, keepdim=True)], -1
    )
    features = torch.cat(
        [
            F.normalize(values, dim=-1),
            (lengths + 1e-3).log(),
            keydiff(keys)[..., None],
            torch.ones_like(keys[..., :1]),
        ],
        -1,
    )
    return (features * weights[:, None]).sum(-1)


def expected(
    keys: torch.Tensor,
    values: torch.Tensor,
    raw_q: torch.Tensor,
    turn: torch.Tensor,
    sink: int = 4,
    epsilon: float = 0.02,
) -> torch.Tensor:
    """Expected attention, float64 [n_head_kv, n_rows]; NaN for the sinks.

    keys, values: [n_head_kv, n_rows, d]; raw_q: queries before RoPE [n_head, n_rows, d]; turn:
    rotation matrices of later positions [n_future, d, d].
    """
    turned = turn.double().mean(0)
    worth = torch.full(keys.shape[:2], torch.nan, dtype=torch.float64)
    for k in range(len(keys)):
        x, shares = keys[k, sink:].double(), []
        for queries in raw_q.chunk(len(keys))[k]:
            asked = queries[sink:].double() @ turned.T / keys.shape[-1] ** 0.5
            spread = asked - asked.mean(0)
            variance = ((x @ spread.T) ** 2).mean(1)
            shares.append((x @ asked.mean(0) + variance / 2).softmax(0))
        worth[k, sink:] = (torch.stack(shares).mean(0) + epsilon) * values[k, sink:].double().norm(
            dim=1
        )
    return worth


def keep_best(
    scores: torch.Tensor, count: int, sink: int = 4, window: int = 32
) -> list[np.ndarray]:
    """The rows of each KV head that survive, ascending: sinks, window, then the best scored, ties
    to the earlier row.
    """
    n_rows = scores.shape[1]
    protected = scores.clone()
    protected[:, :sink] = torch.inf
    protected[:, n_rows - window :] = torch.inf
    order = np.argsort(-protected.numpy(), axis=1, kind="stable")
    return [np.sort(rows[:count]) for rows in order]
