"""Metrics made of longest common subsequences: ROUGE-L between texts, edit similarity between
lines.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray


def table(a: Sequence[Hashable], b: Sequence[Hashable]) -> NDArray[np.int32]:
    """int32 [len(a) + 1, len(b) + 1]: length of the longest common subsequence of a[:i] and
    b[:j].
    """
    numbers = {item: number for number, item in enumerate(dict.fromkeys(b))}
    right = np.array([numbers[item] for item in b], np.int32)
    lengths = np.zeros((len(a) + 1, len(b) + 1), np.int32)
    # a row at once: the best of "match here" and "as above", carried to the right
    for i, item in enumerate(a):
        matched = lengths[i, :-1] + (right == numbers.get(item, -1))
        lengths[i + 1, 1:] = np.maximum.accumulate(np.maximum(matched, lengths[i, 1:]))
    return lengths


def common(a: Sequence[str], b: Sequence[str]) -> set[str]:
    """The words of one longest common subsequence; of several the one that leaves out the last of b
    first.
    """
    lengths, found, i, j = table(a, b), set(), len(a), len(b)
    while i and j:
        if a[i - 1] == b[j - 1]:
            found.add(a[i - 1])
            i, j = i - 1, j - 1
        elif lengths[i - 1, j] > lengths[i, j - 1]:
            i -= 1
        else:
            j -= 1
    return found


def rouge_l(prediction: str, reference: str) -> float:
    """F1 of ROUGE-L at summary level, 0..1, as LongBench counts it (with the package `rouge`
    1.0.1).

    Sentences end at full stops; words count once each: those of any longest common subsequence of a
    sentence of one with a sentence of the other, out of all different words.
    """
    ours, theirs = _sentences(prediction), _sentences(reference)
    words = [{word for sentence in text for word in sentence} for text in (ours, theirs)]
    if not (words[0] and words[1]):
        return 0.0
    shared = set().union(*(common(b, a) for a in ours for b in theirs))
    precision, recall = len(shared) / len(words[0]), len(shared) / len(words[1])
    return 2 * precision * recall / (precision + recall) if shared else 0.0


def _sentences(text: str) -> list[list[str]]:
    return [sentence.split() for sentence in text.split(".") if sentence.strip()]


def edit_similarity(prediction: str, reference: str) -> float:
    """1 - edits / (both lengths together), in whole percent: insertions and deletions of
    characters, so a substitution is two edits.

    As LongBench counts it (`fuzz.ratio` of fuzzywuzzy on top of python-Levenshtein; alone it counts
    otherwise). 1 for two empty texts.
    """
    together = len(prediction) + len(reference)
    if not together:
        return 1.0
    return round(200 * int(table(prediction, reference)[-1, -1]) / together) / 100
