"""Rules for numbers between bounds, and for multiples of a number.

They are written without exponents and with a limited number of places, so they are whole numbers of
some unit, and their digits can be compared with a bound's one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import lru_cache
from math import ceil, floor, lcm
from typing import Any

from edgekv.grammars.characters import quoted
from edgekv.grammars.regexes import NotHeld

DIGITS_MOST, PLACES_MOST, LISTED_MOST = 16, 16, 200
"""Digits before and behind the point, as in llama.cpp; multiples that are written one by one."""
HUGE = 10**25
MINIMA, MAXIMA = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")


@dataclass(frozen=True)
class Bound:
    """A number, and whether it is itself left out."""

    value: Fraction
    is_open: bool = False


@dataclass(frozen=True)
class Asked:
    """What a schema asks of a number. step: it has to be a multiple of it."""

    low: Bound | None
    high: Bound | None
    step: Fraction | None
    is_integer: bool


def asked(flat: dict[str, Any], is_integer: bool) -> Asked:
    """What a flat schema asks of its numbers."""
    lows = [Bound(exact(flat[w]), w != "minimum") for w in MINIMA if w in flat]
    highs = [Bound(exact(flat[w]), w != "maximum") for w in MAXIMA if w in flat]
    steps = [exact(step) for step in flat.get("multipleOf", [])] + [Fraction(1)] * is_integer
    low = max(lows, key=lambda bound: (bound.value, bound.is_open), default=None)
    high = min(highs, key=lambda bound: (bound.value, not bound.is_open), default=None)
    step = _common(steps) if steps else None
    if step is not None and step.denominator == 1:
        low, high = (
            low and Bound(Fraction(_first(low, 1))),
            high and Bound(Fraction(_last(high, 1))),
        )
    return Asked(low, high, step, step is not None and step.denominator == 1)


def exact(value: float) -> Fraction:
    """The number that a JSON text says."""
    return Fraction(value) if isinstance(value, int) else Fraction(Decimal(repr(value)))


def _common(steps: Iterable[Fraction]) -> Fraction:
    """The smallest number that is a multiple of all."""
    out = Fraction(1, 1)
    for i, step in enumerate(steps):
        scale = lcm(out.denominator, step.denominator)
        out = Fraction(lcm(int(out * scale), int(step * scale)), scale) if i else step
    return out


def _first(low: Bound, scale: Fraction | int) -> int:
    """The first whole number n for which n / scale is not below a bound."""
    value = low.value * scale
    return floor(value) + 1 if low.is_open else ceil(value)


def _last(high: Bound, scale: Fraction | int) -> int:
    """The last one that is not above."""
    value = high.value * scale
    return ceil(value) - 1 if high.is_open else floor(value)


def allows(want: Asked, value: float) -> bool:
    """Whether a number is one of those asked for."""
    number, low, high = exact(value), want.low, want.high
    if low and (number < low.value or low.is_open and number == low.value):
        return False
    if high and (number > high.value or high.is_open and number == high.value):
        return False
    return want.step is None or (number / want.step).denominator == 1


@lru_cache(maxsize=1000)
def rule_of(want: Asked) -> str | None:
    """The rule of the numbers asked for; None if there are none. Raises NotHeld."""
    low, high, step = want.low, want.high, want.step
    if low and low.value >= HUGE or high and high.value <= -HUGE:
        raise NotHeld("it has too many digits")
    low = low if low and low.value > -HUGE else None  # others are no bounds
    high = high if high and high.value < HUGE else None
    if step not in (None, 1) and low and high and (high.value - low.value) / step < LISTED_MOST:
        numbers = range(_first(low, 1 / step), _last(high, 1 / step) + 1)
        return " | ".join(quoted(text_of(step * i)) for i in numbers) or None
    tail = _tail(step)
    least = _first(low, 10**tail.n_places) if low else None
    most = _last(high, 10**tail.n_places) if high else None
    ways = []
    if least is None or least < 0:
        begin = 0 if most is None else max(-most, 0)
        negative = _natural(begin, None if least is None else -least, tail)
        ways += [f'"-" {way}' for way in negative]
    if most is None or most >= 0:
        ways += _natural(max(least or 0, 0), most, tail)
    return " | ".join(ways) or None


def text_of(number: Fraction) -> str:
    """A number without an exponent. It has an end."""
    with localcontext() as context:
        context.prec = 1000
        text = f"{Decimal(number.numerator) / Decimal(number.denominator):f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


Digits = str | None
"""What is left of a bound's digits; None: every digit is within it."""


@dataclass(frozen=True)
class Tail:
    """The last digits of a number. n_places: as many of them stand behind the point, all or none;
    ends: what they may be; None: anything.
    """

    n_digits: int
    n_places: int
    ends: range | None = None

    def text(self, low: Digits, high: Digits) -> str | None:
        """GBNF of the digits between two bounds; None if there are none."""
        if self.ends is not None:
            return self._listed(self.ends, int(low or 0), int(high or 10**self.n_digits))
        ways = _places(low, high, self.n_places)
        behind = f'"." {_one_of(ways)}' if ways else ""
        if low is None:  # it may have no point
            return f"( {behind} )?" if ways else ""
        return behind or None

    def _listed(self, ends: range, low: int, high: int) -> str | None:
        k = self.n_digits
        found = [f"{end:0{k}d}" for end in ends if low <= end <= high]
        texts = list(map(quoted, found))
        if self.n_places:
            trimmed = [text.rstrip("0") for text in found]
            texts = [f'"." {quoted(text)} "0"{{0,{k}}}' for text in trimmed if text]
            texts += [f'( "." "0"{{1,{k}}} )?'] if "" in trimmed else []
        return f"( {' | '.join(texts)} )" if texts else None


def _tail(step: Fraction | None) -> Tail:
    """The last digits of multiples; None: of any number. Raises NotHeld."""
    if step is None:
        return Tail(PLACES_MOST, PLACES_MOST)
    if step == 1:
        return Tail(0, 0)
    for k in range(1, 5):
        unit, scaled = 10**k, step * 10**k
        if scaled == 1:
            return Tail(k, k)
        if step.denominator == 1 and unit % step == 0:
            return Tail(k, 0, range(0, unit, int(step)))
        if scaled.denominator == 1 and unit % scaled == 0 and unit / scaled <= LISTED_MOST:
            return Tail(k, k, range(0, unit, int(scaled)))
    raise NotHeld("a grammar does not divide by it")


def _natural(low: int, high: int | None, tail: Tail) -> list[str]:
    """Ways to write a number that is not negative. low, high: in units of its last place."""
    ways, k = [], tail.n_digits
    if tail.ends and not tail.n_places:  # it has no zeros before it where it stands alone
        ends = [end for end in tail.ends if low <= end and (high is None or end <= high)]
        ways, low = [quoted(str(end)) for end in ends], max(low, 10**k)
    if high is not None and high < low:
        return ways
    a, b = (str(n).zfill(k + 1) if n is not None else "" for n in (low, high))
    n, n_high = len(a) - k, len(b) - k
    if len(a) == len(b):
        return ways + _head(a, b, n, tail, n > 1)
    ways += _head(a, None, n, tail, n > 1)
    longest = n_high - 1 if b else max(DIGITS_MOST, n)
    if longest > n:
        ways.append(f"[1-9] [0-9]{{{n},{longest - 1}}} {tail.text(None, None)}".rstrip())
    return ways + (_head(None, b, n_high, tail, True) if b else [])


def _head(low: Digits, high: Digits, left: int, tail: Tail, least: int = 0) -> list[str]:
    """Ways to write `left` digits and the tail between two bounds. least: the first digit."""
    low, high = _loose(low, high)
    if not left:
        text = tail.text(low, high)
        return [] if text is None else [text]
    if low is None and high is None and not least:
        return [f"[0-9]{{{left}}} {tail.text(None, None)}".rstrip()]
    ways = []
    for digits, lower, higher in _spans(low, high, least):
        if inner := _head(lower, higher, left - 1, tail):
            rest = inner[0] if len(inner) == 1 else _one_of(inner)
            ways.append(f"{digits} {rest}".rstrip())
    return ways


def _places(low: Digits, high: Digits, left: int) -> list[str]:
    """Ways to write at least one of `left` digits behind the point, where all others are 0."""
    low, high = _loose(low, high)
    if not left:
        return []
    if low is None and (high is None or not high.strip("0")):
        return [f"{'[0-9]' if high is None else _digit(0, 0)}{{1,{left}}}"]
    if high is None and low == "1".zfill(left) and left > 1:
        return [f'"0"{{0,{left - 1}}} [1-9] [0-9]{{0,{left - 1}}}']
    ways = []
    for digits, lower, higher in _spans(low, high, 0):
        more, may_stop = _places(lower, higher, left - 1), not (lower or "").strip("0")
        if more:
            ways.append(f"{digits} {_one_of(more)}{'?' * may_stop}")
        elif may_stop:
            ways.append(digits)
    return ways


def _loose(low: Digits, high: Digits) -> tuple[Digits, Digits]:
    """Without those that leave every digit."""
    return low if (low or "").strip("0") else None, high if (high or "").strip("9") else None


def _spans(low: Digits, high: Digits, least: int) -> Iterator[tuple[str, Digits, Digits]]:
    """GBNF of the next digit, those of bounds apart, with what is left of these behind it."""
    bottom, top = int(low[0]) if low else least, int(high[0]) if high else 9
    if low and high and bottom == top:
        yield _digit(top, top), low[1:], high[1:]
        return
    if low:
        yield _digit(bottom, bottom), low[1:], None
    first, last = bottom + bool(low), top - bool(high)
    if first <= last:
        yield _digit(first, last), None, None
    if high:
        yield _digit(top, top), None, high[1:]


def _digit(first: int, last: int) -> str:
    return f'"{first}"' if first == last else f"[{first}-{last}]"


def _one_of(ways: list[str]) -> str:
    return f"( {' | '.join(ways)} )"
