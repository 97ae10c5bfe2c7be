"""Metrics, intervals: hand-computed values, and plain loops for what is fast."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgekv_lab.eval import lcs, metrics
from edgekv_lab.eval.interval import interval, wilson
from edgekv_lab.eval.sample import Sample


def sample(*references: str, metric: str = "f1", classes: tuple[str, ...] = ()) -> Sample:
    return Sample("x", "context", "question", references, 10, (metric,), classes=classes)


def score(metric: str, prediction: str, *references: str, **more) -> float:
    return metrics.scores(prediction, sample(*references, metric=metric, **more))["score"]


def plain_lcs(a, b) -> int:
    """Length of a longest common subsequence, by the definition."""

    @cache
    def longest(i: int, j: int) -> int:
        if i == 0 or j == 0:
            return 0
        if a[i - 1] == b[j - 1]:
            return longest(i - 1, j - 1) + 1
        return max(longest(i - 1, j), longest(i, j - 1))

    return longest(len(a), len(b))


def plain_edits(a: str, b: str) -> int:
    """Insertions and deletions that make b of a, by the definition."""

    @cache
    def edits(i: int, j: int) -> int:
        if i == 0 or j == 0:
            return i + j
        return min(
            edits(i - 1, j) + 1,
            edits(i, j - 1) + 1,
            edits(i - 1, j - 1) if a[i - 1] == b[j - 1] else i + j,
        )

    return edits(len(a), len(b))


WORDS = st.lists(st.sampled_from("abcdef"), max_size=12)


@given(WORDS, WORDS)
def test_lengths_of_common_subsequences(a, b):
    got = lcs.table(a, b)
    assert [[int(x) for x in row] for row in got] == [
        [plain_lcs(a[:i], b[:j]) for j in range(len(b) + 1)] for i in range(len(a) + 1)
    ]


@given(WORDS, WORDS)
def test_the_words_found_are_a_common_subsequence(a, b):
    words = lcs.common(a, b)
    assert words <= set(a) & set(b)
    assert bool(words) == bool(set(a) & set(b))
    assert len(words) <= plain_lcs(a, b)


@given(
    st.permutations("abcdefgh"), st.permutations("abcdefgh"), st.integers(1, 8), st.integers(1, 8)
)
def test_rouge_l_of_single_sentences_without_repeats_is_the_plain_one(a, b, n, m):
    a, b = a[:n], b[:m]
    shared = plain_lcs(tuple(a), tuple(b))
    assert lcs.rouge_l(" ".join(a), " ".join(b)) == pytest.approx(2 * shared / (n + m))


def test_rouge_l_of_several_sentences():
    # Lin 2004, section 3.2: reference w1..w5, candidates "w1 w2 w6 w7 w8" and "w1 w3 w8 w9 w5":
    # their union is w1 w2 w3 w5
    got = lcs.rouge_l("w1 w2 w6 w7 w8. w1 w3 w8 w9 w5.", "w1 w2 w3 w4 w5")
    precision, recall = 4 / 8, 4 / 5  # 8 different words: w1 w2 w3 w5 w6 w7 w8 w9
    assert got == pytest.approx(2 * precision * recall / (precision + recall))
    assert lcs.rouge_l("", "a b") == lcs.rouge_l(". .", "a b") == lcs.rouge_l("c", "a b") == 0


@given(st.text("abcd", max_size=12), st.text("abcd", max_size=12))
def test_edit_similarity_is_that_of_a_plain_loop(a, b):
    both = len(a) + len(b)
    assert lcs.edit_similarity(a, b) == pytest.approx(
        1 - plain_edits(a, b) / both if both else 1, abs=0.005 + 1e-9
    )


def test_contains_all_is_the_share_of_references():
    assert score("contains_all", "It is 1,234,567 or 7654321.", "1234567", "7654321") == 1
    assert score("contains_all", "1234567,7654321", "1234567", "7654321") == 1
    assert (
        score("contains_all", "It is 123456.", "1234567")
        == score("contains_all", "", "1234567")
        == 0
    )
    assert score("contains_all", "Alpha and GAMMA", "alpha", "beta", "gamma", "delta") == 0.5


def test_f1_and_exact_normalise_as_squad_does():
    assert score("exact", "The Eiffel Tower!", "eiffel tower") == 1
    assert score("exact", "Eiffel", "eiffel tower") == 0
    assert score("f1", "in the Eiffel Tower", "Eiffel Tower") == pytest.approx(
        2 * (2 / 3) * 1 / (2 / 3 + 1)
    )
    # the best reference counts
    assert score("f1", "no idea", "Paris", "an idea") == pytest.approx(2 * 0.5 * 1 / 1.5)
    # words count as often as they stand there
    assert score("f1", "yes yes yes", "yes") == pytest.approx(2 * (1 / 3) / (1 / 3 + 1))
    assert score("f1", "", "x") == 0


def test_classification_shares_the_point_between_the_labels_named():
    classes = ("Person", "Place", "Place and time", "Food")
    assert score("classification", "Type: Food", "Food", classes=classes) == 1
    assert score("classification", "Food or Person", "Food", classes=classes) == 0.5
    # 'Place' is a part of it
    assert score("classification", "Place and time", "Place and time", classes=classes) == 1
    assert score("classification", "Place and time", "Place", classes=classes) == 0.5
    assert score("classification", "none", "Food", classes=classes) == 0


def test_retrieval_and_count_are_shares_of_the_numbers():
    assert score("retrieval", "Paragraph 12", "Paragraph 12") == 1
    assert score("retrieval", "12, 3, 4 or 12", "Paragraph 12") == 0.5
    assert (
        score("retrieval", "Paragraph 1", "Paragraph 12")
        == score("retrieval", "none", "Paragraph 12")
        == 0
    )
    assert score("count", "There are 7", "7") == 1
    assert score("count", "7 of 8", "7") == 0.5
    assert score("count", "", "7") == 0


def test_code_takes_the_first_line_that_is_code():
    assert score("code", "\n```python\n# comment\nreturn x + 1\nmore", "return x + 1") == 1
    assert score("code", "// all\n# comments", "return") == 0


@pytest.mark.parametrize(
    ("prediction", "right"),
    [
        ("So 3 + 4 = 7.\n#### 72", 1),
        ("#### $72.00", 1),
        ("72 first, then #### 8", 0),
        ("It is 70, no, 72.", 1),
        ("It is 72, no, 70.", 0),
        ("none", 0),
        ("#### 1,072", 0),
    ],
)
def test_the_final_number(prediction, right):
    assert score("final_number", prediction, "72") == right


def test_thousands_separators_and_signs():
    assert score("final_number", "#### -1,072", "-1072") == 1
    assert score("final_number", "1072", "1,072") == 1


# ---- intervals


def test_wilson_holds_the_share_and_narrows():
    low, high = wilson(9, 10)
    assert (low, high) == pytest.approx((0.5958, 0.9821), abs=1e-4)
    wide, narrow = wilson(45, 50), wilson(450, 500)
    assert narrow[1] - narrow[0] < wide[1] - wide[0]
    assert wilson(0, 10)[0] == 0 and wilson(10, 10)[1] == pytest.approx(1)


def test_hits_get_wilson_and_shares_the_normal_interval():
    assert interval([1, 1, 0]) == wilson(2, 3)
    mean, half = 0.5, 1.96 * 0.25 / 3**0.5  # standard deviation of 0.25, 0.5, 0.75 is 0.25
    assert interval([0.25, 0.5, 0.75]) == pytest.approx((mean - half, mean + half))
    assert interval([0.1, 1.0]) == pytest.approx((0.0, 1.0)) and interval([0.5]) == (0, 1)
    assert interval([1.0, 1.0], hits=False) == (1, 1)
    assert interval([3.0], float("inf"), hits=False) == (0, float("inf"))
