"""A model that reads a prompt serves other conversations meanwhile; all are as if alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from edgekv import Conversations, EdgeKVError, native
from tests import archs
from tests.engine import feed, load, logits, read

N_LONG, N_SHORT = 400, 90
STEPS = (7, 8, 9)


def some(n: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(6, 128, n).tolist()


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    return archs.write(tmp_path_factory.mktemp("archs"), "^qwen35$") / "qwen35-dense.gguf"


@pytest.fixture(
    params=[
        "llama-gqa f16 snapkv",
        "llama-gqa q8_0 snapkv",
        "llama-gqa f16 kvzip",
        "llama-gqa f16 d2o",
        "gemma3 f16 snapkv",
        "gemma3 q8_0 snapkv",
        "qwen35 f16 snapkv",
    ]
)
def make(request, tiny, hybrid):
    """make(**arguments of Llama): the same model each time."""
    name, kind, method = request.param.split()
    path = hybrid if name == "qwen35" else tiny(name)
    usual = dict(kv_ratio=0.5, kv_method=method, n_ctx=1024, n_ubatch=64, n_batch=64)
    return lambda **more: load(path, kind, **{**usual, **more})


def reading(llm: Any, tokens: list[int], others: Callable[[], None]) -> None:
    """Read tokens, and let others use the model each second time that it reports."""
    calls: list[int] = []

    def progress(done: int, total: int) -> None:
        calls.append(done)
        if len(calls) % 2 == 0 and done < total:
            with llm._kv_pool.lend():
                others()

    llm.kv_progress = progress
    try:
        llm.eval(tokens)
    finally:
        llm.kv_progress = None
    assert len(calls) > 6


def ask(llm: Any, tokens: list[int]) -> np.ndarray:
    """Logits behind a prompt and behind some tokens of its answer."""
    return read(llm, tokens[llm._kv_pool.use(tokens) :], STEPS)


@pytest.mark.parametrize("n_old, hidden", [(0, "f32"), (100, "f32"), (0, "whole")])
def test_who_reads_and_who_asks_meanwhile_get_what_they_would_alone(make, n_old, hidden):
    old, long, short = some(n_old, 1), some(N_LONG, 2), some(N_SHORT, 3)
    alone, other, llm = (make(kv_hidden=hidden) for _ in range(3))
    for model in (alone, llm):
        if old:
            model.eval(old)
    wanted, short_wanted = read(alone, long, STEPS), read(other, short, STEPS)
    with Conversations(llm) as pool:
        pool.use(old + long)
        answers: list[np.ndarray] = []
        reading(llm, long, lambda: answers.append(ask(llm, short)))
        assert np.array_equal(logits(llm), wanted[0])
        assert np.array_equal(feed(llm, STEPS), wanted[1:])
        assert len(answers) > 2 and all(np.array_equal(x, short_wanted) for x in answers)
        # and the two are there still
        assert pool.use([*old, *long, *STEPS, 9]) == n_old + N_LONG + len(STEPS)
        assert pool.use([*short, *STEPS, 9]) == N_SHORT + len(STEPS)


def test_a_prompt_that_is_read_in_parts_lends_in_each_of_them(make):
    """Behind a document the rest is read by itself; what others do must not change where."""
    long, short = some(N_LONG, 2), some(N_SHORT, 3)
    alone, llm = make(), make()
    for model in (alone, llm):
        with Conversations(model) as pool:
            pool.use(long, cuts=[200])
            if model is alone:
                model.eval(long)
            else:
                reading(llm, long, lambda: ask(llm, short))
            assert pool.use([*long[:200], *some(30, 4)]) == 200  # its beginning was kept
    assert np.array_equal(feed(llm, STEPS), feed(alone, STEPS))


def test_an_answer_is_compressed_while_another_prompt_is_read(make):
    """The recent buffer of who writes is full meanwhile, and read again."""
    long, short = some(N_LONG, 2), some(N_SHORT, 3)
    alone, other, llm = (make(kv_tail=64, kv_window=16) for _ in range(3))
    wanted = read(alone, long, STEPS)
    other.eval(short)
    wanted_answer = feed(other, some(80, 5))
    assert other._kv.memory.compressed_at > N_SHORT
    with Conversations(llm) as pool:
        pool.use(long)
        answers: list[np.ndarray] = []

        def others() -> None:
            if not answers:
                llm.eval(short[pool.use(short) :])
                answers.append(feed(llm, some(80, 5)))

        reading(llm, long, others)
    assert np.array_equal(np.concatenate([logits(llm)[None], feed(llm, STEPS)]), wanted)
    assert np.array_equal(answers[0], wanted_answer)


def test_an_error_of_others_ends_the_prompt_and_nothing_else(make):
    llm, alone, old, short = make(), make(), some(100, 1), some(N_SHORT, 3)
    with Conversations(llm) as pool:
        llm.eval(old)
        pool.use([*old, *some(N_LONG, 2)])

        def others() -> None:
            ask(llm, short)
            raise KeyError("a fault")

        with pytest.raises(KeyError):
            reading(llm, some(N_LONG, 2), others)
        assert llm.n_tokens == 100
        alone.eval(old)
        assert np.array_equal(
            read(llm, some(N_LONG, 2), STEPS), read(alone, some(N_LONG, 2), STEPS)
        )
        assert pool.use([*short, *STEPS, 9]) == N_SHORT + len(STEPS)


def test_a_prompt_whose_conversation_cannot_be_had_again_is_lost_alone(make, monkeypatch):
    llm, other, short = make(), make(), some(N_SHORT, 3)
    with Conversations(llm) as pool:
        llm.eval(some(100, 1))
        pool.use([*some(100, 1), *some(N_LONG, 2)])

        def fail(*_: object) -> None:
            raise EdgeKVError("no memory")

        def others() -> None:
            ask(llm, short)
            monkeypatch.setattr(native.Place, "swap", fail)

        with pytest.raises(EdgeKVError, match="no memory"):
            reading(llm, some(N_LONG, 2), others)
        monkeypatch.undo()
        assert llm.n_tokens == 0
        assert np.array_equal(ask(llm, short), read(other, short, STEPS))


def test_the_time_of_others_is_not_that_of_the_prompt(tiny):
    llm, slept = load(tiny("llama-gqa"), kv_ratio=0.5, n_ubatch=64), [0.0]

    def others() -> None:
        begin = time.perf_counter()
        time.sleep(0.01)
        slept[0] += 1e3 * (time.perf_counter() - begin)

    with Conversations(llm) as pool:
        pool.use(some(N_LONG, 2))
        begin = time.perf_counter()
        reading(llm, some(N_LONG, 2), others)
        wall = 1e3 * (time.perf_counter() - begin)
        assert 0 < llm.kv_stats().prefill_ms <= wall - slept[0]


def test_only_a_prompt_with_a_store_that_is_being_read_lends(tiny):
    llm, whole = load(tiny("llama-gqa"), kv_ratio=0.5), load(tiny("llama-gqa"))
    with Conversations(llm) as pool, Conversations(whole) as uncompressed:
        assert pool.can_lend and not uncompressed.can_lend
        with pytest.raises(EdgeKVError), pool.lend():
            pass
        uncompressed.use(some(N_LONG, 2))
        with pytest.raises(EdgeKVError, match="in one piece"):
            reading(whole, some(N_LONG, 2), lambda: None)
        whole.eval(some(N_LONG, 2))


def test_a_prompt_that_was_read_meanwhile_is_answered_later_without_reading(make):
    """Its last token read once more, alone, would be rounded otherwise with quantised weights."""
    llm, alone, short, n_had, found = make(), make(), some(N_SHORT, 3), [], []
    alone.eval(short)
    with Conversations(llm) as pool:
        pool.use(some(N_LONG, 2))

        def others() -> None:
            n_had.append(pool.use(short))
            llm.eval(short[n_had[-1] :])
            found.append(logits(llm))

        reading(llm, some(N_LONG, 2), others)
    assert n_had[0] == 0 and set(n_had[1:]) == {N_SHORT}
    assert all(np.array_equal(x, logits(alone)) for x in found)
