"""What a method sees of a layer, and what it must offer.

A method answers two of the five questions of a compression: whose queries are observed
(`observe`, unless the preset says otherwise) and what each row is worth (`score`). How many rows
stay is the budget's answer, which ones `edgekv.methods.select`'s. Nothing here knows a model, a
cache or the native library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgekv.methods.budget.base import Budget
from edgekv.methods.centroid_merge import CentroidMerge
from edgekv.methods.layer import LayerStats
from edgekv.methods.merge import D2O

STATS = ("mean", "var", "max", "col_entropy", "col_sum")
LATE = 256
"""Tokens at the end of a prompt that the query source `late` is."""
MANY = 2048
"""Tokens whose queries a summary looks at where there are twice as many or more, evenly spaced."""
QUERY_SOURCES = {
    "window": "the last tokens of the prompt",
    "late": f"the last {LATE} tokens of the prompt",
    "all": "every token of the prompt; costs a second pass over the attention",
    "last": "the prompt's last token",
    "probe": (
        "the prompt read again behind itself, in pieces, without being stored; costs a second"
        " prefill"
    ),
}
"""Whose queries can be observed: the query sources."""


@dataclass(frozen=True)
class Observe:
    """Which of `STATS` the scorer has to make of a layer's attention, and of whose queries."""

    stats: tuple[str, ...] = ()
    source: str = "window"
    """One of `QUERY_SOURCES`; the column sums are of every token whatever the source."""
    queries: bool = False
    """Nobody's attention: the distribution of all queries (`LayerStats.future`)."""

    def __post_init__(self) -> None:
        unknown = set(self.stats) - set(STATS)
        assert not unknown, f"no such statistics: {unknown}"
        assert self.source in QUERY_SOURCES

    @property
    def observed(self) -> tuple[str, ...]:
        """The statistics of the query source's attention."""
        return tuple(x for x in self.stats if x != "col_sum")

    @property
    def sums(self) -> bool:
        """Whether every token's attention is summed up."""
        return "col_sum" in self.stats

    @property
    def probe(self) -> bool:
        """Whether the prompt is read twice (see `edgekv.methods.probe`)."""
        return self.source == "probe" and bool(self.observed)

    def asking(self, stats: tuple[str, ...]) -> Observe:
        """The same with more statistics, for a budget that looks at the score's queries."""
        return replace(self, stats=self.stats + tuple(x for x in stats if x not in self.stats))


class Method(Protocol):
    """A published (or baseline) way to say what a row is worth."""

    @property
    def name(self) -> str: ...

    @property
    def title(self) -> str:
        """One line for people."""
        ...

    @property
    def paper(self) -> str:
        """Where it comes from; empty for a baseline."""
        ...

    @property
    def observe(self) -> Observe: ...

    @property
    def params(self) -> Any:
        """The defaults: an instance of the method's own frozen dataclass, or None."""
        ...

    def score(self, layer: LayerStats, params: Any = None) -> NDArray[np.float32]:
        """float32 [n_head_kv, n_rows], higher = keep, -inf: no row. `params` None: the defaults."""
        ...


@dataclass(frozen=True)
class Preset:
    """A method and a budget under the name that a user asks for."""

    name: str
    score: Method
    budget: Budget
    title: str
    paper: str = ""
    params: Any = None
    """Parameters of the score, None: its defaults. The budget holds its own."""
    keeps_all: bool = False
    """Nothing is ever evicted: the prompt is read as the unpatched library does."""
    merge: D2O | CentroidMerge | None = None
    """What becomes of evicted rows; None: they are dropped."""
    query_source: str = ""
    """Whose queries are observed (`QUERY_SOURCES`); empty: those that the score's paper takes."""
    profile: str = ""
    """The file whose profile it uses; empty: none."""
    why: str = ""
    """Why this method runs where the user left the choice to `auto`; empty if it was named."""
    types: tuple[str, str] | None = None
    """Cache types of K and V that `auto` measured it with; None: it was not."""
    measured: str = ""
    """What was measured, one line; empty if nothing was."""
    recall_gain: float | None = None
    """How many times as near it came with recall (`kv_recall`); None: that was not measured."""

    @property
    def gains_by_recall(self) -> bool:
        """Whether recall came nearer at all. A little is enough: a contest's text is short, and of
        a longer one an index takes a smaller part (docs/results/recall.md).
        """
        return self.recall_gain is not None and self.recall_gain > 1

    def query_step(self, n_tokens: int) -> int:
        """One of so many tokens of a prompt has its queries looked at before RoPE."""
        return 1 if self.score.observe.queries else max(1, n_tokens // MANY)

    @property
    def observe(self) -> Observe:
        """What score, budget and merge together need to know of a layer's attention."""
        asked = self.score.observe.asking(getattr(self.budget, "stats", ()))
        asked = replace(asked, source=self.query_source or asked.source)
        return replace(asked, queries=True) if isinstance(self.merge, CentroidMerge) else asked


def masked(scores: NDArray[np.floating], layer: LayerStats) -> NDArray[np.float32]:
    """float32 copy of `scores` with -inf where a head has no row."""
    return np.where(layer.absent, np.float32(-np.inf), scores).astype(np.float32, copy=False)


def by_head(
    layer: LayerStats, score: Callable[[NDArray[np.float32]], NDArray[np.float32]]
) -> NDArray[np.float32]:
    """Scores from the stored keys: `score` maps a head's keys [n, d_k] to [n], head by head."""
    assert layer.rows is not None, "this method reads the keys"
    out = np.full(layer.pos.shape, -np.inf, np.float32)
    for k in range(layer.n_head_kv):
        keys, _ = layer.rows(k)
        out[k, : len(keys)] = score(keys)
    return out
