"""docs/cli.md, written from the commands' own help: `python -m edgekv.commands.docs > docs/cli.md`."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import cleandoc

import click

from edgekv.commands import main

HEAD = """# Command line

Generated from the help texts by `python -m edgekv.commands.docs > docs/cli.md`; change it there.

A flag goes before the environment, the environment before the default. Wrong input gives one line on standard error
and exit code 2; Ctrl-C gives 130.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *sections(click.Context(main, info_name="edgekv")), slash_section()])


def sections(context: click.Context) -> Iterator[str]:
    """One section for each command of the context's group, and of groups below it."""
    group = context.command
    assert isinstance(group, click.Group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        inner = click.Context(command, info_name=name, parent=context)
        if isinstance(command, click.Group):
            yield from sections(inner)
        else:
            yield section(inner.command_path, command)


def section(path: str, command: click.Command) -> str:
    arguments = [p.metavar or p.name or "" for p in command.params if isinstance(p, click.Argument)]
    lines = [f"## {path}", "", cleandoc(command.help or ""), "", "    " + " ".join([path, "[options]", *arguments]), "",
             "| option | meaning | default | environment |", "|---|---|---|---|"]
    lines += [option_row(p) for p in command.params if isinstance(p, click.Option)]
    return "\n".join(lines) + "\n"


def option_row(option: click.Option) -> str:
    flags = ", ".join(f"`{flag}`" for flag in [*option.opts, *option.secondary_opts])
    value = "" if option.is_flag else f" {values_of(option)}"
    usual = option.default[0] if isinstance(option.default, (list, tuple)) and option.default else option.default
    has_default = isinstance(usual, (str, int, float)) and not option.is_flag
    default = f"`{usual}`" if has_default else ""
    environment = f"`{option.envvar}`" if option.envvar else ""
    cells = [flags + value, option.help or "", default, environment]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def values_of(option: click.Option) -> str:
    """What stands behind an option."""
    if isinstance(option.type, click.Choice):
        return " ".join(option.type.choices)
    return option.metavar or ""


def slash_section() -> str:
    from edgekv.commands.slash import COMMANDS as slash_commands
    from edgekv.commands.slash import described

    rows = [" | ".join(described(command)) for command in slash_commands.values()]
    return "\n".join(["## Commands inside a chat", "", "| command | meaning |", "|---|---|", *(f"| {r} |" for r in rows), ""])


if __name__ == "__main__":
    print(page(), end="")
