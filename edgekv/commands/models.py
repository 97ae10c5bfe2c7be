"""edgekv models: the models that are on this computer already, and what each would take."""

from __future__ import annotations

import json
import sys
import textwrap

import click

from edgekv.base.sizes import size_text
from edgekv.base.text import one_line
from edgekv.commands import terminal
from edgekv.commands.declare import option
from edgekv.commands.fit import CTX_DEFAULT, margin
from edgekv.commands.overview import ListedModel, Machine, entries
from edgekv.commands.report import table
from edgekv.commands.values import COUNT
from edgekv.models.found import remembered

NONE = (
    "no model was found; 'edgekv pull USER/REPO' downloads one of Hugging Face's, 'edgekv models"
    " FOLDER' looks into a folder, or give the path of a GGUF file to any command"
)
HEAD = ("name", "size", "architecture", "KV/token", "compressible", "fits", "profile")


@click.command(
    "models", short_help="List the models on this computer, and whether they fit; also 'list'."
)
@option(
    "-c --ctx-size",
    type=COUNT,
    help=f"Context that shall fit; without it {CTX_DEFAULT} or what a model was trained with.",
)
@option(
    "--margin margin_bytes",
    default="1GiB",
    metavar="SIZE",
    callback=margin,
    help="Memory to leave alone.",
)
@click.argument("folders", nargs=-1, metavar="[FOLDER...]")
@option(
    "--forget",
    multiple=True,
    metavar="PATH",
    help="Forget a folder that was named here, or a model file that was opened.",
)
@option("--json as_json", is_flag=True, help="Print one JSON object.")
def command(
    ctx_size: int | None,
    margin_bytes: int,
    folders: tuple[str, ...],
    forget: tuple[str, ...],
    as_json: bool,
) -> None:
    """List the models that Ollama, LM Studio, GPT4All, Jan, llama.cpp and Hugging Face's cache have
    on this computer, those in a FOLDER that was named here once, and those that were opened by
    their path. Any command takes their names; 'edgekv list' and 'edgekv ls' are the same.

    KV/token is what a token takes in a full f16 cache. "fits" says at which --kv-ratio the context
    fits into the memory that is free now; 'edgekv fit' says more. "profile" says whether the model
    was prepared. Headers are read, weights are not. What was found out of a file is remembered.
    """
    if forget:
        remembered.forget(forget)
    if folders:
        remembered.add_folders(folders)
    room = Machine.here(margin_bytes)
    with terminal.busy("looking for models") as say:
        found = entries(room, ctx_size, lambda name: say(one_line(f"reading {name}")))
    if as_json:
        head = {"device": room.name, "memory": room.n_bytes}
        click.echo(json.dumps({**head, "models": [one.record() for one in found]}, indent=2))
    else:
        click.echo(text(found, terminal.width(sys.stdout)))


def text(found: list[ListedModel], width: int | None) -> str:
    """For people. width: columns of the terminal, None for no limit."""
    if not found:
        return "\n".join(wrapped(NONE, width))
    usable = [one for one in found if not one.why_not]
    others = [one for one in found if one.why_not]
    parts = [fitted([cells(one) for one in usable], width)] if usable else []
    if others:
        parts.append("\n".join(["cannot be run:", *(x for o in others for x in refusal(o, width))]))
    return "\n\n".join(parts)


def cells(one: ListedModel) -> list[str]:
    """A row of the table."""
    fits = f"at {one.ratio:g}" if one.ratio and one.ratio < 1 else "in full"
    if one.fits and one.ratio == 1 and one.cache_type != "f16":
        fits += f" as {one.cache_type}"
    return [
        one_line(one.name),
        size_text(one.size),
        one_line(one.arch),
        size_text(one.kv_bytes_per_token),
        "yes" if one.compressible else "no",
        f"{one.n_ctx:,} {fits}" if one.fits else f"{one.n_ctx:,} do not",
        "made" if one.profile else "none" if one.compressible else "-",
    ]


def fitted(rows: list[list[str]], width: int | None) -> str:
    """A table, or where it is too wide the names on lines of their own."""
    whole = table(rows, HEAD)
    if width is None or max(map(len, whole.splitlines())) <= width:
        return whole
    lines = []
    for name, *values in rows:
        told = [f"{head} {value}" for head, value in zip(HEAD[2:], values[1:], strict=True)]
        lines += [name, *wrapped("; ".join([values[0], *told]), width, "    ")]
    return "\n".join(lines)


def refusal(one: ListedModel, width: int | None) -> list[str]:
    """A model that cannot be run, and why."""
    return [f"  {one_line(one.name)}", *wrapped(one_line(one.why_not), width, "    ")]


def wrapped(line: str, width: int | None, indent: str = "") -> list[str]:
    """Lines of at most `width` columns; a word that is longer stays whole."""
    if width is None:
        return [indent + line]
    room = max(width, len(indent) + 20)
    how = textwrap.TextWrapper(room, initial_indent=indent, subsequent_indent=indent)
    how.break_long_words = how.break_on_hyphens = False
    return how.wrap(line)
