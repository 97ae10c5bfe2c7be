"""Counting words: the ten common words of a numbered list, and the three most frequent words of a
coded text.

RULER's cwe (common words 30 times, others 3 times; in short lists less often) and fwe (word k has a
share of k^-2 / zeta(2), the first one is dots that do not count).
"""

from __future__ import annotations

import string
from math import pi
from random import Random

from edgekv.errors import BadInput
from edgekv_lab.eval.haystack import Count, largest
from edgekv_lab.eval.sample import Sample
from edgekv_lab.eval.vocabulary import words

N_COMMON, N_FREQUENT = 10, 3
SIZES = {4096: ((30, 10, 3), (30, 3)), 1024: ((10, 3, 1), (6, 1)), 0: ((5, 2, 1), (4, 1))}
"""From so many tokens on: (rare words, repeats of common ones, of rare ones) of the worked example,
repeats in the list. The last row is ours.
"""
COMMON_TOKENS, FREQUENT_TOKENS = 120, 50
LIST = "Some words are in this numbered list more often than others. Remember those.\n\n{words}"
LIST_QUESTION = f"Question: which {N_COMMON} words are most common in the list?"
LIST_BEGIN = f"Answer: the {N_COMMON} most common words in the list are"
CODED = "Read this coded text and keep count of its words.\n\n{words}"
CODED_QUESTION = (
    f"Question: which {N_FREQUENT} words are most frequent in the coded text? The dots are no word."
    " Give no explanation."
)
CODED_BEGIN = f"Answer: the {N_FREQUENT} most frequent words of the coded text are"
DOTS = "..."


def common_words(rng: Random, n_tokens: int, count: Count) -> Sample:
    """A list of at most n_tokens, a worked example in front included. Raises BadInput if that is
    too short.
    """
    shape, repeats = next(size for least, size in SIZES.items() if n_tokens >= least)
    example, answer = _list(Random(rng.random()), *shape)
    head = f"{example}\n\n{LIST_QUESTION}\n\n{LIST_BEGIN} {_numbered(answer)}\n\n"
    seed = rng.random()
    n = largest(
        lambda n: count(head + _list(Random(seed), n, *repeats)[0]) <= n_tokens, n_tokens // 20
    )
    if n < 0:
        raise BadInput(f"{n_tokens} tokens are too few to count words in; give longer --lengths")
    text, wanted = _list(Random(seed), n, *repeats)
    return Sample(
        "", head + text, LIST_QUESTION, tuple(wanted), COMMON_TOKENS, ("contains_all",), LIST_BEGIN
    )


def _list(rng: Random, n_rare: int, often: int, seldom: int) -> tuple[str, list[str]]:
    """The list with its instruction, and its common words."""
    drawn = words(rng, N_COMMON + n_rare)
    common, rare = drawn[:N_COMMON], drawn[N_COMMON:]
    entries = common * often + rare * seldom
    rng.shuffle(entries)
    return LIST.format(words=_numbered(entries)), common


def _numbered(entries: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(entries, 1))


def frequent_words(rng: Random, n_tokens: int, count: Count) -> Sample:
    """A coded text of at most n_tokens. Raises BadInput if that is too short for the three to stand
    out.
    """
    vocabulary = [
        DOTS,
        *(
            "".join(rng.choices(string.ascii_lowercase, k=6))
            for _ in range(max(n_tokens // 50, 2 * N_FREQUENT))
        ),
    ]
    seed = rng.random()
    n = largest(lambda n: count(_coded(Random(seed), vocabulary, n)) <= n_tokens, n_tokens // 4)
    counts = _shares(len(vocabulary), max(n, 0))
    if not all(
        a > b for a, b in zip(counts[1 : N_FREQUENT + 1], counts[2 : N_FREQUENT + 2], strict=True)
    ):
        raise BadInput(f"{n_tokens} tokens are too few to count words in; give longer --lengths")
    return Sample(
        "",
        _coded(Random(seed), vocabulary, n),
        CODED_QUESTION,
        tuple(vocabulary[1 : N_FREQUENT + 1]),
        FREQUENT_TOKENS,
        ("contains_all",),
        CODED_BEGIN,
    )


def _shares(n_words: int, n: int) -> list[int]:
    """How often each word stands in a text of about n words."""
    return [int(n * rank**-2 * 6 / pi**2) for rank in range(1, n_words + 1)]


def _coded(rng: Random, vocabulary: list[str], n: int) -> str:
    entries = [
        word
        for word, often in zip(vocabulary, _shares(len(vocabulary), n), strict=True)
        for _ in range(often)
    ]
    rng.shuffle(entries)
    return CODED.format(words=" ".join(entries))
