"""The state of a conversation in memory: taken from a model, and put back."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgekv.engine import Memory
from edgekv.errors import EdgeKVError
from edgekv.native import check_finite, llama_cpp

if TYPE_CHECKING:
    from edgekv.llama import Llama


@dataclass(frozen=True, eq=False)
class State:
    """tokens: int32 [n_tokens]; data: llama.cpp's state of sequence 0, a ctypes array of bytes;
    memory: what the engine knows besides, None where nothing is compressed."""

    tokens: NDArray[np.int32]
    data: Any
    memory: Memory | None

    @property
    def n_bytes(self) -> int:
        return len(self.data)


def take(llm: Llama) -> State:
    """Return a copy of the conversation in `llm`."""
    ctx = llm._ctx.ctx
    data = (ctypes.c_uint8 * llama_cpp.llama_state_seq_get_size(ctx, 0))()
    if llama_cpp.llama_state_seq_get_data(ctx, data, len(data), 0) != len(data):
        raise EdgeKVError("llama.cpp could not save its state")
    memory = None if llm._kv is None else llm._kv.memory.copy()
    return State(llm.input_ids[: llm.n_tokens].astype(np.int32), data, memory)


def is_finite(llm: Llama) -> bool:
    """Whether a state that was put into llama.cpp's own cache holds numbers only.

    If not, its rows have to be cleared: without flash attention llama.cpp multiplies those that
    nobody attends to by 0, so what is no number there would reach every later conversation.
    """
    try:
        check_finite(llm._ctx.ctx)
    except EdgeKVError:
        return False
    return True


def put(llm: Llama, state: State) -> bool:
    """Make `state` the conversation of `llm`.

    False if it does not fit. A compressed conversation is then as before; llama.cpp's own cache is
    empty, and so is the conversation.
    """
    fits = llama_cpp.llama_state_seq_set_data(llm._ctx.ctx, state.data, len(state.data), 0) != 0
    if llm._kv is None and not (fits and is_finite(llm)):
        llm._ctx.kv_cache_clear()
        llm.reset()
        return False
    if not fits:
        return False
    llm.input_ids[: len(state.tokens)] = state.tokens
    llm.n_tokens = len(state.tokens)
    llm._requires_eval = True
    if llm._kv is not None:
        llm._kv.memory = state.memory.copy() if state.memory else Memory(ratio=llm._kv.settings.ratio)
    return True
