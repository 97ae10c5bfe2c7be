"""merge: D2O's plan against a plain loop, its threshold over calls, and what holds for any plan."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgekv.methods import merge
from tests.reference import merge as reference

shapes = st.tuples(st.integers(0, 60), st.integers(0, 40), st.integers(1, 12), st.integers(0, 99))


class Head:
    """Rows of one head as arrays, searched and merged by plain numpy."""

    def __init__(self, n: int, d: int, rng: np.random.Generator) -> None:
        self.keys = rng.standard_normal((n, d)).astype(np.float32)
        self.values = rng.standard_normal((n, d + 2)).astype(np.float32)
        self.plan: merge.FoldPlan | None = None

    def nearest(self, il, head, gone, kept):
        unit = self.keys / np.linalg.norm(self.keys, axis=1, keepdims=True)
        products = unit[gone] @ unit[kept].T
        return products.max(axis=1), products.argmax(axis=1).astype(np.int32)

    def merge(self, il, head, plan):
        self.plan = plan
        ends = np.cumsum(plan.counts)
        for rows in (self.keys, self.values):
            for row, own, begin, end in zip(
                plan.rows, plan.own, ends - plan.counts, ends, strict=True
            ):
                rows[row] = (
                    own * rows[row] + plan.weights[begin:end] @ rows[plan.sources[begin:end]]
                )


def fold_as_reference(
    folding: merge.Folding, head: Head, kept: np.ndarray, threshold: float | None, place=(0, 0)
) -> float | None:
    """Fold, compare with the plain loop, return its threshold."""
    gone = np.setdiff1d(np.arange(len(head.keys)), kept)
    k, v, tau = reference.merge(
        (head.keys[gone], head.values[gone]), (head.keys[kept], head.values[kept]), threshold
    )
    before = head.keys[gone]
    folding.fold(head, *place, len(head.keys), kept)
    np.testing.assert_allclose(head.keys[kept], k, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(head.values[kept], v, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(head.keys[gone], before)
    return tau


@pytest.mark.parametrize(
    "n, n_kept, d", [(250, 50, 64), (240, 200, 16), (31, 30, 8), (31, 1, 8), (5, 0, 8), (5, 5, 8)]
)
def test_a_call_is_the_plain_loop(n, n_kept, d):
    rng = np.random.default_rng(n)
    fold_as_reference(
        merge.D2O().start(), Head(n, d, rng), rng.permutation(n)[:n_kept].astype(np.int32), None
    )


def test_each_head_of_a_conversation_has_its_own_threshold_that_moves_over_the_calls():
    rng = np.random.default_rng(0)
    folding = merge.D2O().start()
    thresholds = {(0, 0): None, (0, 1): None, (1, 0): None}
    for n in (70, 23, 20, 27, 21):
        for place, before in thresholds.items():
            thresholds[place] = fold_as_reference(
                folding, Head(n, 16, rng), rng.permutation(n)[:20].astype(np.int32), before, place
            )
            assert (thresholds[place] == before) == (n == 20), (
                "only a call without an evicted row leaves it where it was"
            )


def test_beta_is_the_weight_of_this_call():
    cosine = np.array([0.5, 0.75, 1.0], np.float32)
    assert merge.threshold(cosine, None, 0.7) == 0.75
    assert merge.threshold(cosine, 0.25, 0.0) == 0.25 and merge.threshold(cosine, 0.25, 1.0) == 0.75
    assert merge.threshold(cosine, 0.25, 0.7) == pytest.approx(0.6)


@given(shapes)
def test_weights_add_up_to_one_and_every_source_has_one_target(shape):
    n_gone, n_kept, d, key = shape
    rng = np.random.default_rng(key)
    head, n = Head(n_gone + n_kept, d, rng), n_gone + n_kept
    kept = rng.permutation(n)[:n_kept].astype(np.int32)
    merge.D2O().start().fold(head, 0, 0, n, kept)
    p = head.plan
    if not n_gone or not n_kept:
        assert p is None
        return
    assert len(p.sources) == len(p.weights) == p.counts.sum()
    assert len(p.rows) == len(p.own) == len(p.counts)
    np.testing.assert_allclose(
        p.own + np.add.reduceat(p.weights, np.cumsum(p.counts) - p.counts), 1, rtol=1e-5
    )
    assert (np.diff(p.rows) > 0).all()
    assert (p.counts > 0).all()
    assert len(np.unique(p.sources)) == len(p.sources)
    assert set(p.rows) <= set(kept) and not set(p.sources) & set(kept)
    assert len(p.sources), "someone is at or above the mean"


def test_a_twin_is_averaged():
    p = merge.plan(np.array([7], np.int32), np.array([3], np.int32), np.array([1], np.float32))
    assert (p.rows.tolist(), p.counts.tolist(), p.sources.tolist()) == ([3], [1], [7])
    assert p.own == pytest.approx(0.5) and p.weights == pytest.approx(0.5)


def test_sources_stand_with_their_targets():
    p = merge.plan(
        np.array([9, 4, 6], np.int32),
        np.array([5, 2, 5], np.int32),
        np.array([0.0, 1.0, 0.5], np.float32),
    )
    assert (p.rows.tolist(), p.counts.tolist(), p.sources.tolist()) == ([2, 5], [1, 2], [4, 9, 6])
    total = 1 + np.exp(0.5) + np.e
    np.testing.assert_allclose(p.weights, [0.5, 1 / total, np.exp(0.5) / total], rtol=1e-6)
    np.testing.assert_allclose(p.own, [0.5, np.e / total], rtol=1e-6)
