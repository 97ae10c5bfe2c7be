"""Which rows stay: the only top-k of the repository."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edgekv.base.defaults import SINK, WINDOW


def keep(
    scores: NDArray[np.float32],
    counts: ArrayLike,
    pos: NDArray[np.int32],
    n_seen: int,
    sink: int = SINK,
    window: int = WINDOW,
) -> list[NDArray[np.int32]]:
    """Rows to keep, for each KV head an int32 array of min(counts[k], rows of the head) row
    indices.

    scores: float [n_head_kv, n_rows], higher = keep; NaN counts as the lowest.
    counts: int [n_head_kv]. pos: int [n_head_kv, n_rows], each row's token index, -1 where a head
    has no row.
    n_seen: tokens read so far. The rows of the first `sink` and the last `window` tokens are
    protected.

    Order: the protected rows by token index, then the others by falling score, ties by token index.
    So the rows of a smaller count are the first rows of a larger one, as long as both hold all
    protected rows. If the count is less
    than the protected rows, the most recent of them stay: sinks go first, then the window's oldest.
    """
    counts = np.asarray(counts)
    assert scores.shape == pos.shape and counts.shape == scores.shape[:1]
    heads = zip(scores, counts, pos, strict=True)
    return [_keep_head(s, int(n), p, n_seen, sink, window) for s, n, p in heads]


def protect(
    scores: NDArray[np.float32],
    pos: NDArray[np.int32],
    n_seen: int,
    sink: int = SINK,
    window: int = WINDOW,
) -> NDArray[np.float32]:
    """`scores` with +inf for the rows that `keep` protects, for budgets. Shapes as there."""
    safe = (pos >= 0) & ((pos < sink) | (pos >= n_seen - window))
    return np.where(safe, np.float32(np.inf), scores).astype(np.float32, copy=False)


def _keep_head(
    score: NDArray[np.float32],
    count: int,
    pos: NDArray[np.int32],
    n_seen: int,
    sink: int,
    window: int,
) -> NDArray[np.int32]:
    """`keep` for one head: score, pos [n_rows]."""
    rows: NDArray[np.int32] = np.arange(len(pos), dtype=np.int32)
    token = pos
    # not the rows of a first turn
    if len(pos) and not (pos[0] >= 0 and (pos[1:] > pos[:-1]).all()):
        rows = _in_token_order(pos)
        token, score = pos[rows], score[rows]
    n_sink = int(np.searchsorted(token, sink))
    n_before = max(int(np.searchsorted(token, n_seen - window)), n_sink)
    protected = np.concatenate([rows[:n_sink], rows[n_before:]])
    if count <= len(protected):
        return protected[len(protected) - count :]
    rest = _top(score[n_sink:n_before], count - len(protected))
    return np.concatenate([protected, rows[n_sink:n_before][rest]])


def _in_token_order(pos: NDArray[np.int32]) -> NDArray[np.int32]:
    """Indices of the rows that exist, by token index."""
    rows = np.flatnonzero(pos >= 0).astype(np.int32)
    return rows[np.argsort(pos[rows], kind="stable")]


def _top(score: NDArray[np.float32], n: int) -> NDArray[np.int64]:
    """Indices of the n highest scores (all if there are fewer), highest first, equal ones in order.

    Score and index are packed into one integer that sorts like the pair, which needs no slow stable
    sort.
    """
    key = 0 - np.asarray(score, np.float32)  # never -0.0
    key[np.isnan(key)] = np.inf
    index = (
        np.flatnonzero(key <= np.partition(key, n - 1)[n - 1])
        if 0 < n < len(key)
        else np.arange(len(key))
    )
    bits = key[index].view(np.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
    return np.sort((ordered.astype(np.int64) << 32) | index)[:n] & 0xFFFFFFFF
