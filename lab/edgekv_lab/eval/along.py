"""Questions about a text, judged along the full cache's own answers.

The full cache answers each question greedily. The same tokens are then fed behind what a method
left of the text, and its predictions are held against the full cache's, token by token. So a row is
judged by whether it would have said the same, and not by whether the model knows the answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv import native
from edgekv.base.stats import KVStats
from edgekv.learn.divergence import divergence, log_softmax
from edgekv_lab.eval.greedy import feed
from edgekv_lab.eval.prompt import EvalPrompt
from edgekv_lab.eval.sample import Known, Outcome, Row, Sample, left


def follow(
    reader: Any,
    samples: Sequence[Sample],
    prompts: Sequence[EvalPrompt],
    grid: Sequence[Row],
    known: Known = frozenset(),
) -> Iterator[Outcome]:
    """The outcome of each question in each row. The first row is the full cache that answers.

    Questions about one text, which follow each other, share its reading. Of each answer the
    log-probabilities are kept: 4 bytes * n_vocab for each of its tokens.
    """
    pairs = zip(samples, prompts, strict=True)
    for text, group in groupby(pairs, key=lambda pair: pair[1].text):
        questions = list(group)
        asked = {sample.id: left(sample.id, grid, known) for sample, _ in questions}
        if not any(asked.values()):
            continue
        reader.read(text)
        answers = {}
        for sample, tokens in questions:
            reader.compress(*grid[0])
            answers[sample.id] = _answer(reader, tokens.rest, sample.max_tokens)
        for row in grid:
            for sample, tokens in questions:
                if row in asked[sample.id]:
                    stats = reader.compress(*row)
                    yield _outcome(reader, sample, tokens, row, stats, *answers[sample.id])


Answer = tuple[list[int], NDArray[np.float32]]
"""Tokens [n] of an answer, the one that ends it among them, and the log-probabilities [n, n_vocab]
that each was chosen by."""


def _answer(reader: Any, question: Sequence[int], most: int) -> Answer:
    vocab = native.llama_cpp.llama_model_get_vocab(reader.llm.model)
    logits = feed(reader.llm, question) if question else reader.logits
    tokens, found = list[int](), list[NDArray[np.float32]]()
    while True:
        found.append(log_softmax(logits[None])[0])
        tokens.append(int(logits.argmax()))
        if len(tokens) == most or native.llama_cpp.llama_vocab_is_eog(vocab, tokens[-1]):
            return tokens, np.array(found)
        logits = feed(reader.llm, tokens[-1:])


def _along(reader: Any, question: Sequence[int], tokens: Sequence[int]) -> NDArray[np.float32]:
    """Log-probabilities [n, n_vocab] of the present cache where the full cache chose `tokens`."""
    logits = [feed(reader.llm, question) if question else reader.logits]
    logits += [feed(reader.llm, [token]) for token in tokens[:-1]]
    return log_softmax(np.array(logits))


def _outcome(
    reader: Any,
    sample: Sample,
    tokens: EvalPrompt,
    row: Row,
    stats: KVStats,
    answer: list[int],
    whole: NDArray[np.float32],
) -> Outcome:
    got = _along(reader, tokens.rest, answer)
    far, chosen = divergence(whole, got), got.argmax(axis=1)
    same = chosen == np.array(answer)
    scores = {
        "kl": float(far.mean()),
        "first": float(far[0]),
        "same_top": float(same.mean()),
        "same": float(same.all()),
    }
    said, full = (
        reader.llm.detokenize(some).decode(errors="replace") for some in (chosen.tolist(), answer)
    )
    return Outcome(
        sample.id,
        sample.tags,
        row.method,
        row.ratio,
        scores,
        tokens.n_tokens,
        stats.n_seen,
        stats.n_kept,
        stats.n_bytes_used,
        said,
        (full,),
        row.kind,
        stats.n_bytes_full,
    )
