"""How an option is declared: its default and its name in the environment stand in its help.

Options of a group are the fields of a dataclass, whose instance a command gets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import field, fields
from functools import partial, wraps
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


def llama(
    *names: str, env: str = "", help: str, prefix: str = "LLAMA_ARG_", **attributes: Any
) -> Decorator:
    """An option of llama.cpp. env: its name in the environment behind `prefix`; without it that of
    the first long name.
    """
    long = next(word for word in _words(names) if word.startswith("--")).partition("/")[0]
    env = env or long.removeprefix("--").replace("-", "_").upper()
    return option(*names, env=prefix + env, help=help, **attributes)


own = partial(llama, prefix="EDGEKV_")
"""An option of edgekv's, which has a name in the environment too."""


def declared(command: Callable[..., Any], options: Iterable[Decorator]) -> Callable[..., Any]:
    """The command with these options, the first of which stands first in its help."""
    for one in reversed([*options]):
        command = one(command)
    return command


def given_by(
    *options: Decorator, made: type | None = None, prefix: str = "", **attributes: Any
) -> Any:
    """A field that these options give. made: the field is such a dataclass, of the options of its
    fields' names behind `prefix`; without it there is one option, of the field's own name.
    attributes: of the field.
    """
    return field(metadata={"options": options, "made": (made, prefix)}, **attributes)


def option_field(*names: str, declare: Callable[..., Decorator] = option, **attributes: Any) -> Any:
    """A field that one option gives; see `option`."""
    return given_by(declare(*names, **attributes))


def llama_field(*names: str, **attributes: Any) -> Any:
    """The same; see `llama`."""
    return option_field(*names, declare=llama, **attributes)


def grouped(name: str, kind: type, options: Iterable[Decorator] = ()) -> Decorator:
    """A decorator that adds the options of a dataclass' fields to a command, and then `options`. It
    passes their values as `name`, an instance of the class; other fields keep their defaults.
    """
    fields_own = [option for one in fields(kind) for option in one.metadata.get("options", ())]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def call(**values: Any) -> Any:
            return command(**{name: _made(kind, "", values)}, **values)

        return declared(call, [*fields_own, *options])

    return decorate


def _made(kind: type, prefix: str, values: dict[str, Any]) -> Any:
    """A dataclass of what is its own among a command's values, which is taken out of them."""
    given = {}
    for one in fields(kind):
        inner, inner_prefix = one.metadata.get("made", (None, ""))
        if inner:
            given[one.name] = _made(inner, inner_prefix, values)
        elif prefix + one.name in values:
            given[one.name] = values.pop(prefix + one.name)
    return kind(**given)


def is_typed(name: str) -> bool:
    """Whether an option of the command that runs stands on the command line."""
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def _words(names: tuple[str, ...]) -> list[str]:
    return [word for name in names for word in ([name] if name[:2] == " /" else name.split())]
