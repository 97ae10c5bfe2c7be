"""llama-cli's options for a conversation: its system message, and whether it is one."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from edgekv.commands.declare import Decorator, is_typed, llama, option
from edgekv.errors import BadInput

_TEXT = llama("-sys --system-prompt", metavar="TEXT", help="System message.")
_FILE = option(
    "-sysf --system-prompt-file", metavar="FILE", help="A text file with the system message."
)
_SWITCH = "-cnv/-no-cnv --conversation/--no-conversation"
CHATS = "run answers one prompt; for a conversation type 'edgekv chat' with the same options"
TURNS = "chat is a conversation; for one prompt type 'edgekv run', with --raw for no template"


def system_prompt(command: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that adds -sys and -sysf, and passes the system message as `system_prompt`."""

    @wraps(command)
    def call(system_prompt: str | None, system_prompt_file: str | None, **values: Any) -> Any:
        if system_prompt_file is not None:
            if system_prompt is not None and is_typed("system_prompt"):
                raise BadInput("give the system message once: -sys TEXT or -sysf FILE")
            from edgekv.documents.plain import read_document

            system_prompt = read_document(system_prompt_file, may_be_pipe=True)
        return command(system_prompt=system_prompt, **values)

    return _TEXT(_FILE(call))


def _only(wanted: bool, otherwise: str) -> Callable[..., bool | None]:
    """Click callback: the value. Raises BadInput for the other one than the command does."""

    def check(ctx: click.Context, param: click.Parameter, value: bool | None) -> bool | None:
        if value is not None and value is not wanted:
            raise BadInput(otherwise)
        return value

    return check


def _refuse(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value is not None:
        raise BadInput(TURNS)


_CONVERSATION: Decorator = click.option(
    *_SWITCH.split(),
    default=None,
    callback=_only(True, TURNS),
    expose_value=False,
    help="Ignored, as a chat is a conversation; -no-cnv is refused.",
)
_PROMPT: Decorator = click.option(
    "-p", "--prompt", "-f", "--file", callback=_refuse, expose_value=False, hidden=True
)


def CHAT(command: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that takes what says that a chat is one, and refuses a prompt."""
    return _CONVERSATION(_PROMPT(command))


RUN: Decorator = click.option(
    *_SWITCH.split(),
    default=None,
    callback=_only(False, CHATS),
    help="-no-cnv is the same as --raw; -cnv is refused.",
)
