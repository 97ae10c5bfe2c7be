"""A prompt that waits half read, while other conversations use its context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from edgekv.conversation import state
from edgekv.native import Place

if TYPE_CHECKING:
    from edgekv.conversation.holder import Holder

_OF_ENGINE = "clock", "hidden", "excess", "working", "reading"
_OF_CHECKPOINTS = "_saved", "_prompt_end", "at", "is_eager"
_OF_MODEL = "_kv_cuts", "kv_progress"


def can_wait(llm: Holder) -> bool:
    """Whether a prompt is being read that `aside` can set aside. llama.cpp's own cache, and rows on
    a device, would have to be copied.
    """
    kv = llm._kv
    return kv is not None and kv.reading is not None and not kv.offloaded and not llm._logits_all


@contextmanager
def aside(llm: Holder) -> Iterator[None]:
    """A `with` block inside of `kv_progress`, in which `llm` has no conversation, and may get
    others.

    Behind it the prompt is half read as before. If the block raises, reading ends with what it
    raised. Raises EdgeKVError without memory; the prompt cannot be read on then. See `can_wait`.
    """
    kv = llm._kv
    assert kv is not None and kv.reading is not None
    prompt, memory = kv.reading, kv.memory
    tokens = llm.input_ids[: llm.n_tokens].astype(np.int32)
    engine = _values(kv, _OF_ENGINE)
    checkpoints = _values(llm._checkpoints, _OF_CHECKPOINTS)
    model = _values(llm, _OF_MODEL)
    prompt.pause()
    place = Place(llm._ctx.ctx)
    place.swap(llm._ctx.ctx)
    kv.reading = llm.kv_progress = None
    with llm._guard.called_back():
        llm.reset()
        try:
            yield
        finally:
            llm.reset()
            place.swap(llm._ctx.ctx)
            state.adopt(llm, tokens, memory)
            for owner, values in ((kv, engine), (llm._checkpoints, checkpoints), (llm, model)):
                vars(owner).update(values)
    prompt.resume()


def _values(owner: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: vars(owner)[name] for name in names}
