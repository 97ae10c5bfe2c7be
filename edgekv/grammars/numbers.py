"""Rules for numbers between bounds, and for multiples of a number.

They are written without exponents: digits can be compared with a bound's one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import lru_cache, partial
from math import ceil, floor, lcm
from typing import Any

from edgekv.grammars.characters import quoted
from edgekv.grammars.regexes import NotHeld

DIGITS_MOST, PLACES_MOST, LISTED_MOST = 16, 16, 200
"""Digits before and behind the point, as in llama.cpp; multiples that are written one by one."""
HUGE, SOME = 10**25, 4
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
        low = low and Bound(Fraction(floor(low.value) + 1 if low.is_open else ceil(low.value)))
        high = high and Bound(Fraction(ceil(high.value) - 1 if high.is_open else floor(high.value)))
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


def allows(want: Asked, value: float) -> bool:
    """Whether a number is one of those asked for."""
    number = exact(value)
    if want.step is not None and (number / want.step).denominator != 1:
        return False
    return _is_between(number, _left(want.low), _left(want.high))


def _left(bound: Bound | None) -> Left:
    return None if bound is None else (bound.value, bound.is_open)


@lru_cache(maxsize=1000)
def rule_of(want: Asked) -> str | None:
    """The rule of the numbers asked for; None if there are none. Raises NotHeld."""
    low, high = _within_reach(want)
    if low and high and low.value > high.value:
        return None
    step = want.step
    if step not in (None, 1) and low and high and (high.value - low.value) / step < LISTED_MOST:
        return _listed(step, low, high)
    tail, scale = _tail(step)
    zero = Bound(Fraction(0))
    ways = []
    if low is None or low.value < 0:
        top = Bound(-high.value, high.is_open) if high and high.value <= 0 else zero
        bottom = None if low is None else Bound(-low.value, low.is_open)
        ways += [f'"-" {way}' for way in _natural(top, bottom, tail, scale)]
    if high is None or high.value >= 0:
        start = zero if low is None or low.value < 0 else low
        ways += _natural(start, high, tail, scale)
    return " | ".join(ways) or None


def _within_reach(want: Asked) -> tuple[Bound | None, Bound | None]:
    """Bounds of as many digits as are written. Others are no bounds, or leave nothing."""
    low, high = want.low, want.high
    if low and low.value >= HUGE or high and high.value <= -HUGE:
        raise NotHeld("it has too many digits")
    low = None if low is None or low.value <= -HUGE else _rounded(low, ceil)
    high = None if high is None or high.value >= HUGE else _rounded(high, floor)
    return low, high


def _rounded(bound: Bound, to: Callable[[Fraction], int]) -> Bound:
    scale = 10**PLACES_MOST
    value = Fraction(to(bound.value * scale), scale)
    return bound if value == bound.value else Bound(value)


def _listed(step: Fraction, low: Bound, high: Bound) -> str | None:
    first, last = ceil(low.value / step), floor(high.value / step)
    found = [step * i for i in range(first, last + 1)]
    found = [number for number in found if _is_in(number, low, high)]
    return " | ".join(quoted(text_of(number)) for number in found) or None


def text_of(number: Fraction) -> str:
    """A number without an exponent. It has an end."""
    with localcontext() as context:
        context.prec = 1000
        text = f"{Decimal(number.numerator) / Decimal(number.denominator):f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


Left = tuple[Fraction, bool] | None
"""What is left of a bound behind the point, and whether it is itself left out; None: nothing."""
Tail = Callable[[Left, Left], str | None]
"""GBNF of what stands behind the first digits, between what is left of two bounds."""


def _tail(step: Fraction | None) -> tuple[Tail, int]:
    """(the tail of numbers, how many digits of a whole number it has)."""
    if step is None:
        return partial(_places, PLACES_MOST), 0
    if step == 1:
        return _whole, 0
    for k in range(1, 5):
        unit = 10**k
        if step == Fraction(1, unit):
            return partial(_places, k), 0
        if step.denominator == 1 and unit % step == 0:
            return partial(_ends, range(0, unit, int(step)), k, False), k
        scaled = step * unit
        if scaled.denominator == 1 and unit % scaled == 0 and unit / scaled <= LISTED_MOST:
            return partial(_ends, range(0, unit, int(scaled)), k, True), 0
    raise NotHeld("a grammar does not divide by it")


def _whole(low: Left, high: Left) -> str | None:
    return ""


def _ends(ends: Sequence[int], k: int, has_point: bool, low: Left, high: Left) -> str | None:
    """The last k digits of a multiple."""
    found = [end for end in ends if _is_between(Fraction(end, 10**k), low, high)]
    texts = [quoted(f"{end:0{k}d}") for end in found]
    if has_point:
        trimmed = [f"{end:0{k}d}".rstrip("0") for end in found]
        texts = [f'"." {quoted(text)} "0"{{0,{k}}}' for text in trimmed if text]
        texts += [f'( "." "0"{{1,{k}}} )?'] if "" in trimmed else []
    return f"( {' | '.join(texts)} )" if texts else None


def _is_between(number: Fraction, low: Left, high: Left) -> bool:
    return not (
        low is not None
        and (number < low[0] or low[1] and number == low[0])
        or high is not None
        and (number > high[0] or high[1] and number == high[0])
    )


def _places(most: int, low: Left, high: Left) -> str | None:
    ways = _more(low, high, most)
    behind = f'"." ( {" | ".join(ways)} )' if ways else ""
    if _may_stop(low, high):
        return f"( {behind} )?" if ways else ""
    return behind or None


def _may_stop(low: Left, high: Left) -> bool:
    return low is None and (high is None or high[0] > 0 or not high[1])


def _more(low: Left, high: Left, left: int) -> list[str]:
    """Ways to write one digit or more, of a number between what is left of two bounds."""
    if low is None and high is None and left:
        return [f"[0-9]{{1,{left}}}"]
    if low is None and high == (0, False) and left:
        return [f'"0"{{1,{left}}}']
    if low == (0, True) and high is None and left > SOME:
        return [f'"0"{{0,{left - 1}}} [1-9] [0-9]{{0,{left - 1}}}']
    if not left or high == (0, True):
        return []
    bottom = 0 if low is None else floor(low[0] * 10)
    top = 9 if high is None else floor(high[0] * 10)
    ways: dict[tuple[Left, Left], list[int]] = {}
    for digit in range(bottom, top + 1):
        ways.setdefault((_next(low, digit, True), _next(high, digit, False)), []).append(digit)
    out = []
    for (lower, higher), digits in ways.items():
        more = _more(lower, higher, left - 1)
        inner = f"( {' | '.join(more)} )" if more else ""
        if more or _may_stop(lower, higher):
            is_loose = more and _may_stop(lower, higher)
            head = _span(digits[0], digits[-1])
            out.append(f"{head} {inner}{'?' if is_loose else ''}".rstrip())
    return out


def _next(left: Left, digit: int, is_low: bool) -> Left:
    """What is left of a bound behind a digit."""
    if left is None or digit != floor(left[0] * 10):
        return None
    rest = (left[0] * 10 - digit, left[1])
    return None if is_low and rest == (0, False) else rest


def _natural(low: Bound, high: Bound | None, tail: Tail, scale: int) -> list[str]:
    """Ways to write a number that is not negative. scale: digits that the tail has."""
    unit = 10**scale
    ways = []
    if scale:  # a tail has no zeros before it where it stands alone
        for end in range(unit):
            only = (Fraction(end, unit), False)
            if _is_in(Fraction(end), low, high) and tail(only, only):
                ways.append(quoted(str(end)))
        low = max(
            Bound(low.value / unit, low.is_open),
            Bound(Fraction(1)),
            key=lambda b: (b.value, b.is_open),
        )
        high = high and Bound(high.value / unit, high.is_open)
        if high and high.value < low.value:
            return ways
    first, last = floor(low.value), None if high is None else floor(high.value)
    lower: Left = None
    if low.is_open or low.value != first:
        lower = (low.value - first, low.is_open)
    higher: Left = None if high is None else (high.value - floor(high.value), high.is_open)
    ends = (lower, higher)
    a, b = str(first), "" if last is None else str(last)
    if b and len(a) == len(b):
        return [*ways, *_path(a, b, len(a), ends, tail, True)]
    ways += _path(a, None, len(a), ends, tail, True)
    longest = len(b) - 1 if b else max(DIGITS_MOST, len(a))
    free = tail(None, None)
    if longest > len(a) and free is not None:
        ways.append(f"[1-9] [0-9]{{{len(a)},{longest - 1}}} {free}".rstrip())
    return ways + (_path(None, b, len(b), ends, tail, True) if b else [])


def _is_in(number: Fraction, low: Bound, high: Bound | None) -> bool:
    return _is_between(number, _left(low), _left(high))


def _path(
    low: str | None,
    high: str | None,
    left: int,
    ends: tuple[Left, Left],
    tail: Tail,
    is_first: bool,
) -> list[str]:
    """Ways to write `left` digits between those of two bounds (None: of no bound), and a tail."""
    if low is not None and not low.strip("0") and ends[0] is None and not is_first:
        low = None
    behind = tail(ends[0] if low is not None else None, ends[1] if high is not None else None)
    if not left:
        return [] if behind is None else [behind]
    if low is None and high is None:
        return [f"[0-9]{{{left}}} {behind}".rstrip()] if behind is not None else []
    bottom = int(low[0]) if low is not None else int(is_first and left > 1)
    top = int(high[0]) if high is not None else 9
    ways = []
    for first, last in _spans(bottom, top, low is not None, high is not None):
        lower = low[1:] if low is not None and first == bottom else None
        higher = high[1:] if high is not None and last == top else None
        inner = _path(lower, higher, left - 1, ends, tail, False)
        if inner:
            rest = inner[0] if len(inner) == 1 else f"( {' | '.join(inner)} )"
            ways.append(f"{_span(first, last)} {rest}".rstrip())
    return ways


def _span(first: int, last: int) -> str:
    return f'"{first}"' if first == last else f"[{first}-{last}]"


def _spans(bottom: int, top: int, has_low: bool, has_high: bool) -> list[tuple[int, int]]:
    """Digits from bottom to top, those of bounds apart."""
    if bottom == top:
        return [(bottom, top)]
    middle = (bottom + has_low, top - has_high)
    return [
        *([(bottom, bottom)] if has_low else []),
        *([middle] if middle[0] <= middle[1] else []),
        *([(top, top)] if has_high else []),
    ]
