"""Drafts: the tokens that are likely to come next, guessed from the text so far. One pass over the
weights then checks them all, and as many are kept as the sampler would have drawn anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, Protocol

from edgekv.errors import BadInput

NONE, MODEL, MTP = "none", "draft-simple", "draft-mtp"
NGRAMS = ("ngram-simple", "ngram-map-k", "ngram-mod")
TYPES = (NONE, *NGRAMS, MODEL, MTP)
"""llama.cpp's names. All of its n-grams are one kind here."""
MOST = 15
"""Tokens of a draft: with the token before them as many as have the same bits in a pass as alone
(docs/drafts.md).
"""


@dataclass(frozen=True)
class Drafting:
    """Which drafts are made. type: one of TYPES, or several with commas between them, and the first
    that has a draft is asked; ngram_size_n: as many tokens have to be the same before a guess,
    or more in the same order; ngram_size_m: tokens of such a draft at most.

    draft_model: the file of a smaller model with the same vocabulary, which is asked if nobody says
    a type; draft_n_max, draft_n_min: tokens of its drafts at most, and at least, else there is
    none; draft_p_min: less likely it must not hold a guess; the same of the model's own heads.
    Raises BadInput.
    """

    type: str = NONE
    ngram_size_n: int = 2
    ngram_size_m: int = MOST
    draft_model: str | None = None
    draft_n_max: int = MOST
    draft_n_min: int = 0
    draft_p_min: float = 0.0

    def __post_init__(self) -> None:
        check_types(self.type)
        if self.ngram_size_n < 1 or self.ngram_size_m < 1:
            raise BadInput("drafts need 1 token or more: give a larger size")
        if min(self.draft_n_max, self.draft_n_min) < 0 or not 0 <= self.draft_p_min <= 1:
            raise BadInput("tokens of a draft are counted from 0, and a probability is at most 1")
        if MTP in self.types and (self.draft_model or MODEL in self.types):
            raise BadInput(
                f"drafts of the type {MTP} are the model's own: leave {MODEL} and -md out"
            )
        if MODEL in self.types and not self.draft_model:
            raise BadInput(f"drafts of the type {MODEL} are a model's: give it with -md")
        if self.draft_model and MODEL not in self.types:
            raise BadInput(
                f"a draft model is given, and another type of drafts: give {self.type},{MODEL}"
            )

    @property
    def types(self) -> list[str]:
        """Those that are on. One model and no type is a draft model's."""
        if self.draft_model and self.type == NONE:
            return [MODEL]
        return [name for name in self.type.split(",") if name != NONE]

    def arguments(self) -> dict[str, Any]:
        """Those of `edgekv.Llama`."""
        return {f"spec_{name}": value for name, value in asdict(self).items()}

    @property
    def is_on(self) -> bool:
        return bool(self.types)


def check_types(text: str) -> str:
    """`text` itself. Raises BadInput if one of the types in it is none of TYPES."""
    for name in text.split(","):
        if name not in TYPES:
            raise BadInput(
                f"there are no drafts of the type '{name}' here: give one of {', '.join(TYPES)}"
            )
    return text


class Drafts(Protocol):
    """Drafts of one answer."""

    def next(self, tokens: Sequence[int], most: int) -> list[int]:
        """What may come behind `tokens`, which begin with those of the last time: `most` tokens at
        most, none where checking them would not pay.
        """
        ...


class First:
    """Those of several kinds: of the first that has a draft."""

    def __init__(self, kinds: Sequence[Drafts]) -> None:
        self._kinds = kinds

    def next(self, tokens: Sequence[int], most: int) -> list[int]:
        return next((x for kind in self._kinds if (x := kind.next(tokens, most))), [])


class Costs:
    """What a pass takes by its number of tokens, from passes of late.

    reads_again: the tokens since a draft are read once more where some of it was wrong.
    """

    WEIGHT = 0.3  # of the newest pass
    LATE = 256  # passes after which one says nothing any more
    # Share of a pass of one token that each further one takes, until it is known: less than is
    # likely, so that longer drafts are tried, and their time is known
    GROWTH = 0.05

    def __init__(self, reads_again: bool = False) -> None:
        self._ms: dict[int, tuple[float, int]] = {}
        self._n, self._reads_again = 0, reads_again
        self.guess = self.read = 0.0
        """ms of a guess of a draft model, and of a token of a text that it reads; 0: not known."""

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

    def again(self, ms: Sequence[float]) -> float:
        """ms that a token takes which is read once more; ms: see `of`."""
        return max(ms[2] - ms[1], 0.0) if self._reads_again and len(ms) > 2 else 0.0

    def guessed(self, ms: float) -> None:
        """A draft model made a guess in so many ms."""
        self.guess += (self.WEIGHT if self.guess else 1.0) * (ms - self.guess)

    def was_read(self, n_tokens: int, ms: float) -> None:
        """A draft model read so many tokens of a text in so many ms."""
        self.read = ms / n_tokens


def paying(
    shares: Iterable[float], ms: Sequence[float], each: float = 0.0, again: float = 0.0
) -> int:
    """Tokens of the draft by which an answer gets most tokens in its time.

    shares: of each token of a draft, how likely it is right where those before it are; ms: of a
    pass by its number of tokens; each: ms that a token of a draft takes before it is checked;
    again: that a token takes which is read once more, where one of a draft was wrong.
    """
    expected = share = 1.0
    best, n_best, rest = expected / ms[1], 0, 0.0
    for n, p in enumerate(shares, 1):
        rest += share * (1 - p) * n * again
        share *= p
        expected += share
        took = ms[n + 1] + n * each + rest
        if expected / took > best:
            best, n_best = expected / took, n
    return n_best


class Ngrams:
    """Drafts of one answer: a text is likely to go on as it did where its last tokens stood before;
    of the last such places, where most tokens before them are the same.

    Rows of a table have other words in the same places. Where few tokens before a place are the
    same without a gap, those are counted that are the same in their order.

    Every token that comes says whether a guess would have been right, so the share of right ones is
    known for nothing, by how many tokens were the same before, and in a text that was guessed
    already by whether that place was foreseen. A draft is as long as that pays.
    """

    STEPS = (0, 2, 3, 4, 6, 10, 16, 32)
    """Numbers of same tokens from which the share of right guesses is another one."""
    FORESEEN = len(STEPS)
    """Behind those steps: places that were foreseen, and then those that were not."""
    FIRST = (0.1, 0.1, 0.2, 0.4, 0.6, 0.75, 0.85, 0.9, 0.85, 0.3)
    """Those shares before anything is known, which counts as much as N_FIRST guesses: low, since a
    share that is higher is soon known without a draft.
    """
    N_FIRST = 8.0
    LASTS = 0.97
    """By how much an older guess counts less than the next one."""
    PLACES = 8
    """That are compared, the newest ones."""
    LEARNS = 256
    """Last tokens of a prompt whose guesses are counted."""
    ENOUGH = 4
    """Same tokens that say that a text goes on as it did there."""
    ORDERED, GAP = 24, 4
    """Tokens among which those in the same order are counted, and others between two of them."""
    SKIPS = sorted(product(range(GAP + 1), repeat=2), key=sum)
    """Tokens that are left out before the two places, few first."""

    def __init__(self, drafting: Drafting, costs: Costs) -> None:
        self._n, self._m, self._costs = drafting.ngram_size_n, drafting.ngram_size_m, costs
        self._tokens: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] = {}
        """Of last tokens, and of the last one alone: where they have ended."""
        self._at = 0
        """Where the token stands that is expected next; 0: none is."""
        self._same = 0
        """Tokens before both places that are the same."""
        self._foreseen: dict[int, bool] = {}
        """Of places for which a token was expected: whether it came."""
        self._right = [p * self.N_FIRST for p in self.FIRST]
        self._all = [self.N_FIRST] * len(self.FIRST)

    def next(self, tokens: Sequence[int], most: int) -> list[int]:
        """See `Drafts`."""
        for i in range(len(self._tokens), len(tokens)):
            if i + self.LEARNS < len(tokens):
                self._add(int(tokens[i]))
            else:
                self._follow(int(tokens[i]))
        most = min(most, self._m)
        if not self._at or most < 1:
            return []
        draft: list[int] = []
        for place in range(self._at, self._at + self._length(most)):
            n = len(self._tokens)  # a text may go on into its own draft
            draft.append(self._tokens[place] if place < n else draft[place - n])
        return draft

    def _add(self, token: int) -> None:
        self._tokens.append(token)
        for last in {(token,), tuple(self._tokens[-self._n :])}:
            self._places.setdefault(last, []).append(len(self._tokens))

    def _before(self, n_last: int) -> list[int]:
        """Places where the last tokens have ended before, the newest ones."""
        return self._places[tuple(self._tokens[-n_last:])][-self.PLACES - 1 : -1]

    def _follow(self, token: int) -> None:
        is_right = False
        if self._at:
            is_right, share = self._tokens[self._at] == token, self._share(0)
            self._right[share] = self._right[share] * self.LASTS + is_right
            self._all[share] = self._all[share] * self.LASTS + 1
            self._foreseen[len(self._tokens)] = is_right
        self._add(token)
        if is_right:
            self._at, self._same = self._at + 1, self._same + 1
        else:
            self._same, self._at = self._found()

    def _found(self) -> tuple[int, int]:
        """The same tokens before a place at which the text may go on, and that place."""
        n = len(self._tokens)
        found = ((self._same_before(place, n), place) for place in self._before(self._n))
        same, at = max(found, default=(0, 0))
        if same < self.ENOUGH:
            found = ((self._ordered_before(place, n), place) for place in self._before(1))
            ordered, place = max(found, default=(0, 0))
            if ordered >= self.ENOUGH:
                return ordered, place
        return same, at

    def _same_before(self, a: int, b: int) -> int:
        n = 0
        while n < min(a, self.STEPS[-1]) and self._tokens[a - 1 - n] == self._tokens[b - 1 - n]:
            n += 1
        return n

    def _ordered_before(self, a: int, b: int) -> int:
        """Tokens before both places that are the same in their order, the nearest ones first."""
        tokens, least, n = self._tokens, max(a - self.ORDERED, 1), 0
        while True:
            fits = (
                (i, j)
                for i, j in self.SKIPS
                if a - i >= least and tokens[a - i - 1] == tokens[b - j - 1]
            )
            i, j = next(fits, (-1, -1))
            if i < 0:
                return n
            n, a, b = n + 1, a - i - 1, b - j - 1

    def _share(self, ahead: int) -> int:
        """Which share of right guesses is that of the token so many behind the next one."""
        place, same = self._at + ahead, self._same + ahead
        if same >= self.ENOUGH and place in self._foreseen:
            return self.FORESEEN + (not self._foreseen[place])
        return sum(same >= x for x in self.STEPS) - 1

    def _length(self, most: int) -> int:
        shares, ms = map(self._share, range(most)), self._costs.of(most + 1)
        right = (self._right[i] / self._all[i] for i in shares)
        return paying(right, ms, again=self._costs.again(ms))
