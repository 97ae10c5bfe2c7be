"""A prompt that waits half read, and what its model knows of it, while others use the model."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from edgekv.errors import EdgeKVError
from edgekv.native import Place
from edgekv.session import state

if TYPE_CHECKING:
    from edgekv.session.holder import Holder

_MINE = ("kv_progress", "_kv_cuts", "_kv_answer", "_sampler", "_checkpoints")
"""What a model knows of the prompt that it reads, besides the conversation."""


@contextmanager
def aside(llm: Holder) -> Iterator[None]:
    """A `with` block inside of `kv_progress`, in which `llm` is free for other conversations: it
    holds none at first. At the end the prompt is half read again, as it was.

    Raises EdgeKVError if the cache is llama.cpp's own, or if there is no memory. The prompt is lost
    if the block raises, and the conversation is as before it.
    """
    kv = llm._kv
    if kv is None:
        raise EdgeKVError("a prompt in llama.cpp's own cache is read in one piece")
    begin, n = time.perf_counter(), llm.n_tokens
    tokens, memory = llm.input_ids[:n].astype(np.int32), kv.memory
    scores = llm.scores[:n].copy() if llm._logits_all else None
    mine = {name: getattr(llm, name) for name in _MINE}
    with llm._guard.lending(), kv.paused():
        place = Place(llm._ctx.ctx)
        _swap(llm, place)
        llm.kv_progress = llm._kv_answer = llm._sampler = None
        llm._kv_cuts, llm._checkpoints = [], copy.copy(llm._checkpoints)
        try:
            llm.reset()
            yield
        finally:
            vars(llm).update(mine)
            _swap(llm, place)
            state.adopt(llm, tokens, memory)
            if scores is not None:
                llm.scores[:n] = scores
    llm._kv_lent_s += time.perf_counter() - begin


def _swap(llm: Holder, place: Place) -> None:
    """Raises EdgeKVError if the conversation there cannot be had; `llm` holds none then."""
    try:
        place.swap(llm._ctx.ctx)
    except EdgeKVError:
        llm.reset()
        raise
