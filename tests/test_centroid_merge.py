"""summary: rows that stand for what a head lost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from edgekv import methods
from edgekv.errors import BadInput, Unsupported
from edgekv.learn.reading import Reading
from edgekv.methods import select
from edgekv.methods.centroid_merge import (
    ROUNDS,
    CentroidMerge,
    CentroidParams,
    Look,
    draw,
    looking,
    stand_for,
)
from edgekv.methods.query_moments import JITTER, PackedMoments
from edgekv.native import Prefill
from tests.engine import feed, load, positions, share
from tests.reference.summary import fitted
from tests.reference.summary import groups as reference_groups
from tests.reference.summary import summary as reference

MIX = "score=keydiff,budget={},merge=summary"
N_PROMPT = 500


def head(n: int = 300, d: int = 16, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """keys, values [n, d]"""
    keys, values = (
        np.random.default_rng(seed).standard_normal((2, n, d)) * np.array([0.5, 1])[:, None, None]
    ).astype(np.float32)
    return keys, values


def kept(n: int, count: int, seed: int = 1) -> np.ndarray:
    scores = np.random.default_rng(seed).random((1, n)).astype(np.float32)
    return select.keep(scores, [count], np.arange(n, dtype=np.int32)[None], n)[0]


def attend(queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    weights = np.exp(queries.astype(np.float64) @ keys.T.astype(np.float64))
    return weights @ values / weights.sum(axis=1, keepdims=True)


def asked(d: int = 16, seed: int = 0, size: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of the queries of two heads."""
    mean = size * np.random.default_rng(seed).standard_normal((2, d)).astype(np.float32)
    return mean, np.stack([0.05 * size**2 * np.eye(d, dtype=np.float32)] * 2)


@dataclass
class Head:
    """What becomes of a head: the rows that it keeps, and what those from `first` on hold in the
    end.
    """

    keep: np.ndarray
    first: int
    keys: np.ndarray
    values: np.ndarray


def summed(
    keys: np.ndarray,
    values: np.ndarray,
    keep: np.ndarray,
    moments: tuple[np.ndarray, np.ndarray] | None = None,
    **params,
) -> Head:
    n, merge = len(keys), CentroidMerge(CentroidParams(**params))
    losses = merge.losses([keep], np.arange(n, dtype=np.int32)[None], n, 4, 32)
    rows = {"k": keys, "v": values}
    look = looking(lambda _, some, part: rows[part][some], losses, 2 * keys.shape[1], False)
    queries = draw(*(moments or asked()), merge.params.draws)
    found = merge.centroids(losses, look, queries)[0]
    return Head(losses[0].keep, found.first, found.keys, found.values)


def labels(keys: np.ndarray, values: np.ndarray, queries: np.ndarray, n: int) -> np.ndarray:
    none = keys[:0], values[:0]
    return stand_for(Look(keys, values, 1, none, 1), queries, n, CentroidParams())[2]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_a_row_is_what_the_reference_says(seed, rows):
    keys, values = head(seed=seed)
    found = summed(keys, values, kept(300, 100), asked(seed=seed), rows=rows)
    queries = draw(*asked(seed=seed), 64)
    places = found.keep[found.first : found.first + rows]
    gone = np.setdiff1d(np.arange(300), np.setdiff1d(found.keep, places))
    label = labels(keys[gone], values[gone], queries, rows)
    groups = [gone[label == j] for j in np.unique(label)]
    assert len(found.keys) == len(groups) == rows
    wanted = list(zip(*reference(keys, values, queries, groups, 0.1), strict=True))
    np.testing.assert_allclose(found.keys, wanted[0], rtol=1e-3, atol=1e-4)
    stays = np.setdiff1d(found.keep, places)
    moved = fitted(keys, values, queries, stays, (wanted[0], wanted[1]), 0.1)
    assert np.abs(moved - wanted[1]).max() > 1e-3
    np.testing.assert_allclose(found.values, moved, rtol=1e-3, atol=2e-4)
    assert max(wanted[2]) < 2
    found = summed(keys, values, kept(300, 100), asked(seed=seed), rows=rows, fit=1e9)
    np.testing.assert_allclose(found.values, wanted[1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("d_v", [16, 24])
def test_groups_are_k_means_of_logits_and_values(seed, d_v):
    keys, queries = head(seed=seed)[0], draw(*asked(seed=seed), 64)
    values = np.random.default_rng(seed).standard_normal((300, d_v)).astype(np.float32)
    found = labels(keys, values, queries, 8)
    wanted = reference_groups(keys, values, queries, 8, ROUNDS, JITTER)
    assert (found == wanted).mean() > 0.99


@pytest.mark.parametrize("n", [60, 700])
def test_threads_change_no_result(n):
    """The work is cut into the same parts however many threads there are."""
    keys, values = head(n)
    kept_rows = tuple(x[:40] for x in head(50, seed=1))
    seen, queries = Look(keys, values, 2.5, kept_rows, 1.5), draw(*asked(), 64)
    one, *others = (stand_for(seen, queries, 24, CentroidParams(), t) for t in (1, 2, 5, 40))
    for other in others:
        for a, b in zip(one, other, strict=True):
            assert len(a) > 0 and np.array_equal(a, b)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("n", [300, 20000])
def test_attention_is_nearer_to_that_over_all_rows(seed, n):
    """Of the longer one some rows are looked at."""
    keys, values = head(n, seed=seed)
    keep = kept(n, n // 3)
    values[np.setdiff1d(np.arange(n), keep)] += 1  # what is lost is not like what stays
    found, queries = summed(keys, values, keep, asked(seed=seed)), draw(*asked(seed=seed), 32)
    assert len(found.keys) == 16 and sorted(found.keep) == sorted(keep)
    new_keys, new_values = keys.copy(), values.copy()
    places = found.keep[found.first : found.first + 16]
    new_keys[places], new_values[places] = found.keys, found.values
    want = attend(queries, keys, values)
    dropped, less = (
        np.square(attend(queries, k[keep], v[keep]) - want).sum()
        for k, v in ((keys, values), (new_keys, new_values))
    )
    assert less < 0.1 * dropped


def test_equal_rows_are_summed_up_exactly():
    """A hundred times the same row is one row whose logits are higher by log 100."""
    keys, values = head()
    moments = np.ones((1, 16), np.float32), 0.01 * np.eye(16, dtype=np.float32)[None]
    keys[100:200], values[100:200] = keys[100], values[100]
    keep = np.concatenate(
        [np.arange(4), np.arange(268, 300), np.arange(4, 100), np.arange(200, 268)]
    ).astype(np.int32)
    found, queries = (
        summed(keys, values, keep, moments, rows=2, ridge=1e-9, fit=1e9),
        draw(*moments, 64),
    )
    assert sorted(found.keep[found.first : found.first + 2]) == [266, 267]
    nearest = np.abs(found.values - values[100]).sum(axis=1).argmin()
    # one other row is with them
    np.testing.assert_allclose(found.values[nearest], values[100], atol=0.01)
    assert np.abs(queries @ found.keys[nearest] - np.log(100) - queries @ keys[100]).mean() < 0.1


def test_rows_that_are_all_equal_are_no_trouble():
    """Few groups have members then; places that were not needed keep their rows."""
    keys, values = (np.broadcast_to(x[:1], x.shape).copy() for x in head())
    found = summed(keys, values, kept(300, 100), rows=8)
    assert 1 <= len(found.keys) <= 8 and sorted(found.keep) == sorted(kept(300, 100))
    np.testing.assert_allclose(
        found.values, np.broadcast_to(values[0], found.values.shape), rtol=1e-4, atol=1e-4
    )


def test_summary_rows_take_the_place_of_the_least():
    keys, values = head()
    keep = kept(300, 100)
    found = summed(keys, values, keep, rows=4)
    assert found.first == 36 and list(found.keep[:36]) == list(keep[:36])
    assert sorted(found.keep[36:40]) == sorted(keep[-4:])
    assert list(found.keep[40:]) == list(keep[36:-4])
    tight = kept(300, 36)
    found = summed(keys, values, tight, rows=4)
    assert sorted(found.keep[found.first :]) == sorted(tight[4:8]), "the window's oldest"
    assert len(summed(keys, values, kept(300, 3)).keys) == 0, "too few rows to give one away"
    assert len(summed(keys, values, np.arange(300, dtype=np.int32)).keys) == 0, "nothing is lost"


def test_what_cannot_be_summed_up_is_dropped():
    keys, values = head()
    keep = kept(300, 100)
    for found in (
        summed(keys, values, keep, worst=1e-6),
        summed(keys, values, keep, asked(size=0.01), ridge=1e-9),
    ):
        assert len(found.keys) == 0 and sorted(found.keep) == sorted(keep), (
            "the key misses, or is far longer than any of the head's"
        )


@pytest.mark.parametrize(
    ("n_rows", "window", "recent", "stay"),
    [
        (1000, 32, 96, 96),
        (400, 32, 96, 80),
        (128, 32, 96, 32),
        (400, 128, 96, 128),
        (400, 32, 0, 32),
        (0, 1, 96, 1),
    ],
)
def test_a_fifth_of_the_rows_may_be_recent(n_rows, window, recent, stay):
    assert CentroidMerge(CentroidParams(recent=recent)).window(n_rows, window) == stay


def test_draws_have_the_distribution_and_are_always_the_same():
    rng = np.random.default_rng(0)
    mean = rng.standard_normal((2, 8)).astype(np.float32)
    root = rng.standard_normal((8, 8)).astype(np.float32)
    cov = np.stack([root @ root.T, np.zeros((8, 8), np.float32)])
    found = draw(mean, cov, 20000).reshape(2, 20000, 8)
    np.testing.assert_allclose(found[0].mean(axis=0), mean[0], atol=0.1)
    np.testing.assert_allclose(np.cov(found[0].T), cov[0], atol=0.05 * np.abs(cov[0]).max())
    np.testing.assert_allclose(found[1], np.broadcast_to(mean[1], (20000, 8)), atol=1e-4)
    assert np.array_equal(found.reshape(-1, 8), draw(mean, cov, 20000))


def test_a_conversation_keeps_the_queries_in_a_quarter_of_the_bytes():
    root = np.random.default_rng(3).standard_normal((3, 64, 64)).astype(np.float32)
    root[1] *= 1e6  # beyond f16
    root[2, :, 40:] = 0  # fewer tokens than dimensions
    mean, cov = root[:, 0], root @ root.transpose(0, 2, 1)
    packed = PackedMoments.of(zip(mean, cov, strict=True))
    assert packed.n_bytes < cov.nbytes / 3.7
    found_mean, found = zip(*map(packed.of_head, range(3)), strict=True)
    assert np.array_equal(found_mean, mean)
    for a, b in zip(found, cov, strict=True):
        np.testing.assert_allclose(
            a, b + JITTER * np.trace(b) / 64 * np.eye(64), atol=1e-3 * np.abs(b).max()
        )
        np.linalg.cholesky(a.astype(np.float64) + 1e-6 * np.trace(b) * np.eye(64))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rows=0", "1 or more"),
        ("draws=0", "1 or more"),
        ("later=-1", "1 or more"),
        ("recent=-1", "0 or more"),
        ("ridge=0", "above 0"),
        ("worst=nan", "above 0"),
        ("fit=0", "above 0"),
    ],
)
def test_wrong_parameters_are_one_line(text, message):
    with pytest.raises(BadInput, match=message):
        methods.get(f"{MIX.format('uniform')},{text}")


# ---- on the engine


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("model", ["llama-mha", "llama-gqa", "gemma3"])
def test_other_rows_keep_their_bytes(tiny, text, model, kind):
    plain, summed = (
        load(tiny(model), kind, kv_ratio=share(0.3, kind), kv_method=name)
        for name in ("score=keydiff", MIX.format("uniform") + ",worst=5")
    )
    for llm in (plain, summed):
        llm.eval(list(text(N_PROMPT)))
    changed = 0
    for il, info in enumerate(plain.engine.store.layers):
        for k in range(info.n_head_kv):
            before, after = (by_token(llm.engine.store, il, k) for llm in (plain, summed))
            assert before.keys() == after.keys()
            different = sum(before[token] != after[token] for token in before)
            assert different <= (0 if info.n_swa else 16)
            changed += different
    assert changed > 0
    assert np.isfinite(feed(summed, text(4, seed=1))).all()


def by_token(store, il, k) -> dict[int, tuple[bytes, bytes]]:
    n = int(store.length(il)[k])
    parts = [
        [x[i * len(x) // n : (i + 1) * len(x) // n] for i in range(n)]
        for x in store.row_bytes(il, k)
    ]
    return {int(p): pair for p, *pair in zip(store.positions(il, k), *parts, strict=True)}


@pytest.mark.parametrize(
    ("recent", "ratio", "stay"), [(96, 0.5, 50), (40, 0.5, 40), (0, 0.5, 32), (96, 0.3, 32)]
)
def test_more_than_the_window_stays_where_there_is_room(tiny, text, recent, ratio, stay):
    """Rows of 250 (or 150); the evaluator keeps the same."""
    name = f"{MIX.format('uniform')},recent={recent}"
    llm, other = (load(tiny("llama-gqa"), kv_ratio=ratio, kv_method=name) for _ in range(2))
    tokens = list(text(N_PROMPT))
    llm.eval(tokens)
    heads = [set(rows.tolist()) for layer in positions(llm) for rows in layer]
    last = [set(range(N_PROMPT - n, N_PROMPT)) for n in (stay, stay + 1)]
    assert all(last[0] <= rows for rows in heads) and not all(last[1] <= rows for rows in heads)
    Reading(other, tokens, [methods.get(name)]).compress(methods.get(name), other.settings)
    assert [set(rows.tolist()) for layer in positions(other) for rows in layer] == heads
    llm = load(tiny("llama-gqa"), kv_budget=np.full((len(positions(llm)), 2), 60), kv_method=name)
    llm.eval(tokens)
    assert (llm.engine.kept() == 60).all(), "a table's rows are not known to be many"


def test_a_summary_brings_the_answer_nearer_to_the_full_cache(tiny, text, nmse):
    """By little here: queries of random weights have no mean to speak of."""
    full, plain, summed = (
        load(tiny("llama-gqa"), kv_ratio=ratio, kv_method=name)
        for ratio, name in (
            (1.0, "full"),
            (0.2, "score=random"),
            (0.2, "score=random,merge=summary,worst=5"),
        )
    )
    logits = []
    for llm in (full, plain, summed):
        llm.eval(list(text(2000)))
        logits.append(feed(llm, text(8, seed=1)))
    assert nmse(logits[2], logits[0]) < nmse(logits[1], logits[0])


@pytest.mark.parametrize("budget", ["uniform", "cake", "dynamickv", "d2o", "pooled"])
def test_any_budget_can_be_summed_up(tiny, text, budget):
    plain, summed = (
        load(tiny("llama-gqa"), kv_ratio=0.3, kv_method=f"score=cake,budget={budget}{merge}")
        for merge in ("", ",merge=summary,worst=5")
    )
    for llm in (plain, summed):
        llm.eval(list(text(N_PROMPT)))
    assert (plain.engine.kept() == summed.engine.kept()).all()
    before, after = (
        [by_token(llm.engine.store, 2, k) for k in range(2)] for llm in (plain, summed)
    )
    assert any(
        x.get(t) != pair for x, y in zip(before, after, strict=True) for t, pair in y.items()
    )
    assert np.isfinite(feed(summed, text(4, seed=1))).all()


def test_later_turns_are_summed_up_by_the_prompts_queries(tiny, text):
    llm = load(
        tiny("llama-gqa"), kv_ratio=0.3, kv_method=MIX.format("uniform") + ",worst=5", kv_tail=64
    )
    llm.eval(list(text(N_PROMPT)))
    asked = llm.engine.turn.past.queries
    assert len(asked) == len(llm.engine.store.layers)
    for i in range(4):
        llm.eval(list(text(60, seed=i)))
    assert llm.engine.store.memory().boundary > N_PROMPT, "the tail was compressed"
    assert all(llm.engine.turn.past.queries[il] is asked[il] for il in asked), (
        "too few tokens to say what will be asked"
    )
    assert np.isfinite(feed(llm, text(4, seed=9))).all()
    llm.reset()
    llm.eval(list(text(100)))
    assert llm.engine.turn.past.queries == {} and llm.engine.kept().max() < 100, (
        "a short prompt is compressed without a summary"
    )


def test_a_model_without_plain_positions_drops_rows(tiny, text, monkeypatch):
    def refuse(self, *_):
        raise Unsupported("positions")

    plain, summed = (
        load(tiny("llama-gqa"), kv_ratio=0.3, kv_method=name)
        for name in ("score=keydiff", MIX.format("uniform"))
    )
    plain.eval(list(text(N_PROMPT)))
    monkeypatch.setattr(Prefill, "rotation", refuse)
    summed.eval(list(text(N_PROMPT)))
    assert all(
        np.array_equal(a, b)
        for x, y in zip(positions(plain), positions(summed), strict=True)
        for a, b in zip(x, y, strict=True)
    )
    assert plain.engine.store.row_bytes(0, 0) == summed.engine.store.row_bytes(0, 0)


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0"])
def test_rows_are_written_as_the_cache_holds_them(tiny, text, kind):
    llm = load(tiny("llama-gqa"), kind, kv_ratio=0.5, after=text(200))
    store, info = llm.engine.store, llm.engine.store.layers[1]
    rng = np.random.default_rng(0)
    keys, values = (rng.standard_normal((2, d)).astype(np.float32) for d in (info.d_k, info.d_v))
    before = by_token(store, 1, 0)
    store.write(1, 0, np.array([3, 50]), keys, values)
    token = store.positions(1, 0)
    assert sum(before[t] != pair for t, pair in by_token(store, 1, 0).items()) == 2
    assert before[token[3]] != by_token(store, 1, 0)[token[3]]
    for got, want in zip(store.rows(1, 0), (keys, values), strict=True):
        np.testing.assert_allclose(
            got[[3, 50]], want, atol={"f16": 2e-3, "q8_0": 0.02, "q4_0": 0.4}[kind]
        )
    after = store.row_bytes(1, 0)
    for rows, k in (
        ([-1], keys[:1]),
        ([len(token)], keys[:1]),
        ([0], np.full_like(keys[:1], np.nan)),
        ([0], np.full_like(keys[:1], np.inf)),
    ):
        with pytest.raises(BadInput):
            store.write(1, 0, np.array(rows), k, values[:1])
    assert store.row_bytes(1, 0) == after
