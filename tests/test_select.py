"""select: exact counts, protected rows, nothing twice, what survives scored highest, a cut is a
truncation.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgekv.methods.select import keep


@st.composite
def heads(draw):
    """(scores, pos, n_seen): heads of different lengths, the tokens of each in order or in any,
    with gaps.
    """
    n_head = draw(st.integers(1, 4))
    n_seen = draw(st.integers(1, 120))
    in_order = draw(st.booleans())
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    pos = np.full((n_head, n_seen), -1, np.int32)
    for k in range(n_head):
        n = rng.integers(0, n_seen + 1)
        pos[k, :n] = np.arange(n) if in_order else rng.permutation(n_seen)[:n]
    levels = draw(st.sampled_from([2, 5, 10**6]))  # few levels: many ties
    scores = rng.integers(0, levels, pos.shape).astype(np.float32) - levels // 2
    return scores, pos, n_seen


counts = st.integers(0, 130)
limits = {"sink": st.integers(0, 8), "window": st.integers(0, 40)}


def protected_rows(pos, n_seen, sink, window):
    return {int(r) for r in np.flatnonzero((pos >= 0) & ((pos < sink) | (pos >= n_seen - window)))}


@given(case=heads(), count=counts, **limits)
def test_counts_are_exact_and_nothing_is_there_twice(case, count, sink, window):
    scores, pos, n_seen = case
    for k, rows in enumerate(keep(scores, [count] * len(pos), pos, n_seen, sink, window)):
        assert rows.dtype == np.int32
        assert len(rows) == min(count, (pos[k] >= 0).sum()) == len(set(rows.tolist()))
        assert (pos[k, rows] >= 0).all()


@given(case=heads(), count=counts, **limits)
def test_protected_rows_stay_and_the_rest_scored_highest(case, count, sink, window):
    scores, pos, n_seen = case
    for k, rows in enumerate(keep(scores, [count] * len(pos), pos, n_seen, sink, window)):
        protected = protected_rows(pos[k], n_seen, sink, window)
        if count < len(protected):
            assert set(rows.tolist()) <= protected
            gone = protected - set(rows.tolist())
            # the most recent stay
            assert not gone or max(pos[k, list(gone)]) < min(pos[k, rows], default=n_seen)
            continue
        assert set(rows[: len(protected)].tolist()) == protected
        assert (np.diff(pos[k, rows[: len(protected)]]) > 0).all()
        others = [r for r in np.flatnonzero(pos[k] >= 0) if r not in protected]
        best = sorted(others, key=lambda r: (-scores[k, r], pos[k, r]))[: count - len(protected)]
        assert rows[len(protected) :].tolist() == best


@given(case=heads(), a=counts, b=counts, **limits)
def test_fewer_rows_are_a_part_of_more(case, a, b, sink, window):
    scores, pos, n_seen = case
    fewer, more = sorted((a, b))
    for k in range(len(pos)):
        few, many = (
            keep(scores[k : k + 1], [n], pos[k : k + 1], n_seen, sink, window)[0]
            for n in (fewer, more)
        )
        assert set(few.tolist()) <= set(many.tolist())
        if fewer >= len(protected_rows(pos[k], n_seen, sink, window)):
            assert few.tolist() == many[: len(few)].tolist()


@given(case=heads(), a=counts, b=counts, **limits)
def test_selecting_twice_is_selecting_once(case, a, b, sink, window):
    """Top-k of top-k is top-k of everything: what cascades and later shrinking rely on."""
    scores, pos, n_seen = case
    fewer, more = sorted((a, b))
    for k in range(len(pos)):
        many = keep(scores[k : k + 1], [more], pos[k : k + 1], n_seen, sink, window)[0]
        once = keep(scores[k : k + 1], [fewer], pos[k : k + 1], n_seen, sink, window)[0]
        again = keep(scores[k][None, many], [fewer], pos[k][None, many], n_seen, sink, window)[0]
        assert many[again].tolist() == once.tolist()


def test_each_head_has_its_own_count():
    pos = np.tile(np.arange(100, dtype=np.int32), (3, 1))
    scores = np.random.default_rng(0).random(pos.shape, dtype=np.float32)
    assert [len(r) for r in keep(scores, [0, 50, 1000], pos, 100)] == [0, 50, 100]


@pytest.mark.parametrize("worst", [np.nan, -np.inf])
def test_unusable_scores_come_last(worst):
    scores = np.array([[worst, 1, 0.0, worst, 2, -0.0]], np.float32)
    pos = np.arange(6, dtype=np.int32)[None]
    assert keep(scores, [6], pos, 6, sink=0, window=0)[0].tolist() == [4, 1, 2, 5, 0, 3]
    assert keep(scores, [5], pos, 6, sink=0, window=0)[0].tolist() == [4, 1, 2, 5, 0]


def test_scores_of_any_number_type_are_ranked():
    """A method from elsewhere may give float64 or integers."""
    pos = np.arange(50, dtype=np.int32)[None]
    scores = np.random.default_rng(1).permutation(50)[None]
    expected = keep(scores.astype(np.float32), [20], pos, 50, 1, 2)
    for kind in (np.float64, np.int32):
        np.testing.assert_array_equal(keep(scores.astype(kind), [20], pos, 50, 1, 2), expected)
