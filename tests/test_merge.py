"""merge: D2O's plan against a plain loop, its threshold over calls, and what holds for any plan."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgekv import merge
from tests.reference import merge as reference

shapes = st.tuples(st.integers(0, 60), st.integers(0, 40), st.integers(1, 12), st.integers(0, 99))


def rows(n: int, d: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of n rows, float32."""
    return rng.standard_normal((n, d)).astype(np.float32), rng.standard_normal((n, d + 2)).astype(np.float32)


def applied(p: merge.Plan, evicted, kept) -> tuple[np.ndarray, np.ndarray]:
    """All kept keys and values after the merge."""
    out = tuple(x.copy() for x in kept)
    for x, e, k in zip(out, evicted, kept, strict=True):
        x[p.rows] = merge.merged(p, e, k)
    return out


def check(p: merge.Plan, evicted, kept, threshold: float | None) -> None:
    k, v, tau = reference.merge(evicted, kept, threshold)
    got_k, got_v = applied(p, evicted, kept)
    np.testing.assert_allclose(got_k, k, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got_v, v, rtol=1e-4, atol=1e-5)
    assert p.threshold == pytest.approx(tau, rel=1e-5, abs=1e-6) if tau is not None else p.threshold is None


@pytest.mark.parametrize("n_evicted, n_kept, d", [(200, 50, 64), (40, 200, 16), (1, 30, 8), (30, 1, 8), (5, 0, 8), (0, 5, 8)])
def test_a_call_is_the_plain_loop(n_evicted, n_kept, d):
    rng = np.random.default_rng(n_evicted)
    evicted, kept = rows(n_evicted, d, rng), rows(n_kept, d, rng)
    check(merge.plan(evicted[0], kept[0]), evicted, kept, None)


def test_the_threshold_moves_over_the_calls():
    rng, threshold = np.random.default_rng(0), None
    kept = rows(20, 16, rng)
    seen = []
    for n in (50, 3, 0, 7, 1):
        evicted = rows(n, 16, rng)
        p = merge.plan(evicted[0], kept[0], threshold)
        check(p, evicted, kept, threshold)
        threshold, kept = p.threshold, applied(p, evicted, kept)
        seen.append(threshold)
    assert seen[2] == seen[1] and len(set(seen)) == 4


def test_beta_is_the_weight_of_this_call():
    rng = np.random.default_rng(0)
    evicted, kept = rows(9, 8, rng)[0], rows(5, 8, rng)[0]
    mean = merge.plan(evicted, kept).threshold
    assert merge.plan(evicted, kept, 0.25, beta=0.0).threshold == 0.25
    assert merge.plan(evicted, kept, 0.25, beta=1.0).threshold == pytest.approx(mean)
    assert len(merge.plan(evicted, kept, 2.0, beta=0.0).source) == 0, "nothing is that similar"
    assert len(merge.plan(evicted, kept, -2.0, beta=0.0).source) == 9


@given(shapes)
def test_weights_add_up_to_one_and_every_source_has_one_target(shape):
    n_evicted, n_kept, d, key = shape
    rng = np.random.default_rng(key)
    p = merge.plan(rows(n_evicted, d, rng)[0], rows(n_kept, d, rng)[0])
    assert len(p.source) == len(p.target) == len(p.weight) and len(p.rows) == len(p.own)
    np.testing.assert_allclose(p.own + np.bincount(p.target, p.weight, minlength=len(p.rows)), 1, rtol=1e-5)
    assert (np.diff(p.source) > 0).all() and (np.diff(p.rows) > 0).all()
    assert (p.rows < n_kept).all() and (p.source < n_evicted).all() and len(p.rows) <= len(p.source)
    if n_evicted and n_kept:
        assert len(p.source), "someone is at or above the mean"


@given(shapes)
def test_blocks_change_nothing(shape):
    n_evicted, n_kept, d, key = shape
    rng = np.random.default_rng(key)
    evicted, kept = rows(n_evicted, d, rng)[0], rows(n_kept, d, rng)[0]
    whole = merge.plan(evicted, kept)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge, "BLOCK_EVICTED", 7)
        patch.setattr(merge, "BLOCK_KEPT", 3)
        parts = merge.plan(evicted, kept)
    np.testing.assert_array_equal(parts.source, whole.source)
    np.testing.assert_allclose(merge.merged(parts, evicted, kept), merge.merged(whole, evicted, kept), rtol=1e-5, atol=1e-6)


def test_the_search_stays_in_its_blocks(monkeypatch):
    largest = []
    matmul = np.ndarray.__matmul__

    class Watched(np.ndarray):
        def __matmul__(self, other):
            product = matmul(np.asarray(self), np.asarray(other))
            largest.append(product.size)
            return product

    unit = merge._unit
    monkeypatch.setattr(merge, "_unit", lambda x: unit(x).view(Watched))
    rng = np.random.default_rng(0)
    merge.plan(rows(3000, 4, rng)[0], rows(9000, 4, rng)[0])
    assert max(largest) == merge.BLOCK_EVICTED * merge.BLOCK_KEPT and len(largest) == 6 * 3


def test_equal_keys_take_the_first_and_a_twin_is_averaged():
    key = np.array([[1, 2, 3]], np.float32)
    p = merge.plan(2 * key, np.concatenate([key, key]))
    assert p.rows.tolist() == [0] and p.own == pytest.approx(0.5)
    np.testing.assert_allclose(merge.merged(p, 2 * key, np.concatenate([key, key])), 1.5 * key, rtol=1e-6)


def test_each_head_of_a_conversation_has_its_own_threshold():
    rng, folding, thresholds = np.random.default_rng(0), merge.D2O().start(), {(0, 0): None, (0, 1): None, (1, 0): None}
    for _ in range(3):
        for place in thresholds:
            keys, values = rows(60, 8, rng)
            kept = rng.permutation(60)[:20].astype(np.int32)
            gone = np.setdiff1d(np.arange(60), kept)
            k, v, tau = reference.merge((keys[gone], values[gone]), (keys[kept], values[kept]), thresholds[place])
            changed, new_k, new_v = folding.fold(*place, keys, values, kept)
            np.testing.assert_allclose(new_k, k[changed], rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(new_v, v[changed], rtol=1e-4, atol=1e-5)
            thresholds[place] = tau
