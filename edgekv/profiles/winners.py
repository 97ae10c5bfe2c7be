"""winners: what came nearest to the full cache at each ratio, as a profile keeps it.

`edgekv.learn.contest` finds them, `edgekv.choice.choose` follows them. A profile may come from
anywhere, so it can only name what takes part in a contest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

PLAIN = "score=late,budget=uniform,merge=summary,rows=64"
"""The same number of entries for every head: no winner is further away than this."""
METHODS = (
    "score=joint,budget=profile,merge=summary,rows=64",
    "score=late,budget=profile,merge=summary,rows=64",
    "score=joint,budget=profile,merge=summary,rows=96,share=3,kernel=1",
    PLAIN,
)
"""Scores, budgets and merges that take part."""
OFFLINE = ("lukv", "evolkv")
"""Methods that take part where a profile of that kind exists."""
TYPES = (
    ("q8_0", "q8_0"),
    ("q8_0", "q4_0"),
    ("q8_0", "q5_1"),
    ("q5_0", "q4_0"),
    ("q4_1", "q4_0"),
    ("f16", "f16"),
)
"""Cache types of K and V that take part."""
OLDER_METHODS = ("edgekv:rows=64",)
OLDER_TYPES = (("q5_1", "q4_0"),)
"""Those that took part once; profiles of then name them."""
RATIOS = (0.5, 0.2, 0.1)
"""At which they compete."""
RECALL = 0.05
"""The share that new tokens look up (`kv_recall`) where a winner is tried with recall."""


@dataclass(frozen=True)
class Distance:
    """Nats to the full f16 cache, the mean over tokens: those that go on with the text, and those
    of questions about it and their answers.
    """

    text: float
    answers: float

    @property
    def judged(self) -> float:
        """What candidates are compared by. The product, because answers are further away than the
        text by a factor that depends on the model, and neither is to decide alone.
        """
        return self.text * self.answers


@dataclass(frozen=True)
class Winner:
    """What came nearest at one ratio, and how near; plain: how near PLAIN came; recall: how near
    the same came in the same bytes, of which an index took some, with recall of RECALL. None: that
    was not measured.
    """

    ratio: float
    method: str
    type_k: str
    type_v: str
    distance: Distance
    plain: Distance
    recall: Distance | None = None

    @property
    def types(self) -> tuple[str, str]:
        return self.type_k, self.type_v

    @property
    def recall_gain(self) -> float | None:
        """How many times as near it came with recall, the geometric mean of both kinds."""
        if self.recall is None:
            return None
        return math.sqrt(self.distance.judged / max(self.recall.judged, 1e-12))


@dataclass(frozen=True)
class Winners:
    """The winners of one contest, one for each ratio; none where no contest can be held.

    q4_0: how near a full q4_0 cache is, None where the model cannot have it; n_tokens: of the text
    that was compressed; n_judged: tokens behind it. Raises ValueError for what no contest can have
    found.
    """

    found: tuple[Winner, ...] = ()
    q4_0: Distance | None = None
    n_tokens: int = 0
    n_judged: int = 0

    def __post_init__(self) -> None:
        ratios = [one.ratio for one in self.found]
        measured = [x for one in self.found for x in (one.distance, one.plain, one.recall)]
        distances = [x for x in (*measured, self.q4_0) if x is not None]
        if not (
            len(set(ratios)) == len(ratios)
            and set(ratios) <= set(RATIOS)
            and all(0 <= x < 1000 for one in distances for x in (one.text, one.answers))
            and all(0 <= n < 1 << 30 for n in (self.n_tokens, self.n_judged))
            and all(
                one.method in METHODS + OFFLINE + OLDER_METHODS and one.types in TYPES + OLDER_TYPES
                for one in self.found
            )
        ):
            raise ValueError("no contest ends like this")

    def at(self, ratio: float) -> Winner | None:
        """The winner of the ratio that is nearest as a factor: half is as far as twice."""
        return min(self.found, key=lambda one: abs(math.log(one.ratio / ratio)), default=None)

    def line(self, ratio: float) -> str:
        """What was measured nearest to `ratio`: '0.2 on this model: 0.004 nats from the full
        cache; q4_0: 0.09'. Empty without winners.
        """
        one = self.at(ratio)
        if one is None:
            return ""
        q4_0 = f"; q4_0: {self.q4_0.text:.2g}" if self.q4_0 else ""
        near = f"{one.distance.text:.2g} nats from the full cache"
        recall = f"; with recall: {one.recall.text:.2g}" if one.recall else ""
        return f"{one.ratio:g} on this model: {near}{recall}{q4_0}"

    def lines(self) -> Sequence[str]:
        """For each ratio the number and what won."""
        return [
            f"{self.line(one.ratio)} ({one.method}, {'/'.join(dict.fromkeys(one.types))})"
            for one in self.found
        ]

    def text(self) -> str:
        """For a profile's file; `parse` reads it."""
        return json.dumps(asdict(self), separators=(",", ":"))


def parse(text: str) -> Winners:
    """What `Winners.text` wrote. Raises ValueError for anything else."""
    try:
        record: dict[str, Any] = json.loads(text)
        found = tuple(_winner(one) for one in record["found"])
        q4_0 = None if record["q4_0"] is None else _distance(record["q4_0"])
        return Winners(
            found, q4_0, _number(record["n_tokens"], int), _number(record["n_judged"], int)
        )
    except (KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        raise ValueError("no contest") from None


def _winner(record: dict[str, Any]) -> Winner:
    distance, plain = (_distance(record[key]) for key in ("distance", "plain"))
    recall = record.get("recall")  # older profiles say nothing of it
    return Winner(
        _number(record["ratio"]),
        record["method"],
        record["type_k"],
        record["type_v"],
        distance,
        plain,
        None if recall is None else _distance(recall),
    )


def _distance(record: dict[str, Any]) -> Distance:
    return Distance(_number(record["text"]), _number(record["answers"]))


def _number(value: Any, kind: type = float) -> Any:
    if type(value) not in (int, kind):
        raise TypeError("no number")
    return kind(value)
