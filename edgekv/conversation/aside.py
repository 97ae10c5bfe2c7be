"""A prompt that waits half read, while other conversations use its context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from edgekv.conversation import state
from edgekv.conversation.holder import Holder
from edgekv.native import Place


def can_wait(llm: Holder) -> bool:
    """Whether a prompt is read that can be set aside: other rows would have to be copied."""
    kv = llm.engine
    return (
        kv is not None and kv.turn.reading is not None and not kv.offloaded and not llm.keeps_logits
    )


@contextmanager
def aside(llm: Holder) -> Iterator[None]:
    """A `with` block inside of `kv_progress`, in which `llm` has no conversation, and may get
    others.

    Behind it the prompt is half read as before. If the block raises, reading ends with what it
    raised. Raises EdgeKVError without memory; the prompt cannot be read on then. See `can_wait`.
    """
    kv = llm.engine
    assert kv is not None and kv.turn.reading is not None
    prompt, turns, progress = kv.turn.reading, (llm.turn, kv.turn), llm.kv_progress
    tokens = llm.tokens
    prompt.pause()
    place = Place(llm.ctx)
    place.swap(llm.ctx)
    llm.turn, kv.turn, llm.kv_progress = llm.turn.fresh(), kv.fresh_turn(), None
    with llm.guard.calling_back(may_use=True):
        llm.reset()
        try:
            yield
        finally:
            llm.reset()
            (llm.turn, kv.turn), llm.kv_progress = turns, progress
            place.swap(llm.ctx)
            state.adopt(llm, tokens, kv.turn.past)
    prompt.resume()
