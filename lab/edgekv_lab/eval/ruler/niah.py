"""Needles in a haystack: numbers under named keys, one or several of either, in prose or in noise.

RULER's niah with its counts of keys, values and queries; values have 7 digits, keys are two words
with a hyphen.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from edgekv_lab.eval.haystack import Count, fill, hide, noise, room
from edgekv_lab.eval.sample import Sample
from edgekv_lab.eval.sentences import sentences
from edgekv_lab.eval.vocabulary import pairs

NEEDLE = "One of the secret numbers of {key} is {value}."
INSTRUCTION = (
    "Some secret numbers are hidden in the following text. Remember them: you will be asked for"
    " them afterwards."
)
VALUE_TOKENS = 32


@dataclass(frozen=True)
class Niah:
    """One family. keys: how many are hidden; values: numbers of each; queries: how many of the keys
    are asked for.
    """

    keys: int = 1
    values: int = 1
    queries: int = 1
    noise: bool = False

    def __call__(self, rng: Random, n_tokens: int, count: Count) -> Sample:
        """A text of at most n_tokens with its needles. Raises BadInput if that is too short for
        them.
        """
        keys = pairs(rng, self.keys)
        numbers = {
            key: [str(rng.randint(1_000_000, 9_999_999)) for _ in range(self.values)]
            for key in keys
        }
        needles = [NEEDLE.format(key=key, value=value) for key in keys for value in numbers[key]]
        rng.shuffle(needles)
        text = fill(
            noise() if self.noise else sentences(rng), room(n_tokens, needles, count), count
        )
        asked = rng.sample(keys, self.queries)
        wanted = [value for key in asked for value in numbers[key]]
        question, begin = self.wording(", ".join(asked))
        return Sample(
            "",
            f"{INSTRUCTION}\n\n{hide(text, needles, rng)}",
            question,
            tuple(wanted),
            VALUE_TOKENS * len(wanted),
            ("contains_all",),
            begin,
        )

    def wording(self, keys: str) -> tuple[str, str]:
        """The question, and how the answer begins."""
        if self.values == self.queries == 1:
            return (
                f"What is the secret number of {keys} in the text?",
                f"The secret number of {keys} in the text is",
            )
        return (
            f"What are all the secret numbers of {keys} in the text?",
            f"The secret numbers of {keys} in the text are",
        )
