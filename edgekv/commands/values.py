"""What the commands' options accept: click callbacks, types and limits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import click

from edgekv.base.cache_types import CACHE_TYPES

AUTO_STORES = (
    "auto stores what came nearest to the full cache when the model was prepared, else q8_0"
)
"""Of cache types that nobody named: one sentence, wherever somebody reads of it."""
SWITCH = {
    "on": "on",
    "enabled": "on",
    "true": "on",
    "1": "on",
    "off": "off",
    "disabled": "off",
    "false": "off",
    "0": "off",
    "auto": "auto",
    "-1": "auto",
}
TOKENS_MAX = 2**22
"""More than any model reads. Native code counts in 32 bits, and adds some of these up."""
THREADS_MAX = 512
"""ggml's own limit."""
INT_MAX = 2**31 - 1
COUNT = click.IntRange(1, TOKENS_MAX)
FROM_ZERO = click.IntRange(0, TOKENS_MAX)
INTEGER = click.IntRange(-INT_MAX, INT_MAX)
THREADS = click.IntRange(max=THREADS_MAX)
SHARE = click.FloatRange(0, 1)


class Finite(click.FloatRange):
    """A number in a range, and neither infinite nor no number."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is no number that can be used", param, ctx)
        return number


def ratio(ctx: click.Context, param: click.Parameter, value: str) -> float:
    """Click callback: a share of bytes to keep. Raises BadInput."""
    from edgekv.methods.budget import check_ratio

    return check_ratio(value)


def method(ctx: click.Context, param: click.Parameter, value: str) -> str:
    """Click callback: what names a method; the model's profile, where one is needed, is looked up
    with the model. Raises BadInput.
    """
    from edgekv.methods import get

    return value if value == "auto" else get(value).name


def size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Click callback: bytes from a size such as 2GiB. Raises BadInput."""
    from edgekv.base.sizes import parse_size

    return None if value is None else parse_size(value, param.opts[0])


def lengths(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    """Click callback: comma-separated token counts."""
    parts = [part.strip() for part in value.split(",")]
    counts = tuple(int(part) if part.isdecimal() and len(part) < 30 else 0 for part in parts)
    if min(counts) < 1:
        raise click.BadParameter(
            "give numbers of tokens with commas between them, such as 1500,3000", ctx, param
        )
    return counts


def split_names(text: str) -> list[str]:
    """Names with commas between them, or semicolons where a name has commas itself."""
    return [
        name.strip()
        for name in text.split(";" if ";" in text or "=" in text else ",")
        if name.strip()
    ]


def names(ctx: click.Context, param: click.Parameter, values: Sequence[str] | str) -> list[str]:
    """Click callback: names with commas between them, or semicolons where a name has commas
    itself.
    """
    return [
        name
        for text in ([values] if isinstance(values, str) else values)
        for name in split_names(text)
    ]


def cache_types(
    ctx: click.Context, param: click.Parameter, values: Sequence[str] | str
) -> list[str]:
    """Click callback: cache types with commas between them; 'none' is no type. Raises
    BadParameter.
    """
    found = [name for name in names(ctx, param, values) if name != "none"]
    for name in found:
        if name not in CACHE_TYPES:
            choices = ", ".join(CACHE_TYPES)
            raise click.BadParameter(
                f"there is no cache type '{name}'; choose one of: {choices}", ctx, param
            )
    return found


def ratios(ctx: click.Context, param: click.Parameter, values: Sequence[str] | str) -> list[float]:
    """Click callback: shares to keep, with commas between them. Raises BadInput."""
    from edgekv.methods.budget import check_ratio

    return [check_ratio(name) for name in names(ctx, param, values)]


def gpu_layers(ctx: click.Context, param: click.Parameter, value: str) -> int:
    """Click callback: a number of layers; -1 for 'auto' and 'all' (with no GPU in the build it
    changes nothing).
    """
    if value in ("auto", "all"):
        return -1
    try:
        return INTEGER(value, param, ctx)
    except click.BadParameter:
        raise click.BadParameter("give a number of layers, 'auto' or 'all'", ctx, param) from None


def switch(ctx: click.Context, param: click.Parameter, value: str) -> str:
    """Click callback: on, off or auto, in any of llama.cpp's spellings."""
    if value.lower() not in SWITCH:
        raise click.BadParameter("give on, off or auto", ctx, param)
    return SWITCH[value.lower()]


def predict(ctx: click.Context, param: click.Parameter, value: int) -> int:
    """Click callback: tokens to write; -1 (and llama.cpp's -2) until the end or until the context
    is full.
    """
    if value < -2 or value == 0:
        raise click.BadParameter("give a number of tokens, or -1 for no limit", ctx, param)
    return value
