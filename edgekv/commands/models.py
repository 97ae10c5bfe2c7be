"""edgekv models: the models on this computer, and whether they fit into its memory."""

from __future__ import annotations

import json
import sys
import textwrap
from dataclasses import asdict

import click

from edgekv.commands import terminal
from edgekv.commands.declare import option
from edgekv.commands.fit import CTX_DEFAULT
from edgekv.commands.overview import Overview, look_at
from edgekv.commands.report import table
from edgekv.commands.values import COUNT
from edgekv.memory.sizes import size_text

NONE = (
    "no models were found in the folders of Ollama, Hugging Face, llama.cpp, LM Studio, Jan and"
    " GPT4All; 'edgekv pull hf:USER/REPO' downloads one, and 'edgekv chat FILE' takes a GGUF file"
)
HEAD = ("model", "size", "architecture", "KV/token", "compressed", "fits", "profile")
INDENT = "  "


@click.command("models", short_help="List the models on this computer, and whether they fit.")
@option(
    "-c --ctx-size n_ctx",
    type=COUNT,
    default=CTX_DEFAULT,
    metavar="N",
    help="Context that has to fit; what a model was trained with, if that is less.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(n_ctx: int, as_json: bool) -> None:
    """List the models that lie on this computer, in the folders of Ollama, Hugging Face, llama.cpp,
    LM Studio, Jan and GPT4All, by the names that commands take.

    KV/token are bytes of the f16 cache. 'fits' is the largest share of the cache with which a
    context fits into the memory that is free now, as 'edgekv fit' plans it. Only headers are read.
    """
    from edgekv.models_found.stores import everything

    listing = look_at(list(everything()), n_ctx)
    found = listing.models
    if as_json:
        click.echo(json.dumps({"n_ctx": n_ctx, **asdict(listing)}, indent=2))
        return
    if not found:
        click.echo(NONE)
        return
    click.echo(text(found, terminal.width(sys.stdout)))
    click.echo(
        _filled(
            f"\nfits: the share of the cache with which {n_ctx:,} tokens, or as many as a model was"
            f" trained with, fit into the {size_text(listing.memory)} of {listing.device}"
            " memory that may be taken; 'edgekv fit MODEL' says more",
            terminal.width(sys.stdout),
        )
    )


def text(found: list[Overview], width: int | None) -> str:
    """A table, or where it is too wide two lines for each model; then the files that cannot be
    used. width: columns, None for no limit.
    """
    rows = [(printable(one.name), *cells(one)) for one in found if not one.why_not]
    shown = table(rows, HEAD) if rows else ""
    if width is not None and max(map(len, shown.splitlines()), default=0) > width:
        shown = "\n".join(f"{row[0]}\n{_filled(INDENT + facts(row), width)}" for row in rows)
    broken = [
        _filled(f"{printable(one.name)}: {printable(one.why_not)}", width)
        for one in found
        if one.why_not
    ]
    heading = ["cannot be used:"] if broken else []
    return "\n".join(filter(None, [shown, *heading, *broken]))


def cells(one: Overview) -> tuple[str, ...]:
    """A model's row without its name."""
    per_token = "" if one.kv_bytes_per_token is None else size_text(one.kv_bytes_per_token)
    return (
        size_text(one.size_bytes),
        printable(one.architecture),
        per_token,
        "yes" if one.compressible else "no",
        share(one),
        "yes" if one.profile else "no",
    )


def facts(row: tuple[str, ...]) -> str:
    """A model's row without its name, as a line that may be broken."""
    return "; ".join(f"{name} {cell}" for name, cell in zip(HEAD[1:], row[1:], strict=True))


def share(one: Overview) -> str:
    """'1', '0.3', or '1 as q8_0' where the model is not compressed."""
    if one.fits is None:
        return "no"
    is_other = one.fits.ratio >= 1 and one.fits.type_k != "f16"
    return f"{one.fits.ratio:g}" + f" as {one.fits.type_k}" * is_other


def printable(text: str) -> str:
    """A name without what could steer a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _filled(text: str, width: int | None) -> str:
    if width is None:
        return text
    begin = text[: len(text) - len(text.lstrip())]
    return begin.strip(" ") + textwrap.fill(
        text.strip(),
        width,
        initial_indent=begin.strip("\n"),
        subsequent_indent=INDENT,
        break_on_hyphens=False,
    )
