"""Drafts: the tokens that are likely to come next, guessed from the text so far. One pass over the
weights then checks them all, and as many are kept as the sampler would have drawn anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from edgekv.errors import BadInput

NONE = "none"
TYPES = (NONE, "ngram-simple", "ngram-map-k", "ngram-mod")
"""llama.cpp's names. All of its n-grams are one kind here."""
MOST = 31
"""Tokens of a draft: with the token before them those of a pass that has logits of each."""


@dataclass(frozen=True)
class Drafting:
    """Which drafts are made. type: one of TYPES, or several with commas between them; ngram_size_n:
    as many tokens have to be the same before a guess; ngram_size_m: tokens of a draft at most.
    Raises BadInput.
    """

    type: str = NONE
    ngram_size_n: int = 4
    ngram_size_m: int = MOST

    def __post_init__(self) -> None:
        for name in self.type.split(","):
            if name not in TYPES:
                raise BadInput(
                    f"there are no drafts of the type '{name}' here: give one of {', '.join(TYPES)}"
                )
        if self.ngram_size_n < 1 or self.ngram_size_m < 1:
            raise BadInput("drafts need 1 token or more: give a larger size")

    def arguments(self) -> dict[str, Any]:
        """Those of `edgekv.Llama`."""
        return {f"spec_{name}": value for name, value in asdict(self).items()}

    @property
    def is_on(self) -> bool:
        return any(name != NONE for name in self.type.split(","))


class Costs:
    """What a pass takes by its number of tokens, from passes of late."""

    WEIGHT = 0.3  # of the newest pass
    LATE = 256  # passes after which one says nothing any more
    # Share of a pass of one token that each further one takes, until it is known: less than is
    # likely, so that longer drafts are tried, and their time is known
    GROWTH = 0.05

    def __init__(self) -> None:
        self._ms: dict[int, tuple[float, int]] = {}
        self._n = 0

    def took(self, n_tokens: int, ms: float) -> None:
        """A pass with so many tokens took so long."""
        self._n += 1
        before = self._ms.get(n_tokens, (ms, 0))[0]
        self._ms[n_tokens] = before + self.WEIGHT * (ms - before), self._n

    def of(self, most: int) -> list[float]:
        """[most + 1]: ms of a pass by its number of tokens, between those that are known on a line;
        a pass of none takes nothing. All 1 before the first pass.
        """
        known = {n: ms for n, (ms, at) in self._ms.items() if n == 1 or at > self._n - self.LATE}
        one = known.get(1)
        if one is None:
            return [0.0] + [1.0] * most
        found, last = [0.0, one], 1
        for n in sorted(x for x in known if 1 < x <= most):
            step = (known[n] - found[-1]) / (n - last)
            found += [found[-1] + step * i for i in range(1, n - last + 1)]
            last = n
        found += [found[-1] + self.GROWTH * one * i for i in range(1, most - last + 1)]
        return found


class Ngrams:
    """Drafts of one answer: a text is likely to go on as it did where its last tokens stood before.

    Every token that comes says whether a guess would have been right, so the share of right ones is
    known for nothing, by how many tokens were the same before. A draft is as long as that pays.
    """

    STEPS = (0, 6, 10, 16, 32)
    """Numbers of same tokens from which the share of right guesses is another one."""
    FIRST = (0.6, 0.7, 0.8, 0.85, 0.9)
    """Those shares before anything is known, which counts as much as N_FIRST guesses."""
    N_FIRST = 8.0
    LASTS = 0.97
    """By how much an older guess counts less than the next one."""

    def __init__(self, drafting: Drafting, costs: Costs) -> None:
        self._n, self._m, self._costs = drafting.ngram_size_n, drafting.ngram_size_m, costs
        self._tokens: list[int] = []
        self._places: dict[tuple[int, ...], int] = {}
        self._at = 0
        """Where the token stands that is expected next; 0: none is."""
        self._same = 0
        """Tokens before both places that are the same."""
        self._right = [p * self.N_FIRST for p in self.FIRST]
        self._all = [self.N_FIRST] * len(self.STEPS)

    def next(self, tokens: Sequence[int], most: int) -> list[int]:
        """What may come behind `tokens`, which begin with those of the last time: `most` tokens at
        most, none where checking them would not pay.
        """
        for token in tokens[len(self._tokens) :]:
            self._follow(int(token))
        most = min(most, self._m)
        if not self._at or most < 1:
            return []
        draft: list[int] = []
        for place in range(self._at, self._at + self._length(most)):
            n = len(self._tokens)  # a text may go on into its own draft
            draft.append(self._tokens[place] if place < n else draft[place - n])
        return draft

    def _follow(self, token: int) -> None:
        is_right = False
        if self._at:
            is_right, step = self._tokens[self._at] == token, self._step(self._same)
            self._right[step] = self._right[step] * self.LASTS + is_right
            self._all[step] = self._all[step] * self.LASTS + 1
        self._tokens.append(token)
        n, key = len(self._tokens), tuple(self._tokens[-self._n :])
        place = self._places.get(key, 0)
        self._places[key] = n
        if is_right:
            self._at, self._same = self._at + 1, self._same + 1
        else:
            self._at, self._same = place, self._same_before(place, n) if place else 0

    def _same_before(self, a: int, b: int) -> int:
        n = 0
        while n < min(a, self.STEPS[-1]) and self._tokens[a - 1 - n] == self._tokens[b - 1 - n]:
            n += 1
        return n

    def _step(self, same: int) -> int:
        return sum(same >= x for x in self.STEPS) - 1

    def _length(self, most: int) -> int:
        """Tokens of the draft by which an answer gets most tokens in its time."""
        ms = self._costs.of(most + 1)
        expected = share = 1.0
        best, n_best = expected / ms[1], 0
        for n in range(1, most + 1):
            step = self._step(self._same + n - 1)
            share *= self._right[step] / self._all[step]
            expected += share
            if expected / ms[n + 1] > best:
                best, n_best = expected / ms[n + 1], n
        return n_best
