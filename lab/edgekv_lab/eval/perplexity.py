"""Prediction behind a compressed text: likelihood of what follows, and KL divergence from the full
cache.

The first token that is scored is the second one behind the text: the first one is predicted from
inside the text, where attention is complete under every method.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.errors import BadInput
from edgekv.learn.divergence import log_softmax
from edgekv_lab.eval.sample import Known, Outcome, Row, left

FULL = "full"


@dataclass(frozen=True)
class Passage:
    """A text, and the tokens behind it that are predicted.

    tokens: the text and what follows it; n_text of them are compressed, the next ones are fed
    and the ones after those predicted.
    """

    id: str
    tokens: tuple[int, ...]
    n_text: int
    tags: Mapping[str, Any] = field(default_factory=dict)


def check(passages: Sequence[Passage], n_ctx: int) -> None:
    """Raises BadInput if one of them does not fit the context."""
    longest = max((len(passage.tokens) for passage in passages), default=0)
    if longest > n_ctx:
        raise BadInput(
            f"{longest} tokens do not fit the context of {n_ctx}; give shorter --lengths or "
            "--next, or a larger --ctx-size"
        )


def predict(
    reader: Any, passages: Sequence[Passage], grid: Sequence[Row], known: Known = frozenset()
) -> Iterator[Outcome]:
    """The outcome of each passage in each row: mean nll and KL in nats, and the share of tokens
    with the same favourite.

    KL and favourites are held against the first row, a full cache. Its log-probabilities of one
    passage are kept: 4 bytes * n_vocab for each token that is fed.
    """
    for passage in passages:
        asked = left(passage.id, grid, known)
        if not asked:
            continue
        text, fed = passage.tokens[: passage.n_text], passage.tokens[passage.n_text : -1]
        targets = np.array(passage.tokens[passage.n_text + 1 :])
        reader.read(text)
        reader.compress(*grid[0])
        full = np.concatenate([log_softmax(logits) for logits in reader.predict(fed)])
        for row in asked:
            stats = reader.compress(*row)
            scores = _compare(
                full, (log_softmax(logits) for logits in reader.predict(fed)), targets
            )
            yield Outcome(
                passage.id,
                passage.tags,
                row.method,
                row.ratio,
                scores,
                len(passage.tokens) - 1,
                stats.n_seen,
                stats.n_kept,
                stats.n_bytes_used,
                kind=row.kind,
                n_bytes_full=stats.n_bytes_full,
            )


def _compare(
    full: NDArray[np.float32], blocks: Iterator[NDArray[np.float32]], targets: NDArray[np.int64]
) -> dict[str, float]:
    """Means over the tokens. full [n, n_vocab]; blocks: the same in pieces; targets [n], the tokens
    that came."""
    nll, kl, same, first = 0.0, 0.0, 0, 0
    for block in blocks:
        reference, wanted = full[first : first + len(block)], targets[first : first + len(block)]
        nll -= float(block[np.arange(len(block)), wanted].sum(dtype=np.float64))
        kl += float((np.exp(reference) * (reference - block)).sum(dtype=np.float64))
        same += int((reference.argmax(axis=1) == block.argmax(axis=1)).sum())
        first += len(block)
    return {"nll": nll / first, "kl": max(kl / first, 0.0), "same_top": same / first}
