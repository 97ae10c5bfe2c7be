"""How near to its full cache a model stays with given shares: what `edgekv.profiles.tuned` makes better.

A case is a text, questions about it with their answers, and sentences of it to be gone on with. The text is read once and every row kept; a
table of shares then costs an eviction from a copy of that cache and the tokens of what is asked, which are read, not generated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgekv.profiles import lukv, probe_profile
from edgekv.profiles.training import Example, split

if TYPE_CHECKING:
    from edgekv.llama import Llama

QUESTIONS, SENTENCES = 4, 2
"""Asked in a case: of the questions that come with its texts, and of the sentences in them."""
WORDS = 14, 30
"""A sentence that is asked for is that long; FIRST words of it are given."""
FIRST = 5
HOW = 'How does the sentence go on that begins with "{}"?'
LEAST = 1e-9
"""Nats: below, two caches say the same."""


@dataclass(frozen=True)
class Case:
    """asked: questions and what is to be read as their answers."""

    text: str
    asked: tuple[tuple[str, str], ...]


def case(seed: int, n_tokens: int, tokenize: Callable[[str], list[int]]) -> Case:
    """A text of about n_tokens from those that come with edgekv, put together anew: one with questions in full, and paragraphs of others."""
    rng = Random(f"case {seed}")
    known = {source.text: list(zip(source.questions, source.answers, strict=True)) for source in lukv.sources()}
    first = rng.choice(list(known))
    parts, left = [first], n_tokens - len(tokenize(first))
    for text in rng.sample(others := [t for t in probe_profile.texts() if t != first], len(others)):
        taken = []
        for paragraph in text.split("\n\n"):
            if left > 0:
                taken.append(paragraph)
                left -= len(tokenize(paragraph))
        parts.append("\n\n".join(taken))
    parts = [part for part in parts if part]
    rng.shuffle(parts)
    asked = [pair for part in parts for pair in known.get(part, [])]
    sentences = [words for part in parts for s in part.replace("\n", " ").split(". ") if WORDS[0] <= len(words := s.split()) <= WORDS[1]]
    again = [(HOW.format(" ".join(words[:FIRST])), " ".join(words) + ".") for words in rng.sample(sentences, min(SENTENCES, len(sentences)))]
    return Case("\n\n".join(parts), (*rng.sample(asked, min(QUESTIONS, len(asked))), *again))


class Nearness:
    """A case in the cache of `llm`, which is loaded with the method and ratio that shares are wanted for.

    The log-probabilities of the full cache are held: 4 bytes x vocabulary x tokens asked (about 300). Raises BadInput if the case does not fit the context.
    """

    def __init__(self, llm: Llama, case: Case) -> None:
        from edgekv.reading import Reading

        assert llm._kv is not None
        self._llm, self._settings = llm, llm._kv_settings
        self._asked = []
        for question, answer in case.asked:
            chat = [{"role": "user", "content": f"{case.text}\n\n{question}"}]
            self._text, rest = split(llm, Example(chat, question, (answer,)), aware=False)  # the same text each time
            self._asked.append([*rest, *llm.tokenize(answer.encode(), add_bos=False)])
        self._reading = Reading(llm, self._text, [self._settings.preset])
        self._full = [self._say(asked) for asked in self._asked]

    def __call__(self, shares: NDArray[np.float64]) -> float:
        """KL divergence to the full cache in nats, the mean over what is asked and over its tokens. shares: [n_layer, n_head_kv]."""
        budget = replace(self._settings.preset.budget, shares=lambda ratio: shares)  # type: ignore[type-var]
        preset = replace(self._settings.preset, budget=budget)
        self._reading.compress(preset, replace(self._settings, preset=preset))
        return max(LEAST, float(np.mean([_kl(full, self._say(asked)) for full, asked in zip(self._full, self._asked, strict=True)])))

    def _say(self, asked: Sequence[int]) -> NDArray[np.float32]:
        """Log-probabilities [len(asked), n_vocab] behind each token, after which the conversation is the text alone again."""
        from edgekv.eval.perplexity import log_softmax
        from edgekv.reading import STEP, feed

        found = [log_softmax(feed(self._llm, asked[i : i + STEP], every=True)) for i in range(0, len(asked), STEP)]
        self._llm.n_tokens = len(self._text)
        self._llm._ctx.kv_cache_seq_rm(-1, len(self._text), -1)
        return np.concatenate(found)


def _kl(full: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    return float((np.exp(full) * (full - other)).sum(axis=1, dtype=np.float64).mean())
