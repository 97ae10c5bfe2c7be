"""A model's own heads for further tokens (MTP), as `edgekv.chat.guesses` uses them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from ctypes import c_bool
from weakref import proxy

import numpy as np

from edgekv.base.beginnings import n_shared
from edgekv.chat.drafts import MOST, Costs
from edgekv.chat.guesses import likeliest
from edgekv.conversation.hidden import HiddenStates
from edgekv.conversation.holder import Holder
from edgekv.native.mtp import WINDOW, MtpContext


class MtpHeads:
    """The heads of a model. Their cache has the last tokens of the text that is written: each with
    the hidden state of the token before it, or, in a draft, with what the heads made of that.

    In another conversation, or where hidden states are missing, they begin anew with those that are
    there. Raises EdgeKVError if there can be no context.
    """

    def __init__(self, llm: Holder, costs: Costs, stop_flag: c_bool) -> None:
        params = llm.context_params
        self._llm, self._costs = proxy(llm), costs  # which holds this object
        self._context = MtpContext(
            llm.model, llm.n_ctx(), params.n_threads, params.offload_kqv, stop_flag
        )
        self._user: object = None
        self._text: list[int] = []
        """Tokens of the text that was read last; the cache has those from `_begin` on."""
        self._begin = 0
        self._end = 0
        """Behind the text and the draft."""

    def close(self) -> None:
        self._context.close()

    @property
    def n_bytes(self) -> int:
        """Of their context, and of hidden states."""
        hidden = self._llm.turn.hidden
        return self._context.n_bytes + (hidden.n_bytes if hidden else 0)

    def set_n_threads(self, n_threads: int) -> None:
        """CPU threads from now on."""
        self._context.set_n_threads(n_threads)

    def take_turns(self, cache_ram: int | None) -> None:
        """Conversations take turns from now on: nothing has to be done."""

    def _n_known(self, tokens: Sequence[int], user: object) -> int:
        n = len(self._text) if user is self._user else n_shared(tokens, self._text)
        return min(n, len(tokens) - 1)  # what follows the last one is asked anew

    def n_missing(self, tokens: Sequence[int], user: object) -> int:
        """See `Guesser`."""
        return min(len(tokens) - self._n_known(tokens, user), WINDOW)

    def follow(self, tokens: Sequence[int], user: object) -> int:
        """See `Guesser`. No guesses where the last token but one has no hidden state."""
        clock, shared, n = time.perf_counter(), self._n_known(tokens, user), len(tokens)
        hidden, known = self._llm.turn.hidden or HiddenStates(), shared
        text, self._text, self._user = self._text, [], None  # until it is read
        if known <= self._begin or known - 1 < hidden.begin:
            known = self._begin = hidden.begin + 1
        before = hidden.between(known - 1, n - 1)
        if before is None:
            return 0
        self._begin = max(self._begin, n - self._context.n_cells // 2 if self._is_full(n) else 0)
        self._context.remove(0, self._begin)
        self._context.remove(known)
        self._context.read(np.asarray(tokens[known:], np.int32), known, before)
        text[shared:] = map(int, tokens[shared:])
        self._user, self._text, self._end = user, text, n
        ms = 1e3 * (time.perf_counter() - clock)
        if n - known > MOST:
            self._costs.was_read(n - known, ms)
        else:
            self._costs.guessed(ms)
        return MOST

    def _is_full(self, n_tokens: int) -> bool:
        return n_tokens + MOST - self._begin > self._context.n_cells

    def likeliest(self) -> tuple[int, float]:
        """See `Guesser`."""
        return likeliest(self._context.logits())

    def take(self, token: int) -> None:
        """See `Guesser`."""
        clock = time.perf_counter()
        self._context.read(np.array([token], np.int32), self._end, self._context.hidden())
        self._end += 1
        self._costs.guessed(1e3 * (time.perf_counter() - clock))
