"""What the commands' options accept: click callbacks, types and limits."""

from __future__ import annotations

import math
from typing import Any

import click

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


def size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Click callback: bytes from a size such as 2GiB. Raises BadInput."""
    from edgekv.base.sizes import parse_size

    return None if value is None else parse_size(value, param.opts[0])


def gpu_layers(ctx: click.Context, param: click.Parameter, value: str) -> int:
    """Click callback: a number of layers; -1 for 'auto' and 'all'."""
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
    """Click callback: tokens to write; -1 and -2: until the end, or until the context is full."""
    if value < -2 or value == 0:
        raise click.BadParameter("give a number of tokens, or -1 for no limit", ctx, param)
    return value
