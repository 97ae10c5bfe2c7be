"""Drafts of one answer by n-grams: the tokens that came where its last tokens stood before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from edgekv.chat.drafts import Costs, Drafting, paying
from edgekv.chat.source import Source, Words


class _Now(NamedTuple):
    """Where a text stands."""

    at: int = 0
    """Where the token stands that is expected next; 0: none is."""
    same: int = 0
    """Tokens before both places that are the same."""
    source: int | None = None
    """The place in the source of the last word that was found there."""
    is_inside: bool = False
    """Whether that word is the last token."""


class _Expected(NamedTuple):
    token: int
    share: int
    """Which share of right guesses is that of this one."""
    n_fields: int | None
    """So many fields behind the last word it stands in the source; None: it is not from there."""
    then: _Now
    """If it comes."""


class Ngrams:
    """Drafts of one answer: a text is likely to go on as it did where its last tokens stood before;
    of the last such places, where most tokens before them are the same.

    Rows of a table have other words in the same places. Where few tokens before a place are the
    same without a gap, those are counted that are the same in their order. Such words may stand in
    the prompt in the same order (`Source`): then the next one is expected as many fields ahead as
    in the row before, and as many words of it as that field has.

    Every token that comes says whether a guess would have been right, so the share of right ones is
    known for nothing, by how many tokens were the same before, and in a text that was guessed
    already by whether that place was foreseen. A draft is as long as that pays.
    """

    STEPS = (0, 2, 3, 4, 6, 10, 16, 32)
    """Numbers of same tokens from which the share of right guesses is another one."""
    FORESEEN = len(STEPS)
    """Behind those steps: places that were foreseen, and then those that were not."""
    COPIED = FORESEEN + 2
    """Words of the source."""
    FIRST = (0.1, 0.1, 0.2, 0.4, 0.6, 0.75, 0.85, 0.9, 0.85, 0.3, 0.5)
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

    def __init__(self, drafting: Drafting, costs: Costs, words: Words) -> None:
        self._n, self._m, self._costs = drafting.ngram_size_n, drafting.ngram_size_m, costs
        self._tokens: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] = {}
        """Of last tokens, and of the last one alone: where they have ended."""
        self._words, self._source = words, Source(words, [])
        self._n_prompt = 0
        self._now = _Now()
        self._foreseen: dict[int, bool] = {}
        """Of places for which a token was expected: whether it came, not from the source."""
        self._fields: dict[int, int] = {}
        """Of words that stand in the source: how many fields behind the one before."""
        self._right = [p * self.N_FIRST for p in self.FIRST]
        self._all = [self.N_FIRST] * len(self.FIRST)

    def next(self, tokens: Sequence[int], most: int) -> list[int]:
        """See `Drafts`."""
        if not self._tokens:
            self._n_prompt, self._source = len(tokens), Source(self._words, tokens)
        for i in range(len(self._tokens), len(tokens)):
            if i + self.LEARNS < len(tokens):
                self._add(int(tokens[i]))
            else:
                self._follow(int(tokens[i]))
        most = min(most, self._m)
        if most < 1:
            return []
        draft = [x for x, _ in zip(self._expected(), range(most))]
        ms = self._costs.of(most + 1)
        right = (self._right[x.share] / self._all[x.share] for x in draft)
        return [x.token for x in draft[: paying(right, ms, again=self._costs.again(ms))]]

    def _add(self, token: int) -> None:
        self._tokens.append(token)
        for last in {(token,), tuple(self._tokens[-self._n :])}:
            self._places.setdefault(last, []).append(len(self._tokens))

    def _before(self, n_last: int) -> list[int]:
        """Places where the last tokens have ended before, the newest ones."""
        return self._places[tuple(self._tokens[-n_last:])][-self.PLACES - 1 : -1]

    # ---- a token that comes

    def _follow(self, token: int) -> None:
        here, expected = len(self._tokens), next(self._expected(), None)
        self._add(token)
        if expected is None:
            self._now = self._elsewhere(token)
            return
        is_right, share = expected.token == token, expected.share
        self._right[share] = self._right[share] * self.LASTS + is_right
        self._all[share] = self._all[share] * self.LASTS + 1
        self._foreseen[here] = is_right and expected.n_fields is None
        if not is_right:
            self._now = self._elsewhere(token)
            return
        if expected.n_fields is not None:
            self._fields[here] = expected.n_fields
            self._source.noted(token)
        self._now = expected.then

    def _elsewhere(self, token: int) -> _Now:
        """Where the text stands behind a token that was not expected."""
        now, here, source, is_inside = self._now, len(self._tokens) - 1, None, False
        if here >= self._n_prompt:
            source, n_fields = self._source.found(token, now.source, now.is_inside)
            is_inside = source != now.source
            if n_fields is not None:
                self._fields[here] = n_fields
                if n_fields == 0 and self._fields.get(now.at) != 0:
                    return now._replace(source=source, is_inside=True)  # a longer field
                if now.at in self._fields or not self._foreseen.get(now.at, True):
                    return _Now(now.at + 1, now.same + 1, source, True)
        same, at = self._found()
        return _Now(at, same, source, is_inside)

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

    # ---- tokens that are expected

    def _expected(self) -> Iterator[_Expected]:
        """The next tokens, if all before them come."""
        now, tokens, fields = self._now, self._tokens, self._fields
        ahead: list[_Expected] = []  # a text may go on into its own draft
        while now.at and (i := now.at - len(tokens)) < len(ahead):
            token = tokens[now.at] if i < 0 else ahead[i].token
            n_fields = fields.get(now.at) if i < 0 else ahead[i].n_fields
            found = self._copied(now, token, n_fields)
            if found is None and n_fields == 0 and now.is_inside:
                now = now._replace(at=now.at + 1)  # a shorter field
                continue
            then = _Now(now.at + 1, now.same + 1, now.source)
            found = found or _Expected(token, self._share(now), None, then)
            yield found
            ahead.append(found)
            now = found.then

    def _copied(self, now: _Now, like: int, n_fields: int | None) -> _Expected | None:
        """The next word of the source, where the text has one. like: the token in its place in the
        row before, n_fields: how far behind the one before that is.
        """
        if now.source is None:
            return None
        place = self._source.ahead(now.source, 0) if now.is_inside else None
        if place is not None:
            token, at, n = self._source.token(place), now.at + (n_fields == 0), 0
            return _Expected(token, self.COPIED, n, _Now(at, now.same + 1, place, True))
        place = self._source.ahead(now.source, n_fields) if n_fields else None
        made = None if place is None else self._words.alike(self._source.token(place), like)
        if made is None:
            return None
        return _Expected(made, self.COPIED, n_fields, _Now(now.at + 1, now.same + 1, place, True))

    def _share(self, now: _Now) -> int:
        """Which share of right guesses is that of the next token."""
        if now.same >= self.ENOUGH and now.at in self._foreseen:
            return self.FORESEEN + (not self._foreseen[now.at])
        return sum(now.same >= x for x in self.STEPS) - 1
