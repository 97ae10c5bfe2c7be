"""Training: how well a scheme of rows per layer does on examples of a task.

The small interface between the search (`edgekv_lab.makers.evolkv`) and whatever makes examples.
Each text is read once, with every row kept; a scheme then costs an eviction from a copy of that
cache and a few decoded tokens. Memory: the full K and V of all texts, and the model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgekv import methods
from edgekv.errors import BadInput, Unsupported
from edgekv.learn.reading import Reading
from edgekv_lab.eval.greedy import feed, say
from edgekv_lab.eval.prompt import messages, template
from edgekv_lab.eval.sample import SampleRequest
from edgekv_lab.eval.tasks import needle

if TYPE_CHECKING:
    from edgekv.llama.llama import Llama

SCORE = "snapkv"
"""What ranks the rows, as in the paper."""
FITNESS = ("likelihood", "contained")
LENIENT = str.maketrans("", "", ",")  # thousands separators do not make an answer wrong


@dataclass(frozen=True)
class Example:
    """A chat to answer. question: the part of it that is asked after the text was compressed, if
    that is the setting; may be empty.
    """

    messages: list[dict[str, str]]
    question: str
    answers: tuple[str, ...]


def needles(
    seed: int, n: int, lengths: Sequence[int], tokenize: Callable[[str], list[int]]
) -> list[Example]:
    """Needles in haystacks, see `edgekv_lab.eval.tasks.needle`."""
    return [
        Example(messages(sample), sample.question, sample.references)
        for sample in needle.samples(SampleRequest(seed, n, tokenize, tuple(lengths)))
    ]


def from_file(path: str) -> list[Example]:
    """Examples from a file with one JSON object on each line: "prompt", or "context" and
    "question"; and "answers".

    Raises BadInput for anything else, with the line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(
            f"{path} cannot be read ({getattr(error, 'strerror', None) or 'it is no text'}); name a"
            " task or a .jsonl file"
        ) from None
    examples = [
        _example(line, f"{path}, line {i}") for i, line in enumerate(lines, 1) if line.strip()
    ]
    if not examples:
        raise BadInput(f"{path} is empty; give a JSON object on each line, with prompt and answers")
    return examples


def _example(line: str, where: str) -> Example:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise BadInput(f"{where} is no JSON object; give one on each line, with prompt and answers")
    prompt, context, question = (record.get(key, "") for key in ("prompt", "context", "question"))
    answers = record.get("answers")
    if (
        not prompt
        and context
        and question
        and all(isinstance(part, str) for part in (context, question))
    ):
        prompt = f"{context}\n\n{question}"
    if not prompt or not isinstance(prompt, str):
        raise BadInput(f'{where} has no text: give "prompt", or "context" and "question"')
    if (
        not isinstance(answers, list)
        or not answers
        or not all(isinstance(answer, str) and answer.strip() for answer in answers)
    ):
        raise BadInput(f'{where} has no answers: give "answers", a list of texts')
    return Example(
        [{"role": "user", "content": prompt}],
        question if "prompt" not in record else "",
        tuple(answers),
    )


def hash_of(examples: Sequence[Example], aware: bool, fitness: str) -> str:
    """SHA-256 (hex) of a task."""
    return hashlib.sha256(repr((list(examples), aware, fitness)).encode()).hexdigest()


class Training:
    """Examples for one model, and the score of schemes on them.

    aware: the question is in the text that is compressed; else it is asked afterwards (examples
    without a question are always compressed whole). fitness: one of FITNESS; 'contained': share of
    the examples whose greedy answer contains one of theirs; 'likelihood': the probability of the
    answer's tokens, the mean over tokens and examples, where the model says them with its full
    cache. progress(done, total) while texts are read, which happens when the first score is asked
    for. Raises Unsupported if the model keeps llama.cpp's own cache, BadInput if an example does
    not fit.
    """

    def __init__(
        self,
        llm: Llama,
        examples: Sequence[Example],
        aware: bool = True,
        fitness: str = FITNESS[0],
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        if llm.engine is None:
            raise Unsupported(
                "no profile can be made: the model"
                f" {llm.kv_stats().note or 'was loaded uncompressed'}"
            )
        self._engine = llm.engine
        assert fitness in FITNESS
        self.llm, self.task = llm, hash_of(examples, aware, fitness)
        self._fitness, self._progress, self._examples = fitness, progress, list(examples)
        self._parts = [split(llm, example, aware) for example in self._examples]
        self._readings: list[_Read] = []
        longest = max(len(text) + len(rest) for text, rest in self._parts)
        if longest + needle.ANSWER_TOKENS > llm.n_ctx():
            raise BadInput(
                f"an example of {longest} tokens and its answer do not fit the context of"
                f" {llm.n_ctx()}; give a larger --ctx-size"
            )

    @property
    def n_layer(self) -> int:
        """Layers that take part: those that attend to everything."""
        return len(self._engine.full_layers)

    @property
    def n_tokens(self) -> int:
        """Tokens of the shortest text: no layer can keep more."""
        return min(len(text) for text, _ in self._parts)

    def score(self, rows: NDArray[np.int64]) -> float:
        """0..1. rows: [n full layers] rows of each KV head of a layer."""
        return float(
            np.mean(
                [self._score(i, read, self._table(rows)) for i, read in enumerate(self._read())]
            )
        )

    def _read(self) -> list[_Read]:
        preset = methods.get(SCORE)
        while len(self._readings) < len(self._parts):
            i = len(self._readings)
            text, rest = self._parts[i]
            reading = Reading(self.llm, text, [preset])
            lead, answer = (
                self._expected(self._examples[i], reading, rest)
                if self._fitness == "likelihood"
                else ([], [])
            )
            self._readings.append(_Read(reading, lead, answer))
            self._progress(i + 1, len(self._parts))
        return self._readings

    def _expected(
        self, example: Example, reading: Reading, rest: list[int]
    ) -> tuple[list[int], list[int]]:
        """Tokens that lead to the answer, and the answer's: as the model says it with its full
        cache, or the first answer alone.
        """
        said = say(self.llm, self._follow(reading, rest), needle.ANSWER_TOKENS)
        text = next(
            (said[: said.index(a) + len(a)] for a in example.answers if a in said),
            example.answers[0],
        )
        begin = next((len(text) - len(a) for a in example.answers if text.endswith(a)), 0)
        tokens = self.llm.tokenize(text.encode(), add_bos=False)
        n_lead = max(
            n
            for n in range(len(tokens))
            if len(self.llm.detokenize(tokens[:n])) <= len(text[:begin].encode())
        )
        return tokens[:n_lead], tokens[n_lead:]

    def _score(self, i: int, read: _Read, table: NDArray[np.int32]) -> float:
        preset = methods.get(SCORE)
        read.reading.compress(preset, replace(self.llm.settings, preset=preset, budget=table))
        logits = self._follow(read.reading, self._parts[i][1])
        if self._fitness == "contained":
            said = say(self.llm, logits, needle.ANSWER_TOKENS).translate(LENIENT).casefold()
            return float(
                any(a.translate(LENIENT).casefold() in said for a in self._examples[i].answers)
            )
        logits = feed(self.llm, read.lead) if read.lead else logits
        found = [_probability(logits, read.answer[0])]
        for before, token in zip(read.answer, read.answer[1:], strict=False):
            found.append(_probability(feed(self.llm, [before]), token))
        return float(np.mean(found))

    def _follow(self, reading: Reading, rest: list[int]) -> NDArray[np.float32]:
        return feed(self.llm, rest) if rest else reading.logits

    def _table(self, rows: NDArray[np.int64]) -> NDArray[np.int32]:
        table = np.zeros((len(self._engine.store.layers), self._engine.store.n_head_kv), np.int32)
        table[self._engine.full_layers] = rows[:, None]
        return table


def split(llm: Llama, example: Example, aware: bool) -> tuple[list[int], list[int]]:
    """Tokens that are compressed, and tokens that come after (none if the question is among the
    first).
    """
    words = template(llm, example.messages)
    at = len(words) if aware else words.rindex(example.question)
    rest = words[at:]
    return llm.tokenize(words[:at].encode(), add_bos=True, special=True), (
        llm.tokenize(rest.encode(), add_bos=False, special=True) if rest else []
    )


@dataclass(frozen=True)
class _Read:
    """A text that was read, and for the likelihood the tokens that lead to the answer and the
    answer's.
    """

    reading: Reading
    lead: list[int]
    answer: list[int]


def _probability(logits: NDArray[np.float32], token: int) -> float:
    return float(1 / np.exp(logits.astype(np.float64) - float(logits[token])).sum())
