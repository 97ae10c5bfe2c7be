"""What a summary needs of the layer in work, and when it is made."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from edgekv.engine import prompt_centroids
from edgekv.engine.observer import QueryObserver
from edgekv.errors import BadInput
from edgekv.methods import base
from edgekv.methods.centroid_merge import CentroidMerge, draw
from edgekv.native import Observer, Prefill
from tests.engine import feed, load

METHOD = "score=keydiff,budget=uniform,merge=summary,worst=5"


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("old", [0, 200])
def test_some_rows_are_those_of_all(tiny, text, kind, old):
    llm = load(tiny("llama-gqa"), kind, kv_ratio=0.5)
    if old:
        llm.eval(list(text(old)))
    some = np.array([7, 0, 299, 7, 150], np.int32)
    with Prefill(llm._ctx.ctx, text(300, seed=1), []) as p:
        p.run(0)
        for head in range(2):
            for rows, chosen in zip(p.rows(head), p.rows(head, some), strict=True):
                assert len(rows) == len(llm.engine.store.positions(0, head)) + 300
                assert np.array_equal(chosen, rows[some])
        assert all(len(x) == 0 for x in p.rows(0, some[:0]))
        for wrong in ([-1], [old + 300]):
            with pytest.raises(BadInput, match="does not exist"):
                p.rows(0, np.array(wrong))
        with pytest.raises(BadInput, match="no such head"):
            p.rows(2, some)


@pytest.mark.parametrize(("begin", "end"), [(0, 300), (5, 300), (130, 290)])
def test_one_of_so_many_queries_is_looked_at(tiny, text, begin, end):
    """Against the queries of single tokens; alone, beside an observer of all queries, and beside
    one of columns.
    """
    llm = load(tiny("llama-gqa"), kv_ratio=0.5, n_ubatch=128)
    tokens = text(300)
    every = 3
    n_ubatch = 128

    def queries(observers):
        with Prefill(llm._ctx.ctx, tokens, observers) as p:
            p.run(0)
            return [
                p.queries(i) if "queries" in one.stats else None for i, one in enumerate(observers)
            ]

    single = np.stack(
        [mean for mean, _ in queries([Observer(t, t + 1, ("queries",)) for t in range(300)])]
    )
    asked = single[[t for t in range(begin, end) if t % n_ubatch % every == 0]]
    centred = asked - asked.mean(axis=0)
    cov = np.einsum("thi,thj->hij", centred, centred) / len(asked)
    one = Observer(begin, end, ("queries",), every)
    for observers in (
        [one],
        [one, Observer(0, 300, ("queries",))],
        [one, Observer(290, 300, ("mean",))],
        [one, Observer(100, 220, ("queries", "mean"), every)],
    ):
        found_mean, found_cov = queries(observers)[0]
        np.testing.assert_allclose(found_mean, asked.mean(axis=0), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found_cov, cov, rtol=1e-3, atol=1e-4 * np.abs(cov).max())
    with pytest.raises(BadInput, match="one of -1 tokens"):
        queries([one._replace(every=-1)])


@pytest.mark.parametrize(
    ("score", "n", "every"),
    [("keydiff", 499, 1), ("keydiff", 500, 2), ("keydiff", 1300, 5), ("expected", 1300, 1)],
)
def test_a_long_prompts_summary_looks_at_some_of_its_queries(
    tiny, text, monkeypatch, score, n, every
):
    """A score that is a paper's looks at all."""
    monkeypatch.setattr(base, "MANY", 250)
    llm = load(tiny("llama-gqa"), kv_ratio=0.2, kv_method=METHOD.replace("keydiff", score))
    assert QueryObserver(llm.engine.settings, text(n), None).ranges[-1].every == every
    llm.eval(list(text(n)))
    assert np.isfinite(feed(llm, text(4, seed=1))).all()


@pytest.mark.parametrize("budget", ["uniform", "pooled"])
def test_a_summary_made_aside_is_the_same(tiny, text, monkeypatch, budget):
    threads = []
    plain = CentroidMerge.centroids
    monkeypatch.setattr(
        CentroidMerge,
        "centroids",
        lambda *args: threads.append(threading.current_thread().name) or plain(*args),
    )
    stored = []
    for aside in (False, True):
        llm = load(
            tiny("llama-gqa"),
            kv_ratio=0.3,
            kv_method=METHOD.replace("uniform", budget).replace("keydiff", "snapkv"),
        )
        llm.engine.offloaded = aside
        llm.eval(list(text(500)))
        store = llm.engine.store
        stored.append(
            [
                store.row_bytes(il, k)
                for il, info in enumerate(store.layers)
                for k in range(info.n_head_kv)
            ]
        )
    assert stored[0] == stored[1]
    half = len(threads) // 2
    assert half
    assert set(threads[:half]) == {"MainThread"}
    assert all(name.startswith("edgekv-summary") for name in threads[half:])
    assert not any(thread.name.startswith("edgekv-summary") for thread in threading.enumerate())


def test_what_fails_aside_fails_the_prompt_and_changes_nothing(tiny, text, monkeypatch):
    llm = load(tiny("llama-gqa"), kv_ratio=0.3, kv_method=METHOD)
    llm.engine.offloaded = True

    def fail(*_):
        time.sleep(0.01)
        raise MemoryError("aside")

    monkeypatch.setattr(CentroidMerge, "centroids", fail)
    with pytest.raises(MemoryError, match="aside"):
        llm.eval(list(text(500)))
    assert llm.engine.store.memory().n_past == 0 and llm.engine.turn.past.queries == {}
    assert not any(thread.name.startswith("edgekv-summary") for thread in threading.enumerate())
    monkeypatch.undo()
    llm.reset()
    llm.eval(list(text(500)))
    assert llm.engine.kept().max() <= 150


def test_products_take_one_thread_and_give_back_the_others(tiny, text, monkeypatch):
    """Threads of numpy's BLAS wait for work in a loop, on the cores that read the next layer."""

    def blas_threads():
        return [x["num_threads"] for x in threadpool_info() if x["user_api"] == "blas"]

    plain, inside = prompt_centroids.later_queries, []

    def spy(*args):
        before = blas_threads()
        try:
            return plain(*args)
        finally:
            assert blas_threads() == before

    monkeypatch.setattr(prompt_centroids, "later_queries", spy)
    monkeypatch.setattr(
        prompt_centroids, "draw", lambda *args: inside.append(blas_threads()) or draw(*args)
    )
    llm = load(tiny("llama-gqa"), kv_ratio=0.3, kv_method=METHOD)
    with threadpool_limits(2, "blas"):
        llm.eval(list(text(500)))
    assert inside and all(set(threads) == {1} for threads in inside)
