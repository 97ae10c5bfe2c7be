"""`edgekv-lab NAME`: the experiments behind docs/results, a module for each. They are for whoever
works on edgekv, and most want a checkout.
"""

from __future__ import annotations

from importlib import import_module, util
from pathlib import Path

import click

from edgekv.commands import SETTINGS, Group
from edgekv.errors import EdgeKVError
from edgekv.version import __version__

NAMES = (
    "agents",
    "archive-edits",
    "archive-limited",
    "busy",
    "clients",
    "dialogue",
    "drafts",
    "engine",
    "few-tokens",
    "first-word",
    "fit",
    "hybrids",
    "page",
    "prefill",
    "products",
    "quality",
    "recall",
    "recall-speed",
    "rivals",
    "same-answer",
    "second-turn",
    "serve",
    "share",
    "small-memory",
    "soak",
    "stalls",
    "switches",
)
"""Each is the click command `command` of a module beside this one."""


class Experiments(Group):
    """Loads an experiment when it is asked for; help reads no more than the first lines of each."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(NAMES)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in NAMES:
            return None
        try:
            found: click.Command = import_module(module(name)).command
        except ModuleNotFoundError as error:
            if str(error.name).startswith("edgekv"):
                raise
            raise EdgeKVError(
                f"'{name}' needs a package that is not here; run: pip install {error.name}"
            ) from None
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Experiments"):
            formatter.write_dl([(name, about(name)) for name in NAMES])


def module(name: str) -> str:
    return f"{__package__}.{name.replace('-', '_')}"


def about(name: str) -> str:
    """The first paragraph of an experiment's docstring."""
    found = util.find_spec(module(name))
    assert found and found.origin
    text = Path(found.origin).read_text(encoding="utf-8")
    return " ".join(text.split('"""')[1].split("\n\n")[0].split())


@click.group(cls=Experiments, context_settings=SETTINGS, no_args_is_help=True)
@click.version_option(__version__, prog_name="edgekv-lab")
def main() -> None:
    """Measure edgekv: the experiments behind docs/results. Tables go to standard output, progress
    to standard error; nothing passes or fails."""
