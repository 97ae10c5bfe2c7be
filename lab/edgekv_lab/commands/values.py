"""What the options of edgekv bench, eval, lukv and evolkv accept."""

from __future__ import annotations

from collections.abc import Sequence

import click

from edgekv.base.cache_types import CACHE_TYPES
from edgekv.commands.declare import option

SETTING = option(
    "--setting",
    type=click.Choice(["aware", "agnostic"]),
    default="aware",
    help="aware: the question is in the prompt that is compressed; agnostic: it is asked after "
    "the text was compressed.",
)
"""Of the commands that ask questions."""

N_CTX = option(
    "-c --ctx-size n_ctx",
    type=click.IntRange(min=256),
    default=4096,
    help="Size of the context in tokens: text, question and answer have to fit.",
)


def method(ctx: click.Context, param: click.Parameter, value: str) -> str:
    """Click callback: what names a method; the model's profile, where one is needed, is looked up
    with the model. Raises BadInput.
    """
    from edgekv.methods import get

    return value if value == "auto" else get(value).name


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
