"""The evaluator: every sample of a task under every setting, each text read once for each cache
type."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from edgekv_lab.eval import metrics
from edgekv_lab.eval.along import follow
from edgekv_lab.eval.perplexity import FULL, check, predict
from edgekv_lab.eval.prompt import EvalPrompt, prompt
from edgekv_lab.eval.sample import Known, Outcome, Row, Sample, Task, left

RANDOM = "random"


def settings(
    methods: Sequence[str],
    ratios: Sequence[float],
    full: Sequence[str] = ("f16",),
    stored: Callable[[str, float], str] = lambda method, ratio: "f16",
) -> list[Row]:
    """The rows: a full cache of each type, then each method at each ratio below 1 (at 1 it would be
    `full`).

    full: cache types; none: that of the first method. stored: the cache type of a method's rows
    at a ratio.
    Rows drawn at random stand beside the others in each of their types, because a comparison
    without them, or without a full cache, says nothing. All rows of a type follow each other, so
    that a text is read once for each.
    """
    names = [name for name in methods if name not in (FULL, RANDOM)]
    shares = [ratio for ratio in ratios if ratio < 1]
    compressed = [Row(name, ratio, stored(name, ratio)) for name in names for ratio in shares]
    kinds = dict.fromkeys(row.kind for row in compressed) or [stored(RANDOM, 1.0)] * (
        RANDOM in methods
    )
    drawn = [Row(RANDOM, ratio, kind) for kind in kinds for ratio in shares]
    whole = [Row(FULL, 1.0, kind) for kind in full or list(kinds)[:1] or ["f16"]]
    order = list(dict.fromkeys(row.kind for row in (*whole, *drawn, *compressed)))
    return sorted([*whole, *drawn, *compressed], key=lambda row: order.index(row.kind))


def evaluate(
    task: Task,
    reader: Any,
    samples: Sequence[Any],
    grid: Sequence[Row],
    aware: bool = True,
    known: Known = frozenset(),
) -> Iterator[Outcome]:
    """The outcomes, sample by sample; a task that predicts knows no setting. reader: an
    `edgekv_lab.eval.reader.Reader`.

    aware: the question is in the prompt that is compressed; else it is asked after the compression.
    known: samples and rows that need not be asked again. Raises BadInput before anything is read if
    a sample does not fit the context.
    """
    if task.predicts:
        check(samples, reader.llm.n_ctx())
        return predict(reader, samples, grid, known)
    prompts = [prompt(reader.llm, sample, aware, task.cuts) for sample in samples]
    return (follow if task.follows else answer)(reader, samples, prompts, grid, known)


def answer(
    reader: Any,
    samples: Sequence[Sample],
    prompts: Sequence[EvalPrompt],
    grid: Sequence[Row],
    known: Known = frozenset(),
) -> Iterator[Outcome]:
    """Greedy answers and their scores."""
    for sample, tokens in zip(samples, prompts, strict=True):
        asked = left(sample.id, grid, known)
        if asked:
            reader.read(tokens.text)
        for row in asked:
            stats = reader.compress(*row)
            words = reader.answer(tokens.rest, sample.max_tokens, sample.stop)
            yield Outcome(
                sample.id,
                sample.tags,
                row.method,
                row.ratio,
                metrics.scores(words, sample),
                tokens.n_tokens,
                stats.n_seen,
                stats.n_kept,
                stats.n_bytes_used,
                words,
                sample.references,
                row.kind,
                stats.n_bytes_full,
            )
