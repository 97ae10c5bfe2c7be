"""edgekv profile pack and get: profiles that one person makes and others use."""

from __future__ import annotations

import click

from edgekv.commands.declare import option
from edgekv.commands.named import model_named


@click.command("pack")
@model_named("FOLDER", least=1, most=1)
def pack(words: tuple[str, ...], model: str) -> None:
    """Write a model's profiles into a folder, under names by which 'get' finds them.

    Put the folder on a disk that others read, or publish it: 'hf upload USER/REPO FOLDER'. A
    profile holds no text and no folder's name.
    """
    from edgekv.commands.load import model_path
    from edgekv.profiles import shared

    for path in shared.pack(model_path(model), words[0]):
        click.echo(path)


@click.command("get")
@model_named("FOLDER|hf:USER/REPO", least=1, most=1)
@option("--replace", is_flag=True, help="Replace profiles of the same kind that are here already.")
def get(words: tuple[str, ...], model: str, replace: bool) -> None:
    """Take a model's profiles from a folder, or from a repository of Hugging Face's, so that the
    model needs no preparation.

    Only profiles of exactly this model are taken, and they are checked first. Nothing but this
    command looks there.
    """
    from edgekv.commands.load import model_path
    from edgekv.profiles import shared

    written, kept = shared.get(model_path(model), words[0], replace)
    for path in written:
        click.echo(path)
    for path in kept:
        click.echo(f"edgekv: {path} is here already; --replace replaces it", err=True)
