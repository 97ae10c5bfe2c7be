"""Metrics: what an answer is worth, 0..1. Each takes the prediction and its sample.

Those of LongBench (Bai et al., arXiv 2308.14508) count as its code does, SQuAD's F1 and EM as its
evaluation script, RULER's as string_match_all (Hsieh et al., arXiv 2404.06654).
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable

from edgekv_lab.eval.lcs import edit_similarity, rouge_l
from edgekv_lab.eval.sample import Sample

Metric = Callable[[str, Sample], float]
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def best(score: Callable[[str, str], float]) -> Metric:
    """The best score against any of the references."""
    return lambda prediction, sample: max(
        (score(prediction, reference) for reference in sample.references), default=0.0
    )


def contains_all(prediction: str, sample: Sample) -> float:
    """Share of the references that stand in the answer; upper and lower case and thousands
    separators aside.
    """
    text = re.sub(r"(?<=\d),(?=\d)", "", prediction).lower()
    return sum(reference.lower() in text for reference in sample.references) / len(
        sample.references
    )


def normalise(text: str) -> list[str]:
    """SQuAD's: words in lower case without punctuation and articles."""
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split()


def f1(prediction: str, reference: str) -> float:
    """Words in common."""
    ours, theirs = normalise(prediction), normalise(reference)
    same = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * same / (len(ours) + len(theirs)) if same else 0.0


def exact(prediction: str, reference: str) -> float:
    return float(normalise(prediction) == normalise(reference))


def classification(prediction: str, sample: Sample) -> float:
    """1 / labels named, if the right one is among them; a label that is a part of the right one's
    name does not count as named.
    """
    (label,) = sample.references[:1]
    named = {
        name
        for name in sample.classes
        if name in prediction and (name == label or name not in label)
    }
    return 1 / len(named) if label in named else 0.0


def retrieval(prediction: str, reference: str) -> float:
    """Share of the numbers in the answer that are the right paragraph's."""
    return count(prediction, (re.findall(r"\d+", reference) or [""])[0])


def count(prediction: str, reference: str) -> float:
    """Share of the numbers in the answer that are the right one."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(reference.strip()) / len(numbers) if numbers else 0.0


def code(prediction: str, reference: str) -> float:
    """Edit similarity of the answer's first line that is neither a comment nor a fence."""
    lines = (
        line
        for line in prediction.lstrip("\n").split("\n")
        if not any(mark in line for mark in ("`", "#", "//"))
    )
    return edit_similarity(next(lines, ""), reference)


def final_number(prediction: str, reference: str) -> float:
    """Whether the number behind ####, or else the last one, is the reference (GSM8K)."""
    marked = re.findall(rf"####\s*\$?({_NUMBER})", prediction)
    numbers = marked[:1] or re.findall(_NUMBER, prediction)[-1:]
    return float(bool(numbers) and _value(numbers[0]) == _value(reference))


_NUMBER = r"-?\d[\d,]*(?:\.\d+)?"


def _value(number: str) -> float:
    return float(number.replace(",", ""))


METRICS: dict[str, Metric] = {
    "contains_all": contains_all,
    "f1": best(f1),
    "exact": best(exact),
    "rouge_l": best(rouge_l),
    "classification": classification,
    "retrieval": best(retrieval),
    "count": best(count),
    "code": best(code),
    "final_number": best(final_number),
}


def scores(prediction: str, sample: Sample) -> dict[str, float]:
    """Every metric of the sample; the first one is called score."""
    first, *more = sample.metrics
    return {
        "score": METRICS[first](prediction, sample),
        **{name: METRICS[name](prediction, sample) for name in more},
    }
