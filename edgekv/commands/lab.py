"""What the distribution `edgekv-lab` brings to the command line.

A table and no entry points: a checkout has no metadata of installed packages, and help names every
command without reading them.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import click

from edgekv.errors import EdgeKVError
from edgekv.version import __version__

COMMANDS = {
    "bench": "Measure speed and memory, compressed caches beside full ones.",
    "eval": "Measure what compressing the cache costs in quality.",
    "lukv": "Make a LU-KV profile: let the model answer questions and see which tokens the answers "
    "needed.",
    "evolkv": "Make an EvolKV profile: let budgets per layer evolve on a task, and print the curve "
    "on standard error.",
}
"""The click command `command` of edgekv_lab.commands.<name> -> its help where there is no lab."""


def part(module: str) -> ModuleType | None:
    """A module of the lab; None where the lab is not installed."""
    try:
        return import_module(f"edgekv_lab.{module}")
    except ModuleNotFoundError as error:
        if error.name != "edgekv_lab":
            raise
        return None


def command(name: str) -> click.Command:
    """The lab's command; without the lab one that says what to install, whatever it is told."""
    found = part(f"commands.{name}")
    if found:
        of_lab: click.Command = found.command
        return of_lab

    @click.command(
        name,
        help=COMMANDS[name],
        context_settings={"ignore_unknown_options": True},
        add_help_option=False,
    )
    @click.argument("words", nargs=-1, type=click.UNPROCESSED)
    @click.pass_context
    def missing(ctx: click.Context, words: tuple[str, ...]) -> None:
        raise EdgeKVError(
            f"'{ctx.command_path}' is in a package of its own; run: pip install "
            f"edgekv-lab=={__version__} (in a checkout: pip install ./lab)"
        )

    return missing
