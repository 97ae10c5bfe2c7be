"""What is written from the help texts, docstrings and options: docs/cli.md, docs/python-api.md, and
the options of the cache for type checkers.

python -m edgekv_lab.commands.docs  in a checkout, writes all of them
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from inspect import cleandoc
from pathlib import Path

import click

from edgekv.choice.config import KVConfig, argument_type
from edgekv.commands import main

HEAD = """# Command line

Generated from the help texts by `python -m edgekv_lab.commands.docs`; change them in the code.

A flag goes before the environment, and the environment before the default. Wrong input gives one
line on standard error and exit code 2. Ctrl-C gives 130.
"""
SHARED = {
    "Options for where weights lie": ("chat", "bench", "eval needle", "profile probe"),
    "Options for the model and its cache": ("chat", "run", "pack create", "eval needle"),
    "Options for the answer": ("chat", "run"),
    "Options of every evaluation": ("eval needle", "eval longbench", "eval ppl"),
}
"""Heading -> commands whose common options stand under it, and nowhere else."""


def page() -> str:
    """The whole page of the command line."""
    commands = dict(all_commands(click.Context(main, info_name="edgekv")))
    shared: dict[str, list[str]] = {}
    for heading, names in SHARED.items():
        common = [
            row
            for row in rows_of(commands[f"edgekv {names[0]}"])
            if all(row in rows_of(commands[f"edgekv {name}"]) for name in names)
        ]
        known = [row for rows in shared.values() for row in rows]
        shared[heading] = [row for row in common if row not in known]
    parts = [section(path, command, shared) for path, command in commands.items()]
    groups = [f"## {heading}\n\n{table(rows)}" for heading, rows in shared.items()]
    return "\n".join([HEAD, *parts, *groups, slash_section()])


def all_commands(context: click.Context) -> Iterator[tuple[str, click.Command]]:
    """(path, command) of each command of the context's group, and of groups below it."""
    group = context.command
    assert isinstance(group, click.Group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        inner = click.Context(command, info_name=name, parent=context)
        if isinstance(command, click.Group):
            yield from all_commands(inner)
        else:
            yield inner.command_path, command


def section(path: str, command: click.Command, shared: dict[str, list[str]]) -> str:
    """A command's help and the options that are its own; links to the shared ones that it has."""
    arguments = [p.metavar or p.name or "" for p in command.params if isinstance(p, click.Argument)]
    lines = [
        f"## {path}",
        "",
        cleandoc(command.help or ""),
        "",
        "    " + " ".join([path, "[options]", *arguments]),
        "",
    ]
    rows, also = rows_of(command), []
    for heading, common in shared.items():
        if all(row in rows for row in common):
            rows = [row for row in rows if row not in common]
            also.append(f"[{heading}](#{heading.lower().replace(' ', '-')})")
    if also:
        lines += [f"It also takes: {', '.join(also)}.", ""]
    return "\n".join(lines) + (f"\n{table(rows)}" if rows else "")


def table(rows: list[str]) -> str:
    head = ["| option | meaning | default | environment |", "|---|---|---|---|"]
    return "\n".join([*head, *rows]) + "\n"


def rows_of(command: click.Command) -> list[str]:
    return [option_row(p) for p in command.params if isinstance(p, click.Option) and not p.hidden]


def option_row(option: click.Option) -> str:
    flags = ", ".join(f"`{flag}`" for flag in [*option.opts, *option.secondary_opts])
    value = "" if option.is_flag else f" {values_of(option)}"
    usual = (
        option.default[0]
        if isinstance(option.default, (list, tuple)) and option.default
        else option.default
    )
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
    return "\n".join(
        [
            "## Commands inside a chat",
            "",
            "| command | meaning |",
            "|---|---|",
            *(f"| {r} |" for r in rows),
            "",
        ]
    )


ARGUMENTS = '''"""The options of `KVConfig` as `edgekv.Llama` takes them, for type checkers.

Generated from the options in `choice/config.py` by `python -m edgekv_lab.commands.docs`.
"""

from __future__ import annotations

from typing import Any, TypedDict


class CacheArguments(TypedDict, total=False):
'''


def arguments() -> str:
    """The module `edgekv.llama.cache_arguments`, whole."""
    rows = (f"    kv_{one.name}: {argument_type(one)}\n" for one in fields(KVConfig))
    return ARGUMENTS + "".join(rows)


def generated() -> dict[str, str]:
    """Texts by their paths in a checkout."""
    from edgekv_lab.commands.docs_python import page as python_page

    return {
        "docs/cli.md": page(),
        "docs/python-api.md": python_page(),
        "edgekv/llama/cache_arguments.py": arguments(),
    }


if __name__ == "__main__":
    for path, text in generated().items():
        Path(path).write_text(text, encoding="utf-8")
