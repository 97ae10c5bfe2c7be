"""A conversation out of its context: how far it goes back, where it waits, and its way back in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edgekv import native
from edgekv.conversation import state
from edgekv.conversation.hidden import HiddenStates
from edgekv.conversation.holder import Holder
from edgekv.conversation.state import State, has_recurrent_layers
from edgekv.engine.past import Past
from edgekv.errors import EdgeKVError
from edgekv.native import Place, llama_cpp


@dataclass(frozen=True)
class Reach:
    """How far a conversation can be taken back.

    least: fewest tokens that a conversation can be taken back to; mark: one smaller number that
    it can be taken back to as well, -1 if there is none; anywhere: it can by its archive go further
    back, where it is not what it was: answers are as near to the full cache's, and not the same.
    """

    least: int
    mark: int = -1
    anywhere: bool = False


@dataclass(frozen=True, eq=False)
class Copy:
    """A conversation that waits as bytes: of llama.cpp's own cache, of a device, of beginnings."""

    taken: State
    reach: Reach
    hidden: HiddenStates | None = None

    @property
    def n_bytes(self) -> int:
        archive = self.taken.archive
        index = archive.info.n_bytes_memory if archive else 0
        hidden = self.hidden.n_bytes if self.hidden else 0
        return self.taken.n_bytes + _past_bytes(self.taken.past) + index + hidden

    @property
    def n_bytes_archive(self) -> int:
        """Of the file of its archive."""
        return self.taken.archive.info.n_bytes if self.taken.archive else 0

    def put(self, llm: Holder) -> bool:
        """Make it the conversation of `llm`, which has none. False if it does not fit. A place
        waits no longer then, but with `put_copy`; a copy waits on.
        """
        fits = state.put(llm, self.taken, is_ours=True)
        llm.turn.hidden = self.hidden.copy() if fits and self.hidden else None
        return fits

    put_copy = put

    def state(self, llm: Holder) -> State:
        """A copy, whatever conversation `llm` holds."""
        return self.taken

    @property
    def rows(self) -> State:
        """Where its rows are."""
        return self.taken

    @property
    def n_to_append(self) -> int:
        """Tokens that it can be given where it is, beside others (`Place.step`)."""
        return 0


@dataclass(frozen=True, eq=False)
class Aside:
    """A conversation that waits itself: the store's rows beside their context. See `Copy`."""

    place: Place
    tokens: NDArray[np.int32]
    past: Past
    reach: Reach
    n_to_append: int = 0
    hidden: HiddenStates | None = None

    def with_token(self, token: int, forgets: bool) -> Aside:
        """The same, behind a step that gave it a token more. forgets: see there."""
        tokens, now = np.append(self.tokens, np.int32(token)), self.reach
        if forgets:
            now = replace(now, least=now.least + 1)
        return replace(self, tokens=tokens, reach=now, n_to_append=self.n_to_append - 1)

    @property
    def n_bytes(self) -> int:
        hidden = self.hidden.n_bytes if self.hidden else 0
        return self.place.n_bytes + _past_bytes(self.past) + hidden

    @property
    def n_bytes_archive(self) -> int:
        return self.place.n_bytes_archive

    def put(self, llm: Holder) -> bool:
        try:
            self.place.swap(llm.ctx)
        except EdgeKVError:
            return False
        state.adopt(llm, self.tokens, self.past)
        llm.turn.hidden = self.hidden
        return True

    def put_copy(self, llm: Holder) -> bool:
        return Copy(self.state(llm), self.reach, self.hidden).put_copy(llm)

    def state(self, llm: Holder) -> State:
        with shown(llm, self.place):
            data = state.data_of(llm)
            return State(self.tokens, data, self.past.copy(), native.Archive.take(llm.ctx))

    @property
    def rows(self) -> Place:
        return self.place


Parked = Copy | Aside
"""A conversation that waits in memory."""


@contextmanager
def shown(llm: Holder, waits: Place | State) -> Iterator[None]:
    """A `with` block in which the store of `llm`, whose cache is compressed, holds the rows of a
    conversation that waits. Nothing else of `llm` changes. Raises EdgeKVError if they do not fit.
    """
    ctx = llm.ctx
    place = waits if isinstance(waits, Place) else Place(ctx)
    place.swap(ctx)
    try:
        if isinstance(waits, State) and not llama_cpp.llama_state_seq_set_data(
            ctx, waits.data, len(waits.data), 0
        ):
            raise EdgeKVError("this conversation does not fit its cache any more: forget it")
        yield
    finally:
        place.swap(ctx)


def park(llm: Holder) -> Parked:
    """Take the conversation out of `llm`, which has none afterwards.

    Raises EdgeKVError if its cache does not hold its tokens.
    """
    if llm.engine is None or llm.engine.offloaded:  # a device's memory is for the one that goes on
        found: Parked = replace(copied(llm), hidden=llm.turn.hidden)
    else:
        place, now, n = Place(llm.ctx), reach(llm), n_to_append(llm)
        tokens = llm.tokens
        place.swap(llm.ctx)
        found = Aside(place, tokens, llm.engine.turn.past, now, n, llm.turn.hidden)
    llm.reset()
    return found


def n_to_append(llm: Holder) -> int:
    """Tokens that the conversation of `llm` can be given in steps with others."""
    kv = llm.engine
    if kv is None or kv.offloaded or llm.keeps_logits:
        return 0
    if llm.context_params.n_seq_max < 2 or kv.store.memory().has_archive:
        return 0
    return min(kv.n_to_append(), llm.n_ctx() - llm.n_tokens)


def copied(llm: Holder) -> Copy:
    """A copy of the conversation of `llm`. Raises as `park`."""
    return Copy(state.take(llm), reach_of_copy(llm))


def size(llm: Holder) -> int:
    """Bytes that the conversation of `llm` takes at most when it waits, its tokens apart."""
    hidden = llm.turn.hidden.n_bytes if llm.turn.hidden else 0
    if llm.engine is None:
        return int(llama_cpp.llama_state_seq_get_size(llm.ctx, 0)) + hidden
    info, n_rows = llm.engine.store.memory(), int(llm.engine.kept().sum())
    n_bytes = info.bytes_now + info.bytes_recurrent + info.bytes_mark + n_rows * np.int32().nbytes
    return n_bytes + _past_bytes(llm.engine.turn.past) + hidden


def archive_size(llm: Holder) -> int:
    """Bytes of the archive of the conversation of `llm`."""
    return 0 if llm.engine is None else llm.engine.store.memory().bytes_archive


def _past_bytes(past: Past | None) -> int:
    return past.n_bytes if past else 0


def logits(llm: Holder) -> NDArray[np.float32] | None:
    """float32 [n_vocab]: a copy of the last token's logits, if they are there."""
    return llm.logits().copy() if llm.has_logits and not llm.keeps_logits else None


def put_logits(llm: Holder, values: NDArray[np.float32]) -> bool:
    """Make these the last token's logits. False if the context has written none yet."""
    here = native.logits(llm.ctx, llm.n_vocab())
    if here is None:
        return False
    here[:] = values
    llm.has_logits = True
    return True


def reach_of_copy(llm: Holder) -> Reach:
    """How far a copy of the conversation of `llm` can be taken back. Of llama.cpp's own cache it
    has the last windows only, and of a mark it knows nothing.
    """
    has_windows = llm.engine is None and llama_cpp.llama_model_n_swa(llm.model) > 0
    now = reach(llm)
    return Reach(llm.n_tokens if has_windows else now.least, anywhere=now.anywhere)


def reach(llm: Holder) -> Reach:
    """How far the conversation of `llm` can be taken back."""
    if llm.engine is None:
        return Reach(_reach_whole(llm))
    store, info = llm.engine.store, llm.engine.store.memory()
    least = info.exact
    for il, layer in enumerate(store.layers):
        if layer.n_swa and layer.n_head_kv and store.length(il)[0]:
            oldest = int(store.positions(il, 0)[0])
            least = max(least, oldest + layer.n_swa - 1 if oldest > 0 else 0)
    mark = info.n_mark if info.n_mark >= info.boundary else -1
    return Reach(min(least, llm.n_tokens), mark, info.goes_anywhere)


def archives_all(llm: Holder) -> bool:
    """Whether archives of `llm` have the rows of all layers, and conversations go back anywhere."""
    kv = llm.engine
    if kv is None or kv.settings.archive_folder is None or kv.recurs:
        return False
    return all(x.selects or not x.n_head_kv for x in kv.store.layers)


def _reach_whole(llm: Holder) -> int:
    """The same for llama.cpp's own cache."""
    model = llm.model
    if has_recurrent_layers(llm):
        return llm.n_tokens
    n_swa = llama_cpp.llama_model_n_swa(model)
    memory = llama_cpp.llama_get_memory(llm.ctx)
    first = int(llama_cpp.llama_memory_seq_pos_min(memory, 0))
    return min(first + n_swa - 1, llm.n_tokens) if n_swa and first > 0 else 0


def forgets(llm: Holder) -> bool:
    """Whether tokens that are read take the way back away, even if nothing is compressed."""
    return has_recurrent_layers(llm) or llama_cpp.llama_model_n_swa(llm.model) > 0
