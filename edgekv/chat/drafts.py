"""Drafts: the tokens that are likely to come next, guessed from the text so far. One pass over the
weights then checks them all, and as many are kept as the sampler would have drawn anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from edgekv.errors import BadInput

NONE, MODEL, MTP, AUTO = "none", "draft-simple", "draft-mtp", "auto"
NGRAMS = ("ngram-simple", "ngram-map-k", "ngram-mod")
TYPES = (NONE, *NGRAMS, MODEL, MTP)
"""llama.cpp's names. All of its n-grams are one kind here. AUTO is edgekv's: n-grams where they
leave the bits of an answer as they are.
"""
GAIN = 1.1
"""As many times the tokens a second a draft has to promise: shares of right guesses are of few."""
MOST = 15
"""Tokens of a draft: with the token before them as many as have the same bits in a pass as alone
(docs/drafts.md).
"""


@dataclass(frozen=True)
class Drafting:
    """Which drafts are made. type: AUTO, one of TYPES, or several with commas between them, and the
    first that has a draft is asked; ngram_size_n: as many tokens have to be the same before a
    guess, or more in the same order; ngram_size_m: tokens of such a draft at most.

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
        if self.draft_model and self.type in (NONE, AUTO):
            return [MODEL]
        return [name for name in self.type.split(",") if name not in (NONE, AUTO)]

    def arguments(self) -> dict[str, Any]:
        """Those of `edgekv.Llama`."""
        return {f"spec_{name}": value for name, value in asdict(self).items()}

    @property
    def is_on(self) -> bool:
        return bool(self.types)

    @property
    def is_auto(self) -> bool:
        """Whether the model decides."""
        return self.type == AUTO and not self.types


def check_types(text: str) -> str:
    """`text` itself. Raises BadInput if one of the types in it is none of TYPES."""
    for name in text.split(",") if text != AUTO else ():
        if name not in TYPES:
            known = ", ".join((*TYPES, AUTO))
            raise BadInput(f"there are no drafts of the type '{name}' here: give one of {known}")
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
    best, n_best, rest = GAIN * expected / ms[1], 0, 0.0
    for n, p in enumerate(shares, 1):
        rest += share * (1 - p) * n * again
        share *= p
        expected += share
        took = ms[n + 1] + n * each + rest
        if expected / took > best:
            best, n_best = expected / took, n
    return n_best
