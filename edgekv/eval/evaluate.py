"""The evaluator: every sample of a task under every (method, ratio), each text read once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from edgekv.eval import metrics
from edgekv.eval.perplexity import FULL, check, predict
from edgekv.eval.prompt import Prompt, prompt
from edgekv.eval.sample import Known, Outcome, Sample, Task, left

RANDOM = "random"


def settings(methods: Sequence[str], ratios: Sequence[float]) -> list[tuple[str, float]]:
    """(method, ratio) of every row: `full` at 1 first, the others at each ratio below 1 (at 1 they are `full`).

    A comparison without the full cache and without rows drawn at random says nothing, so both are always there.
    """
    names = [name for name in methods if name != FULL]
    if names and RANDOM not in names:
        names.insert(0, RANDOM)
    return [(FULL, 1.0)] + [(name, ratio) for name in names for ratio in ratios if ratio < 1]


def evaluate(task: Task, reader: Any, samples: Sequence[Any], grid: Sequence[tuple[str, float]], aware: bool = True,
             known: Known = frozenset()) -> Iterator[Outcome]:
    """The outcomes, sample by sample; a task that predicts knows no setting. reader: an `edgekv.eval.reader.Reader`.

    aware: the question is in the prompt that is compressed; else it is asked after the compression. known: (sample, method, ratio) that
    need not be asked again. Raises BadInput before anything is read if a sample does not fit the context.
    """
    if task.predicts:
        check(samples, reader.llm.n_ctx())
        return predict(reader, samples, grid, known)
    return answer(reader, samples, [prompt(reader.llm, sample, aware, task.cuts) for sample in samples], grid, known)


def answer(reader: Any, samples: Sequence[Sample], prompts: Sequence[Prompt], grid: Sequence[tuple[str, float]],
           known: Known = frozenset()) -> Iterator[Outcome]:
    """Greedy answers and their scores."""
    for sample, tokens in zip(samples, prompts, strict=True):
        asked = left(sample.id, grid, known)
        if asked:
            reader.read(tokens.text)
        for method, ratio in asked:
            stats = reader.compress(method, ratio)
            words = reader.answer(tokens.rest, sample.max_tokens, sample.stop)
            yield Outcome(sample.id, sample.tags, method, ratio, metrics.scores(words, sample), tokens.n_tokens, stats.n_seen, stats.n_kept,
                          stats.n_bytes, words, sample.references)
