"""A half-read prompt is set aside for others, and what hangs on the model with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from edgekv import Conversations, EdgeKVError
from edgekv.conversation.aside import can_wait
from tests.engine import attributes, load, logits

SUMMARIES = "score=keydiff,budget=pooled,merge=summary"


def some(n: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(6, 128, n).tolist()


@pytest.fixture
def make(tiny):
    def made(**more) -> Any:
        settings = {"kv_ratio": 0.5, "n_ctx": 2048, "n_ubatch": 64, "n_batch": 64}
        return load(tiny("llama-gqa"), **{**settings, **more})

    return made


def read(llm: Any, tokens: list[int], between: Callable[[], None]) -> None:
    llm.kv_progress = lambda done, total: between() if done else None
    try:
        llm.eval(tokens)
    finally:
        llm.kv_progress = None


def told(llm: Any) -> dict[str, object]:
    """The statistics without times, and without the peak: prompts that are given up have one."""
    stats = asdict(llm.kv_stats())
    return {k: str(v) for k, v in stats.items() if not k.endswith(("_ms", "_peak"))}


@pytest.mark.parametrize("method", ["snapkv", "d2o", "cake", SUMMARIES])
def test_a_later_turn_knows_the_earlier_one(make, method):
    """What the engine remembers of a conversation is there when its prompt is read on."""
    alone, llm = make(kv_method=method), make(kv_method=method)
    with Conversations(alone), Conversations(llm) as pool:

        def others() -> None:
            with pool.meanwhile():
                llm.eval(some(200, 9)[pool.use(some(200, 9)) :])

        for seed in (1, 2):
            alone.eval(some(400, seed))
            read(llm, some(400, seed), others)
            assert np.array_equal(logits(llm), logits(alone)) and told(llm) == told(alone)
        for token in some(40, 3):
            alone.eval([token])
            llm.eval([token])
        assert np.array_equal(logits(llm), logits(alone)) and told(llm) == told(alone)


@pytest.mark.parametrize("method", ["d2o", SUMMARIES])
def test_a_prompt_that_is_given_up_leaves_what_was_before(make, method):
    settings = {"kv_method": method, "kv_tail": 32, "kv_window": 8, "kv_min_tokens": 8}
    alone, llm = make(**settings), make(**settings)
    with Conversations(alone), Conversations(llm) as pool:
        for model in (alone, llm):
            model.eval(some(400, 1))

        def others() -> None:
            with pool.meanwhile():
                llm.eval(some(200, 9)[pool.use(some(200, 9)) :])
                assert told(llm) != told(alone)
                raise KeyError("enough")

        with pytest.raises(KeyError):
            read(llm, some(400, 2), others)
        assert told(llm) == told(alone) and len(pool.list()) == 2
        for tokens in [*([token] for token in some(60, 3)), some(400, 4)]:
            for model in (alone, llm):
                model.eval(tokens)
            assert np.array_equal(logits(llm), logits(alone))
        assert told(llm) == told(alone)


def test_others_may_use_the_model_in_the_block_only(make):
    llm, seen = make(), []
    with Conversations(llm) as pool:

        def others() -> None:
            assert can_wait(llm)
            with pool.meanwhile():
                assert not can_wait(llm)
                seen.append(llm.n_tokens)
            with pytest.raises(EdgeKVError, match="kv_progress"):
                llm.eval([1])

        assert not can_wait(llm)
        read(llm, some(200, 1), others)
        assert set(seen) == {0} and llm.n_tokens == 200 and not can_wait(llm)


def test_a_prompt_whose_logits_are_known_is_not_read_again_meanwhile(make):
    """A document and a question that are asked anew must not keep the reader waiting."""
    llm, alone, known, n_had, found = make(), make(), some(300, 9), [], []
    alone.eval(known)
    with Conversations(llm) as pool:
        llm.eval(known[pool.use(known) :])
        prompt = some(400, 1)
        pool.use(prompt)

        def others() -> None:
            with pool.meanwhile():
                n_had.append(pool.use(known))
                llm.eval(known[n_had[-1] :])
                found.append(logits(llm))

        read(llm, prompt, others)
    assert len(n_had) > 6 and set(n_had) == {len(known)}
    assert all(np.array_equal(x, logits(alone)) for x in found)


def test_nothing_of_one_conversation_leaks_into_another(make):
    """Whatever an object keeps, be it added today: a prompt that waits finds it as it was."""
    llm = make(kv_ratio=0.3)
    with Conversations(llm) as pool:
        seen: list[dict[str, object]] = []

        def others() -> None:
            before = attributes(llm)
            with pool.meanwhile():
                llm.create_chat_completion(ASKED, max_tokens=4, seed=7)
                llm.eval(some(300, 9))
            seen.append({name: x for name, x in attributes(llm).items() if x != before.get(name)})

        llm.kv_progress = lambda done, total: others() if done and not seen else None
        with llm.conversation():
            answer = llm.create_chat_completion([*ASKED, *LONG], max_tokens=4, stream=True)
            assert len(list(answer)) > 2, "the answer that had to wait was written"
        assert seen == [{}]


ASKED = [{"role": "user", "content": "Hello"}]
LONG = [{"role": "assistant", "content": "hi " * 300}, {"role": "user", "content": "And now?"}]
