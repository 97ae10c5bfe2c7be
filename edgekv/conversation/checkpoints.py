"""Saved states of a compressed conversation, from which its last turn can be taken again.

Entries are chosen with knowledge of what comes after them, so a compressed conversation cannot be
taken back token by token. Before a prompt or a long answer is compressed, its state is saved in
main
memory: regenerating an answer, editing a question, or asking another one about the same document
then reads only what is new.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgekv.base.beginnings import n_shared
from edgekv.conversation import state
from edgekv.conversation.holder import Holder

N_STATES = 2


@dataclass(frozen=True, eq=False)
class _Saved:
    state: state.State
    fixed: int
    """Tokens that cannot be taken back one by one in it."""


class Checkpoints:
    """The last two of the last turn, as far as `kv_memory` allows. are_on: whether any are kept."""

    def __init__(self, are_on: bool) -> None:
        self.are_on = are_on
        self._saved: list[_Saved] = []
        self._prompt_end = 0
        self.at: list[int] = []
        """Numbers of tokens behind which prompts are cut, so that states can be had there."""
        self.is_eager = False
        """The pool is told there too, not only before something is compressed."""

    @property
    def n_bytes(self) -> int:
        """Main memory that the saved states take."""
        return sum(x.state.n_bytes for x in self._saved)

    def fresh(self) -> Checkpoints:
        """Those of a conversation that begins now."""
        return Checkpoints(self.are_on)

    def clear(self) -> None:
        self._saved = []

    def begin_turn(self, begin: int, end: int) -> None:
        """A prompt goes on behind `begin` tokens and makes them `end`."""
        self._saved = [x for x in self._saved if x.fixed <= begin <= len(x.state.tokens)]
        self._prompt_end = end

    def save(self, llm: Holder) -> None:
        """Save the conversation, which is about to be compressed.

        Of an answer only the first time counts: from there its beginning can be reached. States
        that can be reached from the one that is saved are dropped.
        """
        assert llm.engine is not None
        info = llm.engine.store.memory()
        if info.n_past == 0 or info.exact > self._prompt_end > 0:
            return
        if llm.pool is not None:
            llm.pool.keep_beginning(llm)
        if llm.pool is not None or not self.are_on or info.goes_anywhere:
            return
        others = [x for x in self._saved if x.fixed != info.fixed]
        self._saved = [*others, _Saved(state.take(llm), info.fixed)][-N_STATES:]
        limit = llm.engine.settings.memory
        while limit is not None and self._saved and info.bytes_now + self.n_bytes > limit:
            self._saved.pop(0)

    def reached(self, llm: Holder) -> None:
        """A part of a prompt was read."""
        if llm.pool is not None and self.is_eager and llm.n_tokens in self.at:
            llm.pool.keep_beginning(llm)
        self.at = [n for n in self.at if n > llm.n_tokens]

    def has_read(self, llm: Holder) -> None:
        """Tokens were read. The pool learns if they end the prompt."""
        if llm.pool is not None and llm.n_tokens == self._prompt_end:
            llm.pool.keep_end(llm)

    def restore(self, llm: Holder, tokens: Sequence[int]) -> None:
        """Make the conversation the saved state that shares most with `tokens`, if there is one."""

        def shared(x: _Saved) -> int:
            return min(n_shared(tokens, x.state.tokens), len(tokens) - 1)

        fitting = [x for x in self._saved if shared(x) >= max(x.fixed, 1)]
        if fitting:
            state.put(llm, max(fitting, key=shared).state)
