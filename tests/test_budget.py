"""budget: whole numbers, exact sums, never above the total nor above what a head has."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from edgekv.errors import BadInput, EdgeKVError
from edgekv.methods.budget import BUDGETS as REGISTRY
from edgekv.methods.budget import (
    Plan,
    ProfileBudget,
    check_ratio,
    clip,
    from_shares,
    pyramid,
    rows_for,
    table,
    uniform,
)
from edgekv.methods.budget.cake import log_preference
from edgekv.methods.budget.cascade import Cascade
from edgekv.methods.budget.sharing import free, protected
from edgekv.methods.layer import LayerStats
from edgekv.methods.select import keep, protect
from tests.reference import budgets as reference
from tests.reference.scores import columns

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


# ---- what holds for every budget

SINK, WINDOW = 2, 5


class SomeProfile:
    """A profile for whatever model the plan is of."""

    name = "profile"

    def start(self, plan: Plan):
        return profile_of(
            lambda ratio: np.random.default_rng(5).random(plan.have.shape) ** 4
        ).start(plan)


def profile_of(shares) -> ProfileBudget:
    return ProfileBudget("profile", "", shares=shares)


WITHOUT_TABLE = [budget for budget in REGISTRY.values() if isinstance(budget, ProfileBudget)]
EVERY = pytest.mark.parametrize(
    "budget",
    [*(b for b in REGISTRY.values() if b not in WITHOUT_TABLE), SomeProfile()],
    ids=lambda budget: budget.name,
)


@pytest.mark.parametrize("budget", WITHOUT_TABLE, ids=lambda budget: budget.name)
def test_a_profile_that_was_not_looked_up_is_no_budget(budget):
    with pytest.raises(EdgeKVError, match="profile"):
        budget.start(plan_of(20, np.full((2, 2), 100)))


def plan_of(n_rows: int, have: np.ndarray, n_tokens: int | None = None) -> Plan:
    n_tokens = n_tokens or int(have.max())
    return Plan(
        n_rows,
        have.astype(np.int32),
        tuple(range(len(have))),
        n_tokens,
        SINK,
        WINDOW,
        n_rows / n_tokens,
    )


def layers_of(plan: Plan, key: int = 0, ties: bool = False) -> list[tuple[np.ndarray, LayerStats]]:
    """Scores (protected rows +inf) and statistics of each layer of a plan: this turn's tokens
    behind rows of earlier ones.
    """
    rng, found = np.random.default_rng(key), []
    n_new = int(plan.have[plan.have > 0].min())
    for il, have in enumerate(plan.have):
        have = have[have > 0]
        shape = (len(have), int(have.max()))
        pos = np.full(shape, -1, np.int32)
        for k, n in enumerate(have):
            pos[k, : n - n_new] = np.sort(rng.permutation(plan.n_tokens - n_new)[: n - n_new])
            pos[k, n - n_new : n] = np.arange(plan.n_tokens - n_new, plan.n_tokens)
        values = {
            name: rng.gamma(0.3, size=shape).astype(np.float32)
            for name in ("var", "col_entropy", "col_sum")
        }
        layer = LayerStats(
            il,
            len(plan.have),
            shape[0],
            shape[1],
            (have - n_new).astype(np.int32),
            n_new,
            pos,
            **values,
        )
        scores = np.where(
            pos < 0, -np.inf, rng.standard_normal(shape) * rng.random() + rng.random()
        ).astype(np.float32)
        found.append(
            (protect(scores.round(1) if ties else scores, pos, layer.n_seen, SINK, WINDOW), layer)
        )
    return found


def play(budget, plan: Plan, layers) -> list[np.ndarray]:
    """The counts after each layer."""
    spending = budget.start(plan)
    return [spending.update(i, scores, layer).copy() for i, (scores, layer) in enumerate(layers)]


@st.composite
def plans(draw, ragged: bool = True) -> Plan:
    n_layer = draw(st.integers(1, 9))
    n_head_kv = draw(st.integers(1, 4))
    n_tokens = draw(st.integers(1, 120))
    have = np.full((n_layer, n_head_kv), n_tokens)
    if ragged and draw(
        st.booleans()
    ):  # a later turn: heads hold different numbers of rows; some layers have fewer heads
        rng = np.random.default_rng(draw(st.integers(0, 99)))
        have = rng.integers(draw(st.integers(1, n_tokens)), n_tokens + 1, have.shape)
        have[rng.random(n_layer) < 0.3, 1:] = 0
    return plan_of(draw(st.integers(1, n_tokens)), have, n_tokens)


UNEVEN = plan_of(5, np.array([[5, 0, 0], [6, 4, 4], [6, 6, 4], [4, 6, 5], [4, 6, 4], [5, 5, 5]]))
"""Later heads have room for all that earlier ones lack; those that do not exist must get none of
it.
"""


@EVERY
@given(plan=plans(), key=st.integers(0, 9), ties=st.booleans())
@example(plan=UNEVEN, key=0, ties=False)
def test_every_budget_keeps_the_contract(budget, plan, key, ties):
    layers = layers_of(plan, key, ties)
    stages = play(budget, plan, layers)
    for i, counts in enumerate(stages):
        assert counts.shape == (i + 1, plan.have.shape[1]) and counts.dtype == np.int32
        assert (counts >= 0).all() and (counts <= plan.have[: i + 1]).all()
        assert counts.sum() <= plan.total, (
            "with the layer that is read next never more than the total and one layer"
        )
        if i:
            assert (counts[:i] <= stages[i - 1]).all(), "finished layers only shrink"
        if free(plan) > 0:  # so that a cut keeps the best rows
            n_protected = [
                [int(np.isposinf(row).sum()) for row in scores] for scores, _ in layers[: i + 1]
            ]
            for row, asked in zip(counts, n_protected, strict=True):
                assert (row[: len(asked)] >= asked).all()
    if plan.have.min() > 0 and (plan.have == plan.have[:, :1]).all():
        assert counts.sum() >= min(plan.total, plan.have.sum()) - plan.n_heads, (
            "at most a row per head stays unspent"
        )


@EVERY
def test_a_budget_for_everything_keeps_everything(budget):
    plan = plan_of(50, np.full((4, 2), 50))
    assert (play(budget, plan, layers_of(plan))[-1] == 50).all()


@EVERY
@pytest.mark.parametrize("n_rows", [1, 6, 7])
def test_a_budget_below_the_protected_rows_is_the_same_for_all(budget, n_rows):
    plan = plan_of(n_rows, np.full((4, 2), 50))
    counts = play(budget, plan, layers_of(plan))[-1]
    assert (counts == n_rows).all()


@EVERY
def test_two_prompts_do_not_know_of_each_other(budget):
    plan = plan_of(20, np.full((4, 2), 50))
    first = play(budget, plan, layers_of(plan))
    assert all(
        np.array_equal(a, b)
        for a, b in zip(first, play(budget, plan, layers_of(plan)), strict=True)
    )


# ---- each against plain loops


def heads_of(layers) -> list[list[np.ndarray]]:
    return [
        [row[pos >= 0] for row, pos in zip(scores, layer.pos, strict=True)]
        for scores, layer in layers
    ]


@given(plan=plans(ragged=False), key=st.integers(0, 9), ties=st.booleans())
def test_pooled_counts_the_best_scores_of_all(plan, key, ties):
    assume(free(plan) > 0)
    layers = layers_of(plan, key, ties)
    for i, counts in enumerate(play(REGISTRY["pooled"], plan, layers)):
        np.testing.assert_array_equal(counts, reference.best(heads_of(layers[: i + 1]), plan.total))


@given(plan=plans(ragged=False), key=st.integers(0, 9), ties=st.booleans())
def test_adakv_counts_the_best_scores_of_a_layer(plan, key, ties):
    assume(free(plan) > 0)
    layers = layers_of(plan, key, ties)
    counts = play(REGISTRY["adakv"], plan, layers)[-1]
    np.testing.assert_array_equal(
        counts, [reference.adakv(heads, plan.n_rows) for heads in heads_of(layers)]
    )
    assert (counts >= np.floor(0.2 * plan.n_rows)).all()
    assert (counts.sum(1) == plan.n_rows * plan.have.shape[1]).all()


@given(
    plan=plans(ragged=False),
    key=st.integers(0, 9),
    m=st.integers(1, 5),
    r_max=st.sampled_from([1.0, 1.5, 2.0, 10.0]),
)
@example(
    plan=plan_of(9, np.full((5, 4), 26)), key=4, m=3, r_max=1.5
)  # the layers to come need room for what is protected
def test_dynamickv_is_its_algorithm(plan, key, m, r_max):
    assume(free(plan) > 0)
    layers = layers_of(plan, key)
    budget = REGISTRY["dynamickv"]
    counts = play(replace(budget, params=replace(budget.params, m=m, r_max=r_max)), plan, layers)[
        -1
    ]
    outside = [[head[np.isfinite(head)] for head in heads] for heads in heads_of(layers)]
    least = int(protected(plan)[0, 0])
    expected = reference.dynamickv(outside, free(plan), plan.n_tokens - least, r_max, m)
    assert (counts == counts[:, :1]).all()
    assert counts[:, 0].tolist() == [least + n for n in expected]


def attention_of(
    n_layer: int, n_head_kv: int, n_group: int, n: int, key: int
) -> list[torch.Tensor]:
    """Causal attention [n_head_kv, G, n, n] of layers that differ in how sharp they look."""
    generator = torch.Generator().manual_seed(key)
    mask = torch.full((n, n), -torch.inf).triu(1)
    return [
        (
            torch.randn(n_head_kv, n_group, n, n, generator=generator) * (0.3 + il % 4) + mask
        ).softmax(-1)
        for il in range(n_layer)
    ]


def stats_of(il: int, n_layer: int, attention: torch.Tensor) -> LayerStats:
    n_head_kv, n = attention.shape[0], attention.shape[-1]
    window = columns(attention[:, :, -WINDOW:])
    pos = np.tile(np.arange(n, dtype=np.int32), (n_head_kv, 1))
    return LayerStats(
        il,
        n_layer,
        n_head_kv,
        n,
        np.zeros(n_head_kv, np.int32),
        n,
        pos,
        var=window.var.numpy(),
        col_entropy=window.entropy.numpy(),
        col_sum=attention.sum(2).mean(1).numpy(),
    )


@pytest.mark.parametrize("n_rows", [12, 20, 60])
@pytest.mark.parametrize("name", ["cake", "d2o"])
@pytest.mark.parametrize("n_group", [1, 3])
def test_layer_budgets_from_attention(name, n_rows, n_group):
    n, n_layer = 80, 6
    attention = attention_of(n_layer, 2, n_group, n, key=n_rows)
    plan = plan_of(n_rows, np.full((n_layer, 2), n))
    layers = [
        (np.zeros((2, n), np.float32), stats_of(il, n_layer, a)) for il, a in enumerate(attention)
    ]
    if name == "cake":
        weights = np.exp(
            [reference.log_preference(a[:, :, -WINDOW:], WINDOW, 1.0, 0.6) for a in attention]
        )
        by_stage = [weights[: m + 1] for m in range(n_layer)]
    else:
        f = [reference.variance(a) for a in attention]
        by_stage = [reference.unit_weights(f[: m + 1]) for m in range(n_layer)]
    least = SINK + WINDOW
    stages = play(REGISTRY[name], plan, layers)
    assert all((counts == counts[:, :1]).all() for counts in stages), "heads of a layer are alike"
    expected = reference.cascade(by_stage, (n_rows - least) * n_layer, n - least)
    assert [(counts[:, 0] - least).tolist() for counts in stages] == expected
    once = reference.divide(by_stage[-1], (n_rows - least) * n_layer, [n - least] * n_layer)
    if name == "cake" and max(once) < n - least:  # settled once at the end is the same
        assert expected[-1] == [int(x + 1e-9) for x in once]


@given(plan=plans(ragged=False), key=st.integers(0, 30))
def test_keeping_the_best_of_the_best_is_keeping_the_best(plan, key):
    """CAKE's Theorem 1: a cascade of cuts leaves the rows that one cut of the full cache leaves,
    with the same budgets (eq. 7).
    """
    assume(free(plan) > 0)
    layers = layers_of(plan, key)
    preferences = np.random.default_rng(key).gamma(4, size=len(layers))
    least = int(protected(plan)[0, 0])
    once = reference.divide(
        preferences, free(plan) / plan.have.shape[1], [plan.n_tokens - least] * len(layers)
    )
    assume(max(once) < plan.n_tokens - least)
    spending = Cascade(plan, lambda layer: preferences[layer.il], lambda p: p)
    store: list[list[np.ndarray]] = []
    for i, (scores, layer) in enumerate(layers):
        counts = spending.update(i, scores, layer)
        store.append(keep(scores, counts[i], layer.pos, layer.n_seen, SINK, WINDOW))
        store = [
            [rows[:n] for rows, n in zip(heads, cut, strict=True)]
            for heads, cut in zip(store, counts, strict=True)
        ]
        assert sum(len(rows) for heads in store for rows in heads) <= plan.total
    for (scores, layer), heads, n in zip(layers, store, once, strict=True):
        at_once = keep(
            scores, [least + int(n + 1e-9)] * len(heads), layer.pos, layer.n_seen, SINK, WINDOW
        )
        assert all(np.array_equal(a, b) for a, b in zip(heads, at_once, strict=True))


def test_cake_prefers_what_is_spread_out_and_moves():
    params, layer = REGISTRY["cake"].params, stats_of(0, 1, attention_of(1, 2, 1, 80, 0)[0])
    wider = replace(layer, col_entropy=2 * layer.col_entropy)
    livelier = replace(layer, var=2 * layer.var)
    base, spread_out, moves = (
        np.exp(log_preference(x, WINDOW, params)) for x in (layer, wider, livelier)
    )
    np.testing.assert_allclose(
        [spread_out / base, moves / base], [2 ** (1 / params.tau1), 2 ** (1 / params.tau2)]
    )
    inside = replace(layer, var=np.where(layer.pos >= 80 - WINDOW, 9, layer.var))
    assert log_preference(inside, WINDOW, params) == log_preference(layer, WINDOW, params), (
        "the window's own columns do not count"
    )


def test_d2o_as_printed_gives_nearly_all_to_one_layer():
    budget = REGISTRY["d2o"]
    plan = plan_of(20, np.full((4, 1), 80))
    layers = [
        (np.zeros((1, 80), np.float32), stats_of(il, 4, a * 40))
        for il, a in enumerate(attention_of(4, 1, 1, 80, 0))
    ]
    raw = play(replace(budget, params=replace(budget.params, scale="raw")), plan, layers)[-1]
    unit = play(budget, plan, layers)[-1]
    assert raw.max() > 2 * unit.max() - SINK - WINDOW and raw.min() == SINK + WINDOW < unit.min()


# ---- profiles


@given(plan=plans(), key=st.integers(0, 99), power=st.integers(0, 8))
def test_a_profile_spends_the_total_exactly(plan, key, power):
    shares = np.random.default_rng(key).random(plan.have.shape) ** power
    counts = from_shares(shares, plan)
    assert counts.dtype == np.int32 and (counts <= plan.have).all()
    assert counts.sum() == min(plan.total, plan.have.sum())
    if free(plan) > 0:
        assert (counts >= np.minimum(protected(plan), plan.n_rows)).all()


def test_a_profile_that_fits_is_taken_as_it_is():
    shares = np.array([[0.9, 0.1], [0.25, 0.15]])
    plan = plan_of(350, np.full((2, 2), 1000))
    assert from_shares(shares, plan).tolist() == [[900, 100], [250, 150]]
    assert from_shares(shares / 2, plan).tolist() == [[900, 100], [250, 150]], "one factor for all"
    assert from_shares(shares * 0, plan).tolist() == [[350, 350], [350, 350]]
    assert from_shares(
        np.array([[1, 0], [0, 0.4]]), plan_of(350, np.full((2, 2), 1000))
    ).tolist() == [[986, 10], [10, 394]]


def test_a_profile_knows_the_layers_of_the_model():
    shares = np.array([[0.9, 0.9], [0.8, 0.2], [0.1, 0.1], [0.6, 0.4]])
    # layers 0 and 2 keep a sliding window
    plan = replace(plan_of(50, np.full((2, 2), 100)), layers=(1, 3))
    assert profile_of(lambda ratio: shares * ratio * 2).start(plan).update(
        1, None, None
    ).tolist() == [[80, 20], [60, 40]]


# ---- what is clipped


def counts_of(name: str, n_rows: int, have: np.ndarray) -> np.ndarray:
    """What a budget that needs no scores gives."""
    return REGISTRY[name].start(plan_of(n_rows, have)).update(len(have) - 1, None, None)


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
def test_a_ratio_rounds_down_but_not_below_the_floor_nor_above_what_there_is(
    n, percent, min_tokens
):
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


@pytest.mark.parametrize(
    "wrong", [20, 0, -1, "abc", float("nan"), float("inf"), 1.0001, "", None, 101]
)
def test_a_wrong_ratio_is_one_line_that_says_what_to_write(wrong):
    with pytest.raises(EdgeKVError) as caught:
        check_ratio(wrong)
    assert "\n" not in str(caught.value) and "keep" in str(caught.value)


def test_a_percentage_is_answered_with_the_share():
    with pytest.raises(BadInput, match="write 0.2 "):
        check_ratio(20)
    assert check_ratio("0.2") == Fraction("0.2").__float__()


def test_a_pyramid_over_layers_of_different_heads_leaves_the_protected_rows():
    have = np.array([[100, 100], [100, 100], [100, 0]], np.int32)
    counts = REGISTRY["pyramid"].start(Plan(40, have, (0, 1, 2), 100, 4, 32, 0.4)).counts
    assert (counts[have > 0] >= 36).all()
    assert counts.sum() <= 200
    assert counts[0, 0] > counts[1, 0] > counts[2, 0]
