"""Conversations that are read one after the other and written together, a token of each in one pass
over the weights, as llama-batched-bench has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from edgekv import native
from edgekv.base.stats import KVStats
from edgekv.conversation import parked
from edgekv.errors import EdgeKVError
from edgekv.native import llama_cpp

Read = Callable[[], object]
"""Has the model read tokens behind the conversation that it holds, or fills its cache."""


class Alone:
    """The one conversation of a model."""

    def __init__(self, llm: Any, n: int) -> None:
        self._llm, self._n = llm, n

    def read(self, one: Read) -> None:
        """Each conversation reads what `one` reads. Raises EdgeKVError."""
        one()

    def step(self, tokens: Sequence[int]) -> None:
        """Each conversation reads its token, in one pass. Raises EdgeKVError."""
        self._llm.eval(list(tokens))

    def stats(self) -> list[KVStats]:
        """Of all conversations, in parts."""
        return [self._llm.kv_stats()]

    @property
    def n_bytes_peak(self) -> int:
        """The most that all took together."""
        return int(self._llm.kv_stats().n_bytes_peak)


class InPlaces(Alone):
    """Those of a compressed cache: each has a place beside the context."""

    def __init__(self, llm: Any, n: int) -> None:
        super().__init__(llm, n)
        self._talks = [parked.park(llm) for _ in range(n)]
        self._n_bytes_peak = 0

    def read(self, one: Read) -> None:
        for i, talk in enumerate(self._talks):
            if not talk.put(self._llm):
                raise EdgeKVError("the machine has not the memory for so many conversations")
            one()
            others = sum(x.n_bytes for x in self._talks) - talk.n_bytes
            peak = others + self._llm.kv_stats().n_bytes_peak
            self._n_bytes_peak = max(self._n_bytes_peak, peak)
            self._talks[i] = parked.park(self._llm)

    def step(self, tokens: Sequence[int]) -> None:
        places = [x.rows for x in self._talks if isinstance(x.rows, native.Place)]
        if len(places) < self._n:
            raise EdgeKVError("conversations on a device are written one by one")
        native.Place.step(self._llm.ctx, places, tokens)

    def stats(self) -> list[KVStats]:
        found = []
        for talk in self._talks:
            with parked.shown(self._llm, talk.rows):
                found.append(self._llm.kv_stats())
        return found

    @property
    def n_bytes_peak(self) -> int:
        return max(self._n_bytes_peak, sum(x.n_bytes for x in self._talks))


class InSequences(Alone):
    """Those of llama.cpp's own cache: each is a sequence."""

    def __init__(self, llm: Any, n: int) -> None:
        super().__init__(llm, n)
        self._n_tokens = 0

    def read(self, one: Read) -> None:
        """All are read in the first sequence, and copied from there to their own."""
        llm, memory = self._llm, llama_cpp.llama_get_memory(self._llm.ctx)
        n_before = llm.n_tokens
        for seq in reversed(range(self._n)):
            if not llm.back_to(n_before):
                raise EdgeKVError("this cache cannot go back: leave -d out with -npl")
            one()
            if seq:
                llama_cpp.llama_memory_seq_rm(memory, seq, -1, -1)
                llama_cpp.llama_memory_seq_cp(memory, 0, seq, -1, -1)
        self._n_tokens = llm.n_tokens

    def step(self, tokens: Sequence[int]) -> None:
        batch = llama_cpp.llama_batch_init(self._n, 0, 1)
        try:
            batch.n_tokens = self._n
            for i, token in enumerate(tokens):
                batch.token[i], batch.pos[i], batch.logits[i] = token, self._n_tokens, True
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, i
            if llama_cpp.llama_decode(self._llm.ctx, batch):
                raise EdgeKVError("llama.cpp could not evaluate a token of each conversation")
        finally:
            llama_cpp.llama_batch_free(batch)
        self._n_tokens += 1

    def stats(self) -> list[KVStats]:
        before, self._llm.n_tokens = self._llm.n_tokens, self._n * self._n_tokens
        try:
            return [self._llm.kv_stats()]
        finally:
            self._llm.n_tokens = before


def of(llm: Any, n: int) -> Alone:
    """n conversations, all empty, of a model that was loaded for so many."""
    if n == 1:
        return Alone(llm, n)
    return InSequences(llm, n) if llm.engine is None else InPlaces(llm, n)
