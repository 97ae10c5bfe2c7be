"""Drafts of one answer by a smaller model or a model's own heads, and how long they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgekv.chat.drafts import Costs, Drafting, paying
from edgekv.errors import Cancelled, EdgeKVError


class Guesser(Protocol):
    """What guesses what comes next: `edgekv.llama.draft_model`, `edgekv.llama.mtp`."""

    def n_missing(self, tokens: Sequence[int], user: object) -> int:
        """Tokens of a text that it would have to read before it can guess."""
        ...

    def follow(self, tokens: Sequence[int], user: object) -> int:
        """Read them. Returns how many guesses it can make behind them. user: whose text it is,
        which begins with that of the last time.
        """
        ...

    def likeliest(self) -> tuple[int, float]:
        """The token that it would write next, and its probability."""
        ...

    def take(self, token: int) -> None:
        """Go on with a token."""
        ...


def likeliest(logits: NDArray[np.float32]) -> tuple[int, float]:
    """The likeliest token by logits [n_vocab], and its probability."""
    token = int(logits.argmax())
    return token, 1 / float(np.exp(logits - logits[token]).sum())


class Guesses:
    """Drafts of one answer by a model.

    A draft goes on while one token more brings more than it takes: how often guesses are right is
    counted by how likely the model holds them. Where drafts do not pay, one is tried now and then.
    """

    STEPS = (0.0, 0.3, 0.5, 0.7, 0.85, 0.95)
    """Probabilities from which the share of right guesses is another one."""
    FIRST = (0.2, 0.4, 0.6, 0.75, 0.85, 0.95)
    """Those shares before anything is known, which counts as much as N_FIRST guesses."""
    N_FIRST = 4.0
    LASTS = 0.97
    """By how much an older guess counts less than the next one."""
    FEW, MANY = 32, 512
    """Tokens without drafts before one is tried, at first and at most."""
    PROBE = 2
    """Tokens of a draft that is tried."""
    PART = 0.05
    """Of the time of a pass that reading a token of a long text takes, until it is known."""

    def __init__(self, drafting: Drafting, costs: Costs, model: Guesser) -> None:
        self._n_min, self._n_max = drafting.draft_n_min, drafting.draft_n_max
        self._p_min = drafting.draft_p_min
        self._costs, self._model = costs, model
        self._right = [p * self.N_FIRST for p in self.FIRST]
        self._all = [self.N_FIRST] * len(self.STEPS)
        self._share = 0.7
        """Of all guesses that were right, of late."""
        self._begin: int | None = None
        """Tokens of the text before the first draft was wanted."""
        self._draft: list[tuple[int, int]] = []
        """Of the last draft each token and its step."""
        self._at = 0
        """Where it begins."""
        self._pause, self._next_try = self.FEW, 0

    def next(self, tokens: Sequence[int], most: int) -> list[int]:
        """See `Drafts`."""
        self._learn(tokens)
        most = min(most, self._n_max)
        ms = self._costs.of(most + 1)
        if most < 1 or not self._may_read(tokens, ms[1]):
            return []
        again = self._costs.again(ms)
        n = paying([self._share] * most, ms, self._costs.guess, again)
        if n == 0:
            could_pay = paying([1.0] * most, ms, self._costs.guess)
            if not could_pay or len(tokens) < self._next_try:
                return []
            self._next_try, self._pause = len(tokens) + self._pause, min(2 * self._pause, self.MANY)
            n = min(self.PROBE, most)
        else:
            self._pause, self._next_try = self.FEW, len(tokens) + self.FEW
        try:
            return self._guessed(tokens, n, ms)
        except Cancelled:
            raise
        except EdgeKVError:  # an answer needs no drafts
            self._n_max = 0
            return []

    def _may_read(self, tokens: Sequence[int], ms: float) -> bool:
        """Whether the answer has taken as long as the model would read: a short answer behind a
        long text is over before. ms: of a pass of one token.
        """
        if self._begin is None:
            self._begin = len(tokens)
        read = self._costs.read or self.PART * ms
        written = len(tokens) - self._begin
        return self._model.n_missing(tokens, self) * read <= (written + 1) * ms

    def _guessed(self, tokens: Sequence[int], most: int, ms: Sequence[float]) -> list[int]:
        found: list[tuple[int, int]] = []
        most = min(most, self._model.follow(tokens, self))
        expected, share, spent = 1.0, 1.0, 0.0
        for n in range(1, most + 1):
            token, p = self._model.likeliest()
            step = sum(p >= x for x in self.STEPS) - 1
            share *= self._right[step] / self._all[step]
            spent += self._costs.guess
            is_worth = share * (ms[n] + spent) >= expected * (ms[n + 1] - ms[n])
            if p < self._p_min or (n > 1 and not is_worth):
                break
            found.append((token, step))
            expected += share
            if n < most:
                self._model.take(token)
        if len(found) < self._n_min:
            return []
        self._draft, self._at = found, len(tokens)
        return [token for token, _ in found]

    def _learn(self, tokens: Sequence[int]) -> None:
        """What has become of the last draft."""
        for (guess, step), token in zip(self._draft, tokens[self._at :]):
            is_right = guess == token
            self._right[step] = self._right[step] * self.LASTS + is_right
            self._all[step] = self._all[step] * self.LASTS + 1
            self._share += (1 - self.LASTS) * 2 * (is_right - self._share)
            if not is_right:
                break
        self._draft = []
