"""What an evaluation is made of: samples with right answers, and tasks that yield them.

A task is one file under `edgekv_lab/eval/tasks/` with a `TASK`, and one row in
`edgekv_lab.eval.tasks`. It knows no model but a way to tokenise; reading, compressing, answering
and counting are done for all tasks alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp
from random import Random
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Sample:
    """One thing to ask.

    context: instruction and document, what is compressed in either setting. question: what follows
    it behind a blank line; in the query-agnostic setting it is first seen after the compression.
    """

    id: str
    context: str
    question: str
    references: tuple[str, ...]
    """Right answers. Whether one or all of them are wanted is the metric's affair."""
    max_tokens: int
    metrics: tuple[str, ...]
    """Names in `edgekv_lab.eval.metrics.METRICS`; the first one is the sample's score."""
    begin: str = ""
    """How the answer starts: put behind the prompt, not counted as the model's words."""
    chat: bool = True
    """Whether the prompt goes through the model's chat template."""
    stop: str = ""
    """The answer ends before this text, leading line ends aside."""
    classes: tuple[str, ...] = ()
    """All labels of a classification."""
    tags: Mapping[str, Any] = field(default_factory=dict)
    """What the sample is a case of (length, depth, family ...): columns of the table, cells of the
    heat map.
    """


@dataclass(frozen=True)
class SampleRequest:
    """What a task is asked for; a task reads what it `asks` for."""

    seed: int
    n: int
    """Samples."""
    tokenize: Callable[[str], list[int]]
    lengths: tuple[int, ...] = ()
    """Tokens of text in a sample."""
    files: tuple[str, ...] = ()
    families: tuple[str, ...] = ()
    n_next: int = 0
    """Tokens to predict behind the text."""
    ask: Callable[[str], str] = lambda message: ""
    """What the model answers with the full cache."""
    n_each: int = 6
    """Questions about each text, at most."""

    def count(self, text: str) -> int:
        """Tokens of a text for the model at hand."""
        return len(self.tokenize(text))


class Row(NamedTuple):
    """A setting that samples are asked under."""

    method: str
    ratio: float
    """Share of the full f16 cache's bytes; 1 for the method `full`, whatever its type."""
    kind: str = "f16"
    """Cache type of K and V, as in q8_0; where they differ both, as in q8_0/q4_0."""


@dataclass(frozen=True)
class Outcome:
    """What one setting made of one sample."""

    sample: str
    tags: Mapping[str, Any]
    method: str
    ratio: float
    scores: dict[str, float]
    """By metric, the sample's own score first."""
    n_prompt: int
    """Tokens of the whole prompt, the question included."""
    n_seen: int
    """Tokens of it that were compressed."""
    n_kept: float
    """Rows per layer and KV head that were left of those."""
    n_bytes: int
    """Of K and V that were left of them."""
    prediction: str = ""
    references: tuple[str, ...] = ()
    kind: str = "f16"
    """Cache type, see Row."""
    n_bytes_full: int = 0
    """Of the tokens that were compressed, in a full f16 cache."""

    @property
    def row(self) -> Row:
        return Row(self.method, self.ratio, self.kind)


Known = frozenset[tuple[str, Row]]
"""Samples and settings that were answered before."""


def left(sample: str, grid: Sequence[Row], known: Known) -> list[Row]:
    """Settings under which a sample is still to be asked."""
    return [row for row in grid if (sample, row) not in known]


@dataclass(frozen=True)
class Measure:
    """A column of results: the mean over the samples of a metric, with its interval."""

    name: str
    label: str
    percent: bool = True
    """Scores lie between 0 and 1 and are printed as percent; else they have no upper end."""
    digits: int = 1
    of_tokens: bool = False
    """Each sample's score is a mean over many tokens: 0 and 1 are no hit and miss."""
    shown: Callable[[float], float] = lambda mean: mean
    """From the mean to the number that people know, rising."""


ALONG = (
    Measure("kl", "KL along the answer", percent=False, digits=4),
    Measure("first", "KL at its first token", percent=False, digits=4),
    Measure("same_top", "same token", of_tokens=True),
    Measure("same", "same answer"),
)
SCORE = (Measure("score", "score"),)
PERPLEXITY = (
    Measure("nll", "perplexity", percent=False, digits=2, shown=exp),
    Measure("kl", "KL to full", percent=False, digits=4),
    Measure("same_top", "same top token", of_tokens=True),
)


@dataclass(frozen=True)
class Task:
    """A task under its name. samples: the same request gives the same samples. Raises BadInput for
    a request that makes no sense.
    """

    name: str
    title: str
    help: str
    samples: Callable[[SampleRequest], Iterable[Any]]
    asks: tuple[str, ...]
    """Which of lengths, files, families and n_next of the request count; the command offers these.
    """
    defaults: Mapping[str, str] = field(default_factory=dict)
    """Of those options, where they are not the usual ones."""
    columns: tuple[str, ...] = ("length",)
    """Tags that get columns of their own where there is more than one value."""
    measures: tuple[Measure, ...] = SCORE
    predicts: bool = False
    """The samples are `edgekv_lab.eval.perplexity.Passage`s to be predicted, not questions to be
    answered.
    """
    follows: bool = False
    """The answers are the full cache's own, and every row is judged along them."""
    cuts: bool = False
    """A context that is too long loses its middle; else it is refused."""
    heat: bool = False
    """The plot is a heat map over the tags length and depth (0 to 1)."""


def spread(
    seed: int, name: str, n: int, lengths: Sequence[int]
) -> Iterator[tuple[Random, int, int, int]]:
    """n samples spread evenly over the lengths: (its own random numbers, length, its index at that
    length, how many there are at it).
    """
    for position, length in enumerate(lengths):
        n_here = n // len(lengths) + (position < n % len(lengths))
        for index in range(n_here):
            yield (
                Random(" ".join(filter(None, (str(seed), name, str(length), str(index))))),
                length,
                index,
                n_here,
            )
