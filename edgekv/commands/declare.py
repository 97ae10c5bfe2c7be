"""How an option is declared: its default and its name in the environment stand in its help."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import click
from click.core import ParameterSource

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def option(*names: str, env: str | None = None, help: str, **attributes: Any) -> Decorator:
    """An option whose default and environment name stand in its help. names: "-c", "--ctx-size",
    or "-c --ctx-size" in one; " /-nr" is a name of no alone, as click writes it. A whole number is
    N in the help where no metavar is given.
    """
    if isinstance(attributes.get("type"), click.IntRange):
        attributes.setdefault("metavar", "N")
    return click.option(
        *_words(names), envvar=env, help=help, show_default=True, show_envvar=True, **attributes
    )


def llama(*names: str, env: str = "", help: str, **attributes: Any) -> Decorator:
    """An option of llama.cpp. env: its name in the environment behind LLAMA_ARG_; without it that
    of the first long name.
    """
    long = next(word for word in _words(names) if word.startswith("--")).partition("/")[0]
    env = env or long.removeprefix("--").replace("-", "_").upper()
    return option(*names, env=f"LLAMA_ARG_{env}", help=help, **attributes)


def declared(command: Callable[..., Any], options: Iterable[Decorator]) -> Callable[..., Any]:
    """The command with these options, the first of which stands first in its help."""
    for one in reversed([*options]):
        command = one(command)
    return command


def is_typed(name: str) -> bool:
    """Whether an option of the command that runs stands on the command line."""
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def _words(names: tuple[str, ...]) -> list[str]:
    return [word for name in names for word in ([name] if name[:2] == " /" else name.split())]
