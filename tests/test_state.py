"""States that are no good: values that are no numbers."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from edgekv import BadInput
from edgekv.conversation import state
from tests.engine import load, logits


def damaged(llm: Any) -> state.State:
    """The conversation of `llm`, with rows that are no numbers."""
    good = state.take(llm)
    halves = np.frombuffer(bytes(good.data), np.uint8).copy()
    halves[len(halves) // 2 : len(halves) // 2 + 2000] = 0xFF
    return state.State(
        good.tokens, (ctypes.c_uint8 * len(halves)).from_buffer_copy(halves.tobytes()), good.past
    )


@pytest.mark.parametrize("flash_attn", [True, False])
def test_a_state_of_no_numbers_does_not_poison_an_uncompressed_context(tiny, text, flash_attn):
    llm, fresh = (load(tiny("llama-gqa"), kv_ratio=1.0, flash_attn=flash_attn) for _ in range(2))
    llm.eval(list(text(300)))
    assert not state.put(llm, damaged(llm))
    for model in (llm, fresh):
        model.reset()
        model.eval(list(text(20, seed=1)))
    assert np.array_equal(logits(llm), logits(fresh))


def test_nor_does_the_parents_way_to_load_one(tiny, text):
    llm, fresh = (load(tiny("llama-gqa"), kv_ratio=1.0, flash_attn=False) for _ in range(2))
    llm.eval(list(text(300)))
    whole = llm.save_state()
    data = bytearray(whole.llama_state)
    data[len(data) // 2 : len(data) // 2 + 2000] = b"\xff" * 2000
    whole.llama_state = bytes(data)
    with pytest.raises(BadInput, match="damaged"):
        llm.load_state(whole)
    for model in (llm, fresh):
        model.eval(list(text(20, seed=1)))
    assert np.array_equal(logits(llm), logits(fresh))


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_a_compressed_conversation_refuses_such_a_state_and_stays(tiny, text, kind):
    llm = load(tiny("llama-gqa"), kind, kv_ratio=0.5)
    llm.eval(list(text(300)))
    before = state.take(llm)
    assert not state.put(llm, damaged(llm))
    assert bytes(state.take(llm).data) == bytes(before.data) and llm.n_tokens == 300
    llm.eval([5])
    assert np.isfinite(logits(llm)).all()
