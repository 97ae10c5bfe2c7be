"""How near to its full cache a model stays with given shares: what `edgekv.profiles.tuned` makes better.

A case is a text, questions about it with their answers, sentences of it to be gone on with, and made-up entries in it to be looked up, which
nobody could guess. The text is read once and every row kept; a table of shares then costs an eviction from a copy of that cache and the tokens
of what is asked, which are read, not generated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgekv.profiles import lukv, probe_profile
from edgekv.profiles.training import Example, split

if TYPE_CHECKING:
    from edgekv import Llama

QUESTIONS, SENTENCES, ENTRIES = 4, 2, 6
"""Asked in a case: of the questions that come with its texts, of the sentences in them, and of FORMS."""
WORDS = 14, 30
"""A sentence that is asked for is that long; FIRST words of it are given."""
FIRST = 5
HOW = 'How does the sentence go on that begins with "{}"?'
FORMS = (
    ("{who} handed in form {entry} at the counter.", "Which form did {who} hand in?"),
    ("The crate for {who} is marked {entry}.", "How is the crate for {who} marked?"),
    ("{who} drew lot {entry} that morning.", "Which lot did {who} draw?"),
    ("The letter to {who} lies in drawer {entry}.", "In which drawer does the letter to {who} lie?"),
    ("On the list {who} stands beside {entry}.", "Beside what does {who} stand on the list?"),
    ("{who} filed the report under {entry}.", "Under what did {who} file the report?"),
    ("The bicycle of {who} bears the stamp {entry}.", "Which stamp does the bicycle of {who} bear?"),
    ("The bill for {who} came to {entry} crowns.", "How many crowns did the bill for {who} come to?"),
)
FORENAMES = "Ada Bruno Carla Doris Emil Frida Gustav Hanna Igor Judith Karl Lena Milan Nora Oskar Paula".split()
SURNAMES = "Abel Brandt Castell Duval Ekman Falk Grimaldi Holm Ivers Jansen Keller Lindqvist Moreau Novak Ortega Petersen".split()
WORDS_APART = "amber anvil basil cedar comet coral delta ember fjord heron ivory lilac maple onyx pebble quill raven sable tulip willow".split()
LETTERS = "ABCDEFGHJKLMNPRSTUVWXYZ"
LEAST = 1e-9
"""Nats: below, two caches say the same."""
SURE = 2.0
"""Nats of lead for which an entry counts 1/e of one that the full cache is in doubt about."""


@dataclass(frozen=True)
class Case:
    """asked: questions and what is to be read as their answers; entries: the same, and the part of the answer that has to be looked up."""

    text: str
    asked: tuple[tuple[str, str], ...]
    entries: tuple[tuple[str, str, str], ...] = ()


class Near(NamedTuple):
    """How near one cache says what another says.

    kl: nats, the mean over what is asked and over its tokens. lead: nats by which the first token of an entry is further ahead of the next
    likeliest than with the full cache (below 0: less far), the mean over entries, where those count most of which the full cache is least sure.
    """

    kl: float
    lead: float


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
    text, entries = with_entries("\n\n".join(parts), rng)
    return Case(text, (*rng.sample(asked, min(QUESTIONS, len(asked))), *again), entries)


def with_entries(text: str, rng: Random) -> tuple[str, tuple[tuple[str, str, str], ...]]:
    """The text with ENTRIES sentences behind paragraphs of it; and of each the question, the sentence, which is the answer, and the entry."""
    paragraphs, found = text.split("\n\n"), []
    for (sentence, question), forename, surname in zip(rng.sample(FORMS, ENTRIES), rng.sample(FORENAMES, ENTRIES), rng.sample(SURNAMES, ENTRIES)):
        what = number(rng) if "crowns" in sentence else entry(rng)
        filled = {"who": f"{forename} {surname}", "entry": what}
        paragraphs[rng.randrange(len(paragraphs))] += " " + sentence.format(**filled)
        found.append((question.format(**filled), sentence.format(**filled), what))
    return "\n\n".join(paragraphs), tuple(found)


def entry(rng: Random) -> str:
    """A number, half of the time, or letters with a number, or two words."""
    return rng.choice([number(rng), number(rng), f"{''.join(rng.choices(LETTERS, k=2))}-{number(rng)[:4]}", "-".join(rng.sample(WORDS_APART, 2))])


def number(rng: Random) -> str:
    return str(rng.randrange(100, 10 ** rng.randint(3, 7)))


class Nearness:
    """A case in the cache of `llm`, which is loaded with the method and ratio that shares are wanted for.

    The log-probabilities of the full cache are held: 4 bytes x vocabulary x tokens asked (about 300). Raises BadInput if the case does not fit the context.
    """

    def __init__(self, llm: Llama, case: Case) -> None:
        from edgekv.eval.reading import Reading

        assert llm._kv is not None
        self._llm, self._settings = llm, llm._kv_settings
        self._asked = [self._tokens(case.text, question, answer) for question, answer in case.asked]
        self._entries = [(*self._tokens(case.text, question, answer), first_of(llm, answer, entry)) for question, answer, entry in case.entries]
        self._reading = Reading(llm, self._text, [self._settings.preset])
        self._full = [self._say([*rest, *answer]) for rest, answer in self._asked]
        self._leads = np.array(self._each_lead())

    def _tokens(self, text: str, question: str, answer: str) -> tuple[list[int], list[int]]:
        """Tokens behind the text, which is the same each time, and those of the answer."""
        chat = [{"role": "user", "content": f"{text}\n\n{question}"}]
        self._text, rest = split(self._llm, Example(chat, question, (answer,)), aware=False)
        return rest, self._llm.tokenize(answer.encode(), add_bos=False)

    def __call__(self, shares: NDArray[np.float64]) -> Near:
        """shares: [n_layer, n_head_kv]."""
        budget = replace(self._settings.preset.budget, shares=lambda ratio: shares)  # type: ignore[type-var]
        preset = replace(self._settings.preset, budget=budget)
        self._reading.compress(preset, replace(self._settings, preset=preset))
        kl = np.mean([_kl(full, self._say([*rest, *answer])) for full, (rest, answer) in zip(self._full, self._asked, strict=True)])
        weight = np.exp(-np.abs(self._leads) / SURE)
        lead = (weight * (self._each_lead() - self._leads)).sum() / weight.sum() if len(weight) else 0.0
        return Near(max(LEAST, float(kl)), float(lead))

    def _each_lead(self) -> list[float]:
        """Of each entry, how far its first token is ahead of the next likeliest, in nats."""
        return [_lead(self._say([*rest, *answer[:first]])[-1], answer[first]) for rest, answer, first in self._entries]

    def _say(self, asked: Sequence[int]) -> NDArray[np.float32]:
        """Log-probabilities [len(asked), n_vocab] behind each token, after which the conversation is the text alone again."""
        from edgekv.eval.perplexity import log_softmax
        from edgekv.eval.reading import STEP, feed

        found = [log_softmax(feed(self._llm, asked[i : i + STEP], every=True)) for i in range(0, len(asked), STEP)]
        self._llm.n_tokens = len(self._text)
        self._llm._ctx.kv_cache_seq_rm(-1, len(self._text), -1)
        return np.concatenate(found)


def _kl(full: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    return float((np.exp(full) * (full - other)).sum(axis=1, dtype=np.float64).mean())


def _lead(row: NDArray[np.float32], token: int) -> float:
    return float(row[token] - np.delete(row, token).max())


def first_of(llm: Llama, answer: str, entry: str) -> int:
    """Which token of the answer begins the entry."""
    tokens = llm.tokenize(answer.encode(), add_bos=False)
    at = llm.detokenize(tokens).find(entry.encode())
    return next(i for i in range(len(tokens)) if len(llm.detokenize(tokens[: i + 1])) > at)
