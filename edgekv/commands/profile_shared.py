"""edgekv profile pack and get: profiles go to others who have the same model file."""

from __future__ import annotations

import os
from pathlib import Path

import click

from edgekv.commands import terminal
from edgekv.commands.declare import option
from edgekv.commands.named import model_named, several_named
from edgekv.errors import BadInput

HUB = "hf:"


@click.command("pack")
@several_named
@option("-o --output", required=True, metavar="FOLDER", help="The folder to write them into.")
def pack(named: list[str], output: str) -> None:
    """Write the profiles of models into a folder that others can use, named by the models'
    fingerprints.

    To share them on Hugging Face, upload the folder: 'hf upload USER/REPO FOLDER'.
    """
    from edgekv.base.files import expanded
    from edgekv.commands.load import model_path
    from edgekv.profiles import shared

    if not named:
        raise BadInput("whose profiles? Name the models first")
    if output.startswith(HUB):
        raise BadInput(
            f"pack into a folder, then upload it: 'hf upload {output.removeprefix(HUB)} FOLDER'"
        )
    for path in shared.pack([model_path(name) for name in named], expanded(output)):
        click.echo(path)


@click.command("get")
@model_named("FOLDER|hf:USER/REPO", least=1, most=1)
@option("--replace", is_flag=True, help="Replace profiles that are there already.")
def get(words: tuple[str, ...], model: str, replace: bool) -> None:
    """Take over a model's profiles from a folder or from a repository of Hugging Face's, where
    'edgekv profile pack' put them.

    A profile is checked before it is kept: that it is of this very model by its shape and its
    weights, and that its values are possible. A repository is asked and downloaded from only here.
    """
    from edgekv.commands.load import model_path
    from edgekv.profiles import identify, shared

    (source,), identity = words, identify(model_path(model))
    if source.startswith(HUB):
        from edgekv.models.hub.models import fetch

        paths = fetch(
            source,
            lambda there: shared.names_for(identity, there),
            shared.SIZE_MAX,
            terminal.status,
        )
    else:
        paths = [Path(source, name) for name in shared.names_for(identity, _names_in(source))]
    if not paths:
        raise BadInput(f"{source} has no profile of this model ({identity.digest})")
    for path in shared.take(paths, identity, replace):
        click.echo(path)


def _names_in(folder: str) -> list[str]:
    """The names of what lies in a folder. Raises BadInput if it cannot be read."""
    try:
        return os.listdir(folder)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise BadInput(
            f"'{folder}' cannot be read ({why}); name a folder, or hf:USER/REPO"
        ) from None
