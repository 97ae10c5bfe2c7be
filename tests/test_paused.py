"""A prompt that waits half read while others use its context: both end as if each were alone."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import POINTER
from typing import Any

import numpy as np
import pytest

from edgekv import BadInput, native
from tests import archs
from tests.engine import load, logits

N_PROMPT, N_OLD, N_SHORT = 400, 100, 90


def some(n: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(6, 128, n).tolist()


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    return archs.write(tmp_path_factory.mktemp("archs"), "^qwen35$") / "qwen35-dense.gguf"


@pytest.fixture(params=["llama-gqa f16", "llama-gqa q8_0", "gemma3 f16", "gemma3 q8_0", "qwen35"])
def make(request, tiny, hybrid):
    name, kind = (request.param.split() + ["f16"])[:2]
    path = hybrid if name == "qwen35" else tiny(name)
    return lambda **more: load(
        path, kind, kv_ratio=0.5, n_ctx=1024, **{"n_ubatch": 64, "n_batch": 64, **more}
    )


def read(llm: Any, tokens: list[int], between: Callable[[native.Prefill], None]) -> None:
    """Read a prompt and keep the last half of each layer. between: called behind each chunk."""
    with native.Prefill(llm._ctx.ctx, tokens, [], progress=lambda *_: between(p)) as p:
        for il, info in enumerate(llm.engine.store.layers):
            p.run(il)
            if info.selects:
                n = p.n_old() + len(tokens)
                p.keep([np.arange(x // 2, x, dtype=np.int32) for x in n])
        p.end()


def rows(llm: Any) -> list[Any]:
    """All bytes of the store, and how many tokens went in."""
    store = llm.engine.store
    found = [
        [store.row_bytes(il, k) for k in range(info.n_head_kv)]
        for il, info in enumerate(store.layers)
    ]
    return [found, store.memory().n_past]


def step(llm: Any, token: int) -> np.ndarray:
    """Logits behind one more token of the conversation in the context."""
    lib = native.llama_cpp
    one = np.array([token], np.int32)
    batch = lib.llama_batch_get_one(one.ctypes.data_as(POINTER(lib.llama_token)), 1)
    assert lib.llama_decode(llm._ctx.ctx, batch) == 0
    return logits(llm)


@pytest.mark.parametrize("n_old", [0, N_OLD])
def test_a_prompt_that_waited_ends_as_if_it_had_not(make, n_old):
    alone, llm, short = make(), make(), make()
    for model in (alone, llm):
        if n_old:
            model.eval(some(n_old, 1))
    short.eval(some(N_SHORT, 2))
    wanted = logits(short), rows(short)
    read(alone, some(N_PROMPT, 3), lambda _: None)
    calls = []

    def others(p: native.Prefill) -> None:
        """Another conversation is read, by a prompt of its own, and leaves."""
        calls.append(p)
        if len(calls) % 3:
            return
        n_before, memory = llm.n_tokens, llm.engine.turn.past
        p.pause()
        place = native.Place(llm._ctx.ctx)
        place.swap(llm._ctx.ctx)
        llm.reset()
        llm.eval(some(N_SHORT, 2))
        assert np.array_equal(logits(llm), wanted[0]) and rows(llm) == wanted[1]
        with pytest.raises(BadInput):
            p.resume()  # another conversation is there
        place.swap(llm._ctx.ctx)
        llm.n_tokens, llm.engine.turn.past = n_before, memory
        p.resume()

    read(llm, some(N_PROMPT, 3), others)
    assert len(calls) > 6
    assert np.array_equal(logits(llm), logits(alone)) and rows(llm) == rows(alone)
    for token in some(3, 4):
        assert np.array_equal(step(llm, token), step(alone, token))


def test_a_prompt_that_waits_and_is_given_up_leaves_the_conversation(make):
    llm = make()
    llm.eval(some(N_OLD, 1))
    before = rows(llm)

    def give_up(p: native.Prefill) -> None:
        p.pause()
        raise KeyError("enough")

    with pytest.raises(KeyError):
        read(llm, some(N_PROMPT, 3), give_up)
    assert rows(llm) == before
    read(llm, some(N_PROMPT, 3), lambda _: None)


def test_what_waits_cannot_be_read_on(make):
    llm = make()

    def forgotten(p: native.Prefill) -> None:
        p.pause()
        with pytest.raises(BadInput):
            p.pause()
        with pytest.raises(BadInput):
            p.end()

    with pytest.raises(Exception, match="cancelled"):
        read(llm, some(N_PROMPT, 3), forgotten)
