"""A conversation out of its context: how far it can be taken back, where it waits, and the way back
into the context.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgekv.native import llama_cpp
from edgekv.session import state
from edgekv.session.state import State

if TYPE_CHECKING:
    from edgekv.session.holder import Holder


@dataclass(frozen=True)
class Reach:
    """least: fewest tokens that a conversation can be taken back to; mark: one smaller number that
    it can be taken back to as well, -1 if there is none.
    """

    least: int
    mark: int = -1


@dataclass(frozen=True, eq=False)
class Parked:
    """A copy of a conversation."""

    state: State

    @property
    def n_bytes(self) -> int:
        memory = self.state.memory
        return self.state.n_bytes + (memory.n_bytes if memory else 0)

    def put(self, llm: Holder) -> bool:
        """Make it the conversation of `llm`, and stay as it is. False if it does not fit."""
        return state.put(llm, self.state, is_ours=True)


def park(llm: Holder) -> Parked:
    """Take the conversation out of `llm`, which has none afterwards.

    Raises EdgeKVError if its cache does not hold its tokens.
    """
    parked = copied(llm)
    llm.reset()
    return parked


def copied(llm: Holder) -> Parked:
    """A copy of the conversation of `llm`. Raises as `park`."""
    return Parked(state.take(llm))


def size(llm: Holder) -> int:
    """Bytes that the conversation of `llm` is going to take when it waits, its tokens apart."""
    memory = None if llm._kv is None else llm._kv.memory
    n_state = int(llama_cpp.llama_state_seq_get_size(llm._ctx.ctx, 0))
    return n_state + (memory.n_bytes if memory else 0)


def reach_of_copy(llm: Holder) -> Reach:
    """How far a copy of the conversation of `llm` can be taken back. Of llama.cpp's own cache it
    has the last windows only, and of a mark it knows nothing.
    """
    has_windows = llm._kv is None and llama_cpp.llama_model_n_swa(llm._model.model) > 0
    return Reach(llm.n_tokens if has_windows else reach(llm).least)


def reach(llm: Holder) -> Reach:
    """How far the conversation of `llm` can be taken back."""
    if llm._kv is None:
        return Reach(_reach_whole(llm))
    store, info = llm._kv.store, llm._kv.store.memory()
    least = info.fixed
    for il, layer in enumerate(store.layers):
        if layer.n_swa and layer.n_head_kv and store.length(il)[0]:
            oldest = int(store.positions(il, 0)[0])
            least = max(least, oldest + layer.n_swa - 1 if oldest > 0 else 0)
    return Reach(min(least, llm.n_tokens), info.n_mark if info.n_mark >= info.boundary else -1)


def _reach_whole(llm: Holder) -> int:
    """The same for llama.cpp's own cache."""
    model = llm._model.model
    if has_recurrent_layers(llm):
        return llm.n_tokens
    n_swa = llama_cpp.llama_model_n_swa(model)
    memory = llama_cpp.llama_get_memory(llm._ctx.ctx)
    first = int(llama_cpp.llama_memory_seq_pos_min(memory, 0))
    return min(first + n_swa - 1, llm.n_tokens) if n_swa and first > 0 else 0


def has_recurrent_layers(llm: Holder) -> bool:
    model = llm._model.model
    return bool(llama_cpp.llama_model_is_recurrent(model) or llama_cpp.llama_model_is_hybrid(model))


def forgets(llm: Holder) -> bool:
    """Whether tokens that are read take the way back away, even if nothing is compressed."""
    return has_recurrent_layers(llm) or llama_cpp.llama_model_n_swa(llm._model.model) > 0
