"""budget: whole numbers, exact sums, never above the total nor above what a head has."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgekv.budget import BUDGETS as REGISTRY
from edgekv.budget import Plan, check_ratio, clip, pyramid, rows_for, table, uniform
from edgekv.errors import BadInput, EdgeKVError

BUDGETS = pytest.mark.parametrize("budget", [uniform, pyramid])
shapes = st.tuples(st.integers(1, 40), st.integers(1, 9))


@BUDGETS
@given(n_rows=st.integers(0, 5000), shape=shapes)
def test_the_mean_is_exact(budget, n_rows, shape):
    counts = budget(n_rows, *shape)
    assert counts.dtype == np.int32 and counts.shape == shape
    assert counts.sum() == n_rows * counts.size and (counts >= 0).all()


@given(n_rows=st.integers(0, 5000), shape=shapes, beta=st.floats(1, 40), window=st.integers(0, 64))
def test_pyramid_falls_with_the_layer_and_is_flat_over_the_heads(n_rows, shape, beta, window):
    counts = pyramid(n_rows, *shape, beta=beta, window=window)
    assert (np.diff(counts, axis=0) <= 0).all() and (counts == counts[:, :1]).all()
    assert (counts >= min(window, n_rows)).all() and counts.sum() == n_rows * counts.size


def test_pyramid_follows_the_paper():
    rows = pyramid(128, 32, 8)[:, 0]
    assert rows[0] == 242 and rows[-1] == 14  # 8 + 120 * (2 - 1/20) and 8 + 120 / 20
    assert np.ptp(np.diff(rows)) <= 1


@given(st.data())
def test_clip_never_exceeds_and_loses_nothing(data):
    n = data.draw(st.integers(1, 30))
    lists = st.lists(st.integers(0, 300), min_size=n, max_size=n)
    wish, have = np.array(data.draw(lists))[:, None], np.array(data.draw(lists))[:, None]
    got = clip(wish, have)
    assert got.dtype == np.int32 and (got <= have).all()
    assert (got >= np.minimum(wish, have)).all(), "nobody pays for another's excess"
    assert got.sum() == min(wish.sum(), have.sum())
    given_away = got - np.minimum(wish, have)
    room = got < have
    if room.any():  # even: who still has room got as much as anybody, but for the odd rows
        assert given_away[room].min() >= given_away.max() - 1


def counts_of(name: str, n_rows: int, have: np.ndarray) -> np.ndarray:
    """What a budget that needs no scores gives."""
    plan = Plan(n_rows, have.astype(np.int32), tuple(range(len(have))), int(have.max()), 4, 32, n_rows / int(have.max()))
    return REGISTRY[name].start(plan).update(len(have) - 1, None, None)


def test_what_is_cut_off_goes_to_the_layers_with_room():
    got = counts_of("pyramid", 60, np.full((4, 2), 100))
    assert got[0].tolist() == [100, 100] and got.sum() == 60 * 8
    assert counts_of("uniform", 60, np.full((4, 2), 50)).tolist() == np.full((4, 2), 50).tolist()


def test_heads_that_a_layer_lacks_cost_the_others_nothing():
    have = np.array([[100, 100], [100, 0]])
    assert counts_of("uniform", 60, have).tolist() == [[60, 60], [60, 0]]


def test_a_table_is_taken_as_it_is_or_refused():
    assert table([[3, 4], [5, 6]], 2, 2).dtype == np.int32
    for wrong in ([3, 4], [[0.2, 0.3]], [[-1]], [["a"]], [[float("nan")]], [[2**40]]):
        with pytest.raises(BadInput):
            table(wrong)
    with pytest.raises(BadInput, match="2 x 2.*3 x 2"):
        table([[3, 4], [5, 6]], 3, 2)


@given(n=st.integers(0, 10**6), percent=st.integers(1, 100), min_tokens=st.integers(0, 300))
def test_a_ratio_rounds_down_but_not_below_the_floor_nor_above_what_there_is(n, percent, min_tokens):
    rows = rows_for(n, ratio=percent / 100, min_tokens=min_tokens)
    assert rows == min(max(n * percent // 100, min_tokens), n)


def test_the_decimal_number_counts_not_its_binary_neighbour():
    assert 0.29 * 100 < 29 and rows_for(100, ratio=0.29, min_tokens=0) == 29
    assert rows_for(1_000_000, ratio=1e-5, min_tokens=0) == 10


def test_tokens_and_bytes_are_taken_at_their_word():
    assert rows_for(1000, tokens=64) == 64
    assert rows_for(1000, n_bytes=4 * 256 * 60 + 5, bytes_per_row_head=256, n_heads=4) == 60
    assert rows_for(10, tokens=64) == 10
    assert rows_for(1000, ratio=0.5, tokens=300) == 300
    assert rows_for(1000) == 1000
    for small in ({"tokens": 0}, {"n_bytes": 100, "bytes_per_row_head": 256, "n_heads": 4}):
        with pytest.raises(BadInput, match="larger"):
            rows_for(1000, **small)


@pytest.mark.parametrize("wrong", [20, 0, -1, "abc", float("nan"), float("inf"), 1.0001, "", None, 101])
def test_a_wrong_ratio_is_one_line_that_says_what_to_write(wrong):
    with pytest.raises(EdgeKVError) as caught:
        check_ratio(wrong)
    assert "\n" not in str(caught.value) and "keep" in str(caught.value)


def test_a_percentage_is_answered_with_the_share():
    with pytest.raises(BadInput, match="write 0.2 "):
        check_ratio(20)
    assert check_ratio("0.2") == Fraction("0.2").__float__()
