"""What one layer, once it has been read, offers scores and budgets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RowReader = Callable[..., tuple[NDArray[np.float32], NDArray[np.float32]]]
"""KV head -> (K [n_rows_of_head, d_k], V [n_rows_of_head, d_v]) as float32, as stored (rotated);
with row numbers [n] behind it, of these.
"""

PartReader = Callable[[int, NDArray[np.int32], str], NDArray[np.float32]]
"""KV head, row numbers [n], "k" or "v" -> K [n, d_k] or V [n, d_v] as above."""

PredictedScores = Callable[
    [int, NDArray[np.float32], bool, tuple[int, int]],
    tuple[NDArray[np.float32], NDArray[np.float32]],
]
"""(KV head, weights, whether neighbours, blocks) -> float32 [n_rows_of_head] each, see
`edgekv.native.Prefill.predicted_scores`.
"""

Future = Callable[[int], tuple[NDArray[np.float32], NDArray[np.float32]]]
"""Number n of later positions -> mean [n_head, d_k] and covariance [n_head, d_k, d_k] of their
queries, on average over the next n: such that the logit of a stored key k [d_k] has the mean k .
mean and the variance k . covariance . k.
"""


@dataclass(frozen=True)
class LayerStats:
    """What one finished layer offers a method.

    Head k has `n_old[k] + n_new` rows: first the rows kept from earlier turns (in the order of the
    store), then this turn's tokens in order. Arrays are [n_head_kv, n_rows] with n_rows the longest
    head's; a row that does not exist has `pos` -1 and meaningless statistics. Statistics that the
    method did not ask for in `observe.stats` are None.
    """

    il: int
    n_layer: int
    n_head_kv: int
    n_rows: int
    n_old: NDArray[np.int32]
    n_new: int
    pos: NDArray[np.int32]
    """Token index of each row."""
    mean: NDArray[np.float32] | None = None
    """Attention a row gets: mean over the observing queries and the query heads of the KV head."""
    var: NDArray[np.float32] | None = None
    """Variance over the observing queries, then mean over the query heads."""
    max: NDArray[np.float32] | None = None
    """Maximum over the observing queries and the query heads."""
    col_entropy: NDArray[np.float32] | None = None
    """-sum of a*log(a) over the observing queries and the query heads, per row."""
    col_sum: NDArray[np.float32] | None = None
    """Sum over all prompt queries, then mean over the query heads."""
    seed: int = 0
    rows: RowReader | None = None
    """Keys and values of the layer, read when asked for."""
    part: PartReader | None = None
    """K or V alone of some rows; None: from `rows`."""
    predicted_scores: PredictedScores | None = None
    """A linear map of kvzap over the rows, natively; None: from `rows`."""
    blocks: tuple[int, int] = (0, 0)
    """Sizes of the matrices that turned K and V for a quantised cache (`edgekv.model.rotation`)."""
    future: Future | None = None
    """What later tokens will ask, if the method observes `queries`."""

    def some_rows(self, head: int, some: NDArray[np.int32], part: str) -> NDArray[np.float32]:
        """See `PartReader`."""
        if self.part is not None:
            return self.part(head, some, part)
        assert self.rows is not None, "this method reads the rows"
        return self.rows(head, some)["kv".index(part)]

    @property
    def absent(self) -> NDArray[np.bool_]:
        """bool [n_head_kv, n_rows]: True where a head has no row."""
        return self.pos < 0

    @property
    def n_seen(self) -> int:
        """Tokens read so far, this turn's included (the newest row's token index + 1)."""
        return int(self.pos.max(initial=-1)) + 1
