"""methods: one table of cases for what holds for all of them, then what is special to each."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edgekv import methods
from edgekv.base.parallel import MANY
from edgekv.errors import BadInput, EdgeKVError
from edgekv.methods import Preset, get, presets
from edgekv.methods import kvzap as kvzap_module
from edgekv.methods.budget import BUDGETS
from edgekv.methods.keydiff import key_diversity
from edgekv.methods.kvzap import PAIRS, KVzap, KVzapParams, Surrogate, features, n_features
from edgekv.methods.layer import LayerStats
from edgekv.methods.pooling import max_pool, mean_pool
from edgekv.methods.select import keep
from edgekv.methods.snapkv import SnapKVParams
from tests.lib import ROOT
from tests.reference import scores as reference
from tests.reference.model import rope

ALL = pytest.mark.parametrize("name", sorted(methods.REGISTRY))
ATTENTION = {  # score -> (first of the observing queries counted from the end, reference)
    "snapkv": (32, reference.snapkv),
    "cake": (32, reference.cake),
    "tova": (1, reference.tova),
    "h2o": (None, reference.h2o),
    "kvzip": (50, reference.kvzip),
}
KEYS = {"knorm": reference.knorm, "keydiff": reference.keydiff}


def method(name: str, d: int = 8):
    """The score of a preset; kvzap with maps for 4 layers of 2 heads of size d."""
    score = get(name).score
    if not isinstance(score, KVzap):
        return score
    weights = (
        np.random.default_rng(9).standard_normal((4, 2, n_features(d, d) + 1)).astype(np.float32)
    )
    return replace(score, surrogate=Surrogate(weights, "neighbours"))


def layer(
    n_new: int = 60, n_old: tuple[int, ...] = (0, 0), seed: int = 0, il: int = 1, key: int = 0
) -> LayerStats:
    """A layer whose heads kept `n_old` rows of n_seen - n_new earlier tokens, in no particular
    order.
    """
    rng = np.random.default_rng(key)
    n_head, before = len(n_old), 3 * max(n_old)
    n_rows = max(n_old) + n_new
    pos = np.full((n_head, n_rows), -1, np.int32)
    for k, n in enumerate(n_old):
        pos[k, :n] = rng.permutation(before)[:n]
        pos[k, n : n + n_new] = before + np.arange(n_new)
    stats = {name: rng.random(pos.shape, dtype=np.float32) for name in methods.STATS}
    for array in stats.values():
        array[pos < 0] = np.nan  # padding is meaningless: a method must not let it through
    keys = rng.standard_normal((n_head, n_rows, 8)).astype(np.float32)
    return LayerStats(
        il,
        4,
        n_head,
        n_rows,
        np.array(n_old, np.int32),
        n_new,
        pos,
        **stats,
        seed=seed,
        rows=lambda k, some=slice(None): (keys[k, : n_old[k] + n_new][some],) * 2,
        future=lambda n: (
            np.full((2 * n_head, 8), 0.3, np.float32),
            np.tile(np.eye(8, dtype=np.float32), (2 * n_head, 1, 1)),
        ),
    )


@ALL
@pytest.mark.parametrize("n_old", [(0, 0), (5, 17), (1, 0)])
@pytest.mark.parametrize("n_new", [1, 3, 60])
def test_a_score_for_every_row_and_none_for_padding(name, n_old, n_new):
    stats = layer(n_new, n_old)
    scores = method(name).score(stats)
    assert scores.dtype == np.float32 and scores.shape == stats.pos.shape
    assert np.isfinite(scores[stats.pos >= 0]).all() and (scores[stats.pos < 0] == -np.inf).all()


@ALL
@given(count=st.integers(0, 90), old=st.integers(0, 20), key=st.integers(0, 99))
def test_what_survives_scored_highest(name, count, old, key):
    stats = layer(60, (old, 7), key=key)
    scores = method(name).score(stats)
    for k, rows in enumerate(
        keep(scores, [count, count], stats.pos, stats.n_seen, sink=0, window=0)
    ):
        exist = np.flatnonzero(stats.pos[k] >= 0)
        gone = np.setdiff1d(exist, rows)
        assert len(rows) == min(count, len(exist))
        if len(rows) and len(gone):
            assert scores[k, rows].min() >= scores[k, gone].max()


@ALL
def test_scores_do_not_depend_on_the_order_of_the_rows(name):
    stats = layer(40, (12, 12))
    order = np.random.default_rng(1).permutation(stats.n_rows)
    arrays = {name: getattr(stats, name)[:, order] for name in ("pos", *methods.STATS)}
    turned = LayerStats(
        stats.il,
        4,
        2,
        stats.n_rows,
        stats.n_old,
        stats.n_new,
        **arrays,
        rows=lambda k, some=slice(None): tuple(x[order][some] for x in stats.rows(k)),
        future=stats.future,
    )
    score = method(name).score
    np.testing.assert_allclose(score(turned), score(stats)[:, order], rtol=1e-5, atol=1e-5)


@ALL
def test_a_preset_says_what_it_is(name):
    preset = get(name)
    assert preset.name == name and preset.title and "\n" not in preset.title
    assert preset.keeps_all == (name == "full")
    assert preset.budget.name and preset.budget.title


@ALL
def test_a_method_uses_only_what_it_asked_for(name):
    stats = layer()
    asked = get(name).score.observe.stats
    less = LayerStats(**{**vars(stats), **{s: None for s in methods.STATS if s not in asked}})
    assert set(get(name).budget.stats) <= set(get(name).observe.stats)
    np.testing.assert_array_equal(method(name).score(less), method(name).score(stats))


def test_random_is_seeded_per_layer_and_stable_over_turns():
    score = get("random").score.score
    a, b = score(layer(60)), score(layer(60, seed=1))
    assert (a == score(layer(60))).all() and (a != b).any() and (a != score(layer(60, il=2))).any()
    assert (score(layer(90))[:, :60] == a).all()
    assert score(layer(seed=-1)).shape == a.shape


def test_streaming_keeps_the_sinks_and_the_most_recent():
    stats = layer(100)
    rows = keep(get("streaming").score.score(stats), [50, 50], stats.pos, 100, sink=4, window=32)[0]
    assert sorted(stats.pos[0, rows].tolist()) == [0, 1, 2, 3, *range(54, 100)]


@given(st.integers(1, 50), st.integers(0, 6), st.integers(0, 99))
def test_max_pool_is_the_plain_loop(n, side, key):
    x = np.random.default_rng(key).standard_normal((2, n)).astype(np.float32)
    expected = [[x[k, max(0, j - side) : j + side + 1].max() for j in range(n)] for k in range(2)]
    np.testing.assert_array_equal(max_pool(x, 2 * side + 1), np.array(expected, np.float32))


@given(st.integers(1, 50), st.integers(0, 3), st.integers(0, 99))
def test_mean_pool_is_the_plain_loop(n, side, key):
    x = np.random.default_rng(key).standard_normal((2, n)).astype(np.float32)
    expected = [
        [x[k, max(0, j - side) : j + side + 1].sum() / (2 * side + 1) for j in range(n)]
        for k in range(2)
    ]
    np.testing.assert_allclose(mean_pool(x, 2 * side + 1), expected, rtol=1e-5, atol=1e-6)


# ---- the published formulas, on the attention of random queries and keys


def causal_attention(
    n_head_kv: int, n_group: int, n: int, key: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities [n_head_kv, G, n, n] and the keys [n_head_kv, n, 16] they are of."""
    generator = torch.Generator().manual_seed(key)
    keys = torch.randn(n_head_kv, n, 16, generator=generator)
    queries = torch.randn(n_head_kv, n_group, n, 16, generator=generator) * 2
    mask = torch.full((n, n), -torch.inf).triu(1)
    return (queries @ keys[:, None].transpose(-1, -2) / 4 + mask).softmax(-1), keys


def stats_of(attention: torch.Tensor, keys: torch.Tensor, n_observe: int | None) -> LayerStats:
    """What the engine would offer if the last n_observe queries were asked (None: all of them, as
    column sums).
    """
    n_head_kv, n = attention.shape[0], attention.shape[-1]
    columns = reference.columns(attention if n_observe is None else attention[:, :, -n_observe:])
    return LayerStats(
        0,
        1,
        n_head_kv,
        n,
        np.zeros(n_head_kv, np.int32),
        n,
        np.tile(np.arange(n, dtype=np.int32), (n_head_kv, 1)),
        mean=columns.mean.numpy(),
        var=columns.var.numpy(),
        max=columns.max.numpy(),
        col_entropy=columns.entropy.numpy(),
        col_sum=columns.mean.numpy() * np.float32(n),
        rows=lambda k, some=slice(None): (keys[k].numpy()[some],) * 2,
    )


@pytest.mark.parametrize("n_group", [1, 3])
@pytest.mark.parametrize("name", [*ATTENTION, *KEYS])
def test_scores_are_the_reference_s(name, n_group):
    attention, keys = causal_attention(2, n_group, 90)
    n_observe, formula = ATTENTION.get(name, (1, None))
    asked = attention if n_observe is None else attention[:, :, -n_observe:]
    expected = formula(asked) if formula else KEYS[name](keys)
    np.testing.assert_allclose(
        get(name).score.score(stats_of(attention, keys, n_observe)),
        expected.numpy(),
        rtol=1e-4,
        atol=1e-7,
    )


@pytest.mark.parametrize("kernel", [3, 9])
def test_keydiff_may_be_pooled_over_neighbours(kernel):
    attention, keys = causal_attention(2, 1, 90)
    preset = get(f"score=keydiff,kernel={kernel}")
    expected = torch.nn.functional.max_pool1d(
        reference.keydiff(keys), kernel, stride=1, padding=kernel // 2
    )
    np.testing.assert_allclose(
        preset.score.score(stats_of(attention, keys, 1), preset.params),
        expected.numpy(),
        rtol=1e-4,
        atol=1e-7,
    )


@pytest.mark.parametrize("pairs", PAIRS)
def test_what_kvzap_predicts_is_the_reference_s(pairs, monkeypatch):
    monkeypatch.setattr(kvzap_module, "BLOCK", 16)
    generator = torch.Generator().manual_seed(3)
    keys, values = (
        torch.randn(2, 50, 12, generator=generator),
        torch.randn(2, 50, 6, generator=generator),
    )
    weights = torch.randn(1, 2, 6 + 6 + 3 + 1, generator=generator)
    stats = replace(
        stats_of(*causal_attention(2, 1, 50), 1),
        rows=lambda k, some=slice(None): (keys[k].numpy()[some], values[k].numpy()[some]),
    )
    expected, kvzap = (
        reference.kvzap(keys, values, weights[0], pairs),
        KVzap(Surrogate(weights.numpy(), pairs)),
    )
    np.testing.assert_allclose(
        kvzap.score(stats, KVzapParams(novelty=0)), expected.numpy(), rtol=1e-4, atol=1e-5
    )
    ranks = [x.argsort(-1).argsort(-1) / 50 for x in (expected, reference.keydiff(keys))]
    np.testing.assert_allclose(
        kvzap.score(stats, KVzapParams(novelty=0.5)), (ranks[0] + 0.5 * ranks[1]).numpy(), rtol=1e-6
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_heads_are_served_in_a_forked_process_too():
    code = (
        "import os, sys; from edgekv.base.parallel import MANY, each_head\n"
        "ask = lambda: each_head(lambda k: k * k, 5, MANY)\n"
        "assert ask() == [0, 1, 4, 9, 16]; pid = os.fork()\n"
        "if pid == 0: os._exit(ask() != [0, 1, 4, 9, 16])\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


def test_ranks_of_nothing_and_of_what_is_not_a_number():
    assert len(kvzap_module.rank(np.zeros(0, np.float32))) == 0
    nan, inf = np.nan, np.inf
    assert kvzap_module.rank(
        np.array([2, nan, -1, nan, inf, -0.0, 0.0, -inf], np.float32)
    ).tolist() == [6 / 8, 0, 3 / 8, 0, 7 / 8, 4 / 8, 4 / 8, 0]


@pytest.mark.parametrize("n", [1, 50, 3 * MANY])
def test_kvzap_ranks_equal_rows_alike_and_long_heads_side_by_side(n):
    rng = np.random.default_rng(n)
    heads = [
        tuple(np.round(rng.standard_normal((2, n)), digits).astype(np.float32))
        for digits in (1, 2, 6)
    ]
    layer = LayerStats(
        0,
        1,
        3,
        n,
        np.zeros(3, np.int32),
        n,
        np.tile(np.arange(n, dtype=np.int32), (3, 1)),
        predicted_scores=lambda k, *_: heads[k],
    )
    ranks = [[np.searchsorted(np.sort(x), x) / n for x in head] for head in heads]
    scores = KVzap(Surrogate(np.zeros((1, 3, 4), np.float32), "halves")).score(
        layer, KVzapParams(novelty=0.5)
    )
    np.testing.assert_allclose(scores, [a + 0.5 * b for a, b in ranks], rtol=1e-6)


@pytest.mark.parametrize(("pairs", "neox"), [("neighbours", False), ("halves", True)])
def test_kvzap_does_not_ask_where_a_row_stands(pairs, neox):
    keys, values = torch.randn(2, 1, 20, 16, generator=torch.Generator().manual_seed(4))
    turned = rope(keys.expand(1, 20, 16), torch.full((20,), 700), 10000.0, neox)
    a, b = (
        features(x[0].numpy(), values[0].numpy(), key_diversity(x[0].numpy()), pairs)
        for x in (keys, turned)
    )
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_kvzap_without_a_profile_says_so():
    with pytest.raises(EdgeKVError, match="profile"):
        get("kvzap").score.score(layer())


@pytest.mark.parametrize("name", KEYS)
def test_a_rotation_of_the_keys_changes_nothing(name):
    """A quantised cache holds keys that were multiplied by an orthonormal matrix."""
    attention, keys = causal_attention(2, 1, 60)
    matrix = torch.linalg.qr(torch.randn(16, 16, generator=torch.Generator().manual_seed(1))).Q
    score = get(name).score.score
    np.testing.assert_allclose(
        score(stats_of(attention, keys @ matrix, 1)),
        score(stats_of(attention, keys, 1)),
        rtol=1e-4,
        atol=1e-6,
    )


# ---- details and names


def test_snapkv_pools_by_token_index():
    """An earlier turn's row is pooled with the tokens next to it that still exist, wherever they
    are stored.
    """
    pos = np.array([[20, 3, 4, 30, 31, 32, 33, 34]], np.int32)
    mean = np.array([[0.9, 0.1, 0.3, 0.0, 0.5, 0.0, 0.0, 0.2]], np.float32)
    stats = LayerStats(0, 1, 1, 8, np.array([3], np.int32), 5, pos, mean=mean)
    expected = np.array([[0.9, 0.3, 0.3, 0.5, 0.5, 0.5, 0.5, 0.5]], np.float32)
    np.testing.assert_array_equal(get("snapkv").score.score(stats), expected)
    np.testing.assert_array_equal(get("snapkv").score.score(stats, SnapKVParams(kernel=1)), mean)


@pytest.mark.parametrize(
    "text, offer",
    [
        ("h2o2", "snapkv.*h2o"),
        ("h2o2:a=1", "snapkv.*h2o"),
        ("", "snapkv"),
        ("budget=cake", "score=NAME.*keydiff"),
        ("score=full", "keydiff"),
        ("score=snapkv,merge=all", "none, d2o"),
        ("d2o:ema=2", "0 to 1"),
        ("score=snapkv,budget=lots", "uniform.*pooled"),
        ("cake:kernal=5", "gamma, kernel, tau1, tau2"),
        ("h2o:kernel=5", "has none"),
        ("snapkv:kernel=4", "odd"),
        ("snapkv:kernel=5.5", "whole number.*7"),
        ("cake:gamma=much", "number.*200"),
        ("cake:gamma=nan", "0 or more"),
        ("cake:tau1=0", "above 0"),
        ("cake:gamma", "name=value"),
        ("cake:gamma=1,gamma=2", "twice"),
        ("d2o:scale=some", "unit, raw"),
        ("adakv:alpha=2", "0 to 1"),
        ("kvzap:novelty=-1", "0 or more"),
        ("kvzap:novelty=nan", "0 or more"),
        ("dynamickv:m=0", "1 or more"),
        ("dynamickv:r_max=0.5", "1 or more"),
        ("pyramidkv:beta=0", "1 or more"),
        ("snapkv:queries=some", "window, late, all, last, probe"),
        ("h2o:queries=window", "sum over all tokens; leave queries out"),
        ("score=keydiff,queries=probe", "nobody's attention; leave queries out"),
        ("snapkv:queries=all,queries=last", "twice"),
    ],
)
def test_what_is_misspelled_is_one_line_with_the_choice(text, offer):
    with pytest.raises(BadInput, match=offer) as caught:
        get(text)
    assert "\n" not in str(caught.value)


def test_parameters_reach_the_score_and_the_budget():
    preset = get("cake:gamma=100,tau1=1.6")
    assert (preset.params.gamma, preset.params.kernel) == (100, 5)
    assert (preset.budget.params.tau1, preset.budget.params.tau2) == (1.6, 0.6)
    assert get("cake").budget.params.tau1 == 1
    assert (
        get("snapkv:kernel=5").name == "snapkv:kernel=5"
        and get("d2o:scale=raw").budget.params.scale == "raw"
    )


@pytest.mark.parametrize(
    "score", sorted({p.score.name for p in methods.REGISTRY.values() if not p.keeps_all})
)
@pytest.mark.parametrize("budget", sorted(BUDGETS))
def test_any_score_goes_with_any_budget(score, budget):
    preset = get(f"score={score}, budget={budget}")
    assert (preset.score.name, preset.budget.name) == (score, budget)
    assert set(preset.score.observe.stats) | set(preset.budget.stats) == set(preset.observe.stats)
    assert get(preset.name).name == preset.name
    assert get(f"score={score}").budget.name == "uniform"


def test_queries_are_a_choice_of_their_own():
    """The score's paper names them, the user may name others; a budget that looks at attention
    looks at the same.
    """
    assert [
        get(name).observe.source for name in ("snapkv", "tova", "kvzip", "snapkv:queries=probe")
    ] == ["window", "last", "probe", "probe"]
    mixed = get("score=kvzip,budget=cake,queries=all").observe
    assert (
        mixed.source == "all"
        and set(mixed.observed) == {"max", "var", "col_entropy"}
        and not mixed.probe
    )
    assert (
        get("score=keydiff,budget=cake,queries=probe").observe.probe
        and not get("score=keydiff").observe.probe
    )
    assert get("d2o").observe.sums and not get("d2o").observe.observed


@pytest.mark.parametrize(
    "text",
    [
        "cake:gamma=100,tau1=1.6",
        "snapkv:queries=probe,kernel=5",
        "score=kvzip,budget=cake,queries=all",
        "score=cake,budget=pyramid,gamma=0.5,beta=7",
        "d2o:scale=raw",
    ],
)
def test_a_name_spells_its_preset(text):
    preset = get(text)
    assert preset.name == text and get(preset.name) == preset


def test_no_parameter_belongs_to_two_stages():
    for preset in methods.REGISTRY.values():
        for budget in BUDGETS.values():
            for merge in filter(None, methods.MERGES.values()):
                names = [
                    name
                    for params in (preset.score.params, budget.params, merge.params)
                    if params
                    for name in vars(params)
                ]
                assert len(names) == len(set(names)), (preset.name, budget.name, merge.name)


def test_a_merge_is_part_of_a_mix():
    preset = get("score=keydiff,budget=adakv,merge=d2o,ema=0.5")
    assert preset.merge.params.ema == 0.5 and get(preset.name) == preset
    assert get("score=keydiff,merge=none").merge is None and get("d2o").merge is not None
    assert get("d2o:ema=0.9,scale=raw").merge.params.ema == 0.9


def test_an_older_name_means_the_same_preset():
    assert get("edgekv") is get("kvzap-summary")
    assert get("edgekv:rows=64").name == "kvzap-summary:rows=64"
    assert "edgekv" not in presets()


def test_other_packages_add_methods(monkeypatch, caplog):
    found = [
        EntryPoint("mine", "tests.test_methods:MINE", methods.GROUP),
        EntryPoint("broken", "tests.no_such_module:x", methods.GROUP),
        EntryPoint("snapkv", "tests.test_methods:MINE", methods.GROUP),
        EntryPoint("edgekv", "tests.test_methods:MINE", methods.GROUP),
    ]
    monkeypatch.setattr(methods, "entry_points", lambda group: found)
    methods._plugins.cache_clear()
    try:
        assert get("mine") is MINE and list(presets()) == [*methods.REGISTRY, "mine"]
        assert get("snapkv").score.name == "snapkv" and get("edgekv").score.name == "kvzap"
        assert "'broken'" in caplog.text
    finally:
        methods._plugins.cache_clear()


MINE = Preset("mine", get("streaming").score, BUDGETS["uniform"], "for the test")


def test_every_published_preset_exists():
    assert set(
        "snapkv pyramidkv adakv cake dynamickv d2o lukv evolkv kvzip streaming h2o tova random"
        " full".split()
    ) <= set(presets())
