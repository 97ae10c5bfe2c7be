"""How far a mean over samples can be trusted: 95 % confidence intervals."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import fmean, stdev

Z = 1.96


def wilson(hits: float, n: int) -> tuple[float, float]:
    """Of a share of hits (Wilson score), 0..1."""
    if n == 0:
        return 0.0, 1.0
    share = hits / n
    centre, half = share + Z * Z / (2 * n), Z * sqrt(share * (1 - share) / n + Z * Z / (4 * n * n))
    return max(0.0, (centre - half) / (1 + Z * Z / n)), min(1.0, (centre + half) / (1 + Z * Z / n))


def interval(scores: Sequence[float], upper: float = 1.0, hits: bool = True) -> tuple[float, float]:
    """Of the mean of scores in 0..upper: Wilson's where all are 0 or 1, unless `hits` says that
    these are no hits and misses; else the normal one, cut to the range. Of a single such score
    nothing is known: 0..upper.
    """
    if hits and all(score in (0, 1) for score in scores):
        return wilson(sum(scores), len(scores))
    if len(scores) < 2:
        return 0.0, upper
    mean, half = fmean(scores), Z * stdev(scores) / sqrt(len(scores))
    return max(0.0, mean - half), min(upper, mean + half)
