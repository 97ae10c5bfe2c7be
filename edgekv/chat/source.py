"""Words of an answer that stand in its prompt in the same order, in another form: a table that
becomes JSON, a list that becomes sentences.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence


class Words:
    """What tokens spell: signs and spaces, and a word behind them; either may be empty.

    text: the text of a token; tokens: those of a text, nothing in front.
    """

    def __init__(
        self, text: Callable[[int], bytes], tokens: Callable[[bytes], Sequence[int]]
    ) -> None:
        self._text, self._tokens = text, tokens
        self._split: dict[int, tuple[bytes, bytes]] = {}
        self._alike: dict[tuple[bytes, bytes], int | None] = {}

    def split(self, token: int) -> tuple[bytes, bytes]:
        """The signs of a token, and its word."""
        if token not in self._split:
            text = self._text(token)
            word = text.lstrip(_SIGNS)
            self._split[token] = text[: len(text) - len(word)], word
        return self._split[token]

    def alike(self, token: int, like: int) -> int | None:
        """The token that has one's word behind the other one's signs; None: there is none."""
        signs, word = self.split(like)[0], self.split(token)[1]
        if (signs, word) not in self._alike:
            self._alike[signs, word] = self._one(signs + word)
        return self._alike[signs, word]

    def _one(self, text: bytes) -> int | None:
        # some vocabularies put a space in front of a text
        for given in dict.fromkeys((text, text.removeprefix(b" "))):
            found = self._tokens(given)
            if len(found) == 1 and self._text(found[0]) == text:
                return found[0]
        return None


_SIGNS = bytes(x for x in range(128) if not chr(x).isalnum())


class Source:
    """The words of a prompt, in fields: the words of one stand without signs between them.

    A place is a word's number in the prompt.
    """

    REACH = 4
    """Fields ahead in which a word is looked for, and words between two that are in order."""
    ENOUGH = 2
    """Words before one that have to be the same in their order, else it is not the one."""
    PLACES = 200
    """Of a word that are compared, the newest ones."""

    def __init__(self, words: Words, prompt: Sequence[int]) -> None:
        self._tokens, self._words = list[int](), list[bytes]()
        self._begins, self._places = list[bool](), dict[bytes, list[int]]()
        """Whether a field begins there; where a word stands."""
        self._last: deque[bytes] = deque(maxlen=7)
        """Words of the answer that were not foreseen without this."""
        self._split = words.split
        is_apart = True
        for token in prompt:
            signs, word = self._split(token)
            if word:
                self._places.setdefault(word, []).append(len(self._tokens))
                self._begins.append(is_apart or bool(signs))
                self._tokens.append(token)
                self._words.append(word)
            is_apart = not word

    def token(self, place: int) -> int:
        return self._tokens[place]

    def ahead(self, place: int, n_fields: int) -> int | None:
        """The first word of the n-th field behind a place's; 0: the next word of its own."""
        if n_fields == 0:
            place += 1
            return place if place < len(self._begins) and not self._begins[place] else None
        for _ in range(n_fields):
            try:
                place = self._begins.index(True, place + 1)
            except ValueError:
                return None
        return place

    def noted(self, token: int) -> None:
        """A word of the answer."""
        self._last.append(self._split(token)[1])

    def found(
        self, token: int, place: int | None, is_inside: bool
    ) -> tuple[int | None, int | None]:
        """Where a word of the answer stands, and how many fields behind `place`, which is that of
        the word before; None: it stands nowhere, or elsewhere. is_inside: it follows at once.
        """
        word = self._split(token)[1]
        if not word:
            return place, None
        near = range(0 if is_inside else 1, self.REACH + 1)
        there = ((self.ahead(place, n), n) for n in near if place is not None)
        known = ((at, n) for at, n in there if at is not None and self._words[at] == word)
        at, n_fields = next(known, (None, None))
        at = self._anew(word) if at is None else at
        self._last.append(word)
        return (place if at is None else at), n_fields

    def _anew(self, word: bytes) -> int | None:
        """Where most of the answer's last words stand before it in their order, the first one."""
        at = max(self._places.get(word, ())[-self.PLACES :], key=self._in_order, default=None)
        return None if at is None or self._in_order(at) < self.ENOUGH else at

    def _in_order(self, at: int) -> int:
        n = 0
        for word in reversed(self._last):
            before = self._words[max(at - self.REACH, 0) : at][::-1]
            if word not in before:
                break
            n, at = n + 1, at - 1 - before.index(word)
        return n
