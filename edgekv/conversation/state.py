"""The state of a conversation in memory: taken from a model, and put back."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv import native
from edgekv.conversation.holder import Holder
from edgekv.engine.past import Past
from edgekv.errors import EdgeKVError, StepFailed
from edgekv.native import Archive, check_finite, llama_cpp


@dataclass(frozen=True, eq=False)
class State:
    """A copy of a conversation: what it takes to go on from it.

    tokens: int32 [n_tokens]; data: llama.cpp's state of sequence 0, a ctypes array of bytes;
    past: what the engine knows besides, None where nothing is compressed; archive: the rows of all
    tokens, None if the conversation has none.
    """

    tokens: NDArray[np.int32]
    data: Any
    past: Past | None
    archive: Archive | None = None

    @property
    def n_bytes(self) -> int:
        return len(self.data)


def take(llm: Holder) -> State:
    """Return a copy of the conversation in `llm`.

    Raises EdgeKVError if it was taken back to where the cache cannot follow, such as the middle of
    a compressed prompt.
    """
    llm.settle()
    if n_cached(llm) > llm.n_tokens and not native.take_back(llm.ctx, llm.n_tokens):
        raise EdgeKVError(
            "this conversation was taken back to where its cache cannot go back to: reset it"
        )
    data = data_of(llm)
    if llm.engine is None:
        return State(llm.tokens, data, None)
    return State(llm.tokens, data, llm.engine.turn.past.copy(), Archive.take(llm.ctx))


def data_of(llm: Holder) -> Any:
    """llama.cpp's state of sequence 0, a ctypes array of bytes. Raises EdgeKVError."""
    ctx = llm.ctx
    data = (ctypes.c_uint8 * llama_cpp.llama_state_seq_get_size(ctx, 0))()
    if llama_cpp.llama_state_seq_get_data(ctx, data, len(data), 0) != len(data):
        raise StepFailed("llama.cpp could not save its state")
    return data


def has_recurrent_layers(llm: Holder) -> bool:
    model = llm.model
    return bool(llama_cpp.llama_model_is_recurrent(model) or llama_cpp.llama_model_is_hybrid(model))


def take_recurrent(llm: Holder) -> Any:
    """A copy of what llama.cpp's own cache cannot take back token by token: the state of recurrent
    layers, and sliding windows beside it. None where there are no recurrent layers.

    Raises EdgeKVError if it cannot be read.
    """
    ctx, some = llm.ctx, llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
    if not has_recurrent_layers(llm):
        return None
    data = (ctypes.c_uint8 * llama_cpp.llama_state_seq_get_size_ext(ctx, 0, some))()
    if llama_cpp.llama_state_seq_get_data_ext(ctx, data, len(data), 0, some) != len(data):
        raise StepFailed("llama.cpp could not save its state")
    return data


def take_back(llm: Holder, n_tokens: int, recurrent: Any) -> None:
    """Take llama.cpp's own cache back to its first n_tokens, as far as that can be done.

    recurrent: what `take_recurrent` returned when it held as many, or None.
    """
    ctx, some = llm.ctx, llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
    if recurrent is not None and not llama_cpp.llama_state_seq_set_data_ext(
        ctx, recurrent, len(recurrent), 0, some
    ):
        native.clear(llm.ctx)  # attention alone has them still
    native.take_back(llm.ctx, n_tokens)


def n_cached(llm: Holder) -> int:
    """Tokens in the cache, which may be more than those of the conversation."""
    if llm.engine is not None:
        return llm.engine.store.memory().n_past
    return int(llama_cpp.llama_memory_seq_pos_max(llama_cpp.llama_get_memory(llm.ctx), 0)) + 1


def is_finite(llm: Holder) -> bool:
    """Whether a state that was put into llama.cpp's own cache holds numbers only.

    If not, its rows have to be cleared: without flash attention llama.cpp multiplies those that
    nobody attends to by 0, so what is no number there would reach every later conversation.
    """
    try:
        check_finite(llm.ctx)
    except EdgeKVError:
        return False
    return True


def put(llm: Holder, state: State, is_ours: bool = False) -> bool:
    """Make `state` the conversation of `llm`.

    is_ours: it was taken in this process, so that its numbers need no look. False if it does not
    fit. A compressed conversation is then as before; llama.cpp's own cache is
    empty, and so is the conversation.
    """
    if llm.engine is None:
        native.take_back(llm.ctx, 0)  # llama.cpp keeps what it has if the state is empty
    n_read = llama_cpp.llama_state_seq_set_data(llm.ctx, state.data, len(state.data), 0)
    if llm.engine is None and not (n_read and (is_ours or is_finite(llm))):
        native.clear(llm.ctx)
        llm.reset()
        return False
    if n_read == 0:
        return False
    adopt(llm, state.tokens, state.past.copy() if state.past else None)
    if state.archive is not None:
        state.archive.put(llm.ctx)
    return bool(n_read == len(state.data))


def adopt(llm: Holder, tokens: NDArray[np.int32], past: Past | None) -> None:
    """The cache of `llm` holds these tokens now. past: what the engine is to know of them."""
    llm.input_ids[: len(tokens)] = tokens
    llm.n_tokens = len(tokens)
    llm.has_logits, llm.turn.kept, llm.turn.hidden = False, None, None
    if llm.engine is not None:
        llm.engine.turn.past = past or Past(ratio=llm.engine.settings.ratio)


def try_put(llm: Holder, state: State) -> bool:
    """Make `state`, which may hold anything, the conversation of `llm`.

    False if it does not fit; the conversation is then as before, in any case.
    """
    before, had_logits = take(llm), llm.has_logits
    try:
        if put(llm, state) and _holds(llm, state.tokens):
            return True
    except BaseException:
        _put_back(llm, before, had_logits)
        raise
    _put_back(llm, before, had_logits)
    return False


def _put_back(llm: Holder, before: State, had_logits: bool) -> None:
    put(llm, before)
    llm.has_logits = had_logits


def _holds(llm: Holder, tokens: NDArray[np.int32]) -> bool:
    """Whether the cache holds as many tokens, and of those behind its boundary each one."""
    n = len(tokens)
    if n_cached(llm) != n:
        return False
    if llm.engine is None:
        return True
    store = llm.engine.store
    info = store.memory()
    for il, layer in enumerate(store.layers):
        # the windows' rows lie one behind the other; those of the recent buffer cannot be missing
        begin = max(n - layer.n_swa + 1, 0) if layer.n_swa else info.boundary
        for k in range(layer.n_head_kv):
            pos = store.positions(il, k)
            if not np.array_equal(pos[pos >= begin], np.arange(begin, n)):
                return False
    return True
