"""The command line: one file per command, loaded when it is asked for, so that help is quick.

This file holds the group and the one place where errors become a line and an exit code: 2 for
anything the user can put right, 130 after Ctrl-C.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, NoReturn

import click

from edgekv.commands import lab
from edgekv.errors import Cancelled, EdgeKVError
from edgekv.version import __version__

COMMANDS = (
    "chat",
    "run",
    "pack",
    "look",
    "serve",
    "fit",
    "bench",
    "info",
    "models",
    "pull",
    "methods",
    "eval",
    "profile",
)
"""Each is the click command `command` of edgekv.commands.<name>, or the lab's."""

ALIASES = {"list": "models", "ls": "models", "show": "info"}
"""Ollama's words for commands."""
INSTEAD = {
    "ps": "nothing runs behind your back; 'edgekv serve' lists what it has loaded at /api/ps",
    "stop": (
        "nothing runs behind your back; Ctrl-C ends a chat or a server, and a server of many models"
        " unloads one at /models/unload"
    ),
    "launch": "examples/agent.md shows how coding agents use a server of 'edgekv serve'",
    "signin": "there are no accounts here: models are files on this computer",
    "signout": "there are no accounts here: models are files on this computer",
    "rm": "edgekv has no models of its own: delete the file, which 'edgekv models --json' names",
    "cp": "edgekv has no models of its own: copy the file, which 'edgekv models --json' names",
    "create": (
        "GGUF files are taken as they are: -sys gives a chat its system message, and 'edgekv pack'"
        " its documents"
    ),
    "push": "'hf upload USER/REPO FILE' shares a model on Hugging Face",
    "version": "'edgekv --version' prints it",
}
"""What there is for Ollama's other words."""
SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


class Group(click.Group):
    """Loads commands lazily and turns errors into one line on standard error."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        name = ALIASES.get(name, name)
        if name not in COMMANDS:
            return None
        if name in lab.COMMANDS:
            return lab.command(name)
        found: click.Command = import_module(f"edgekv.commands.{name}").command
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args == ["help"]:
            click.echo(ctx.get_help())
            ctx.exit()
        if args[0] == "help":
            args = [args[1], *ctx.help_option_names[:1]]
        if args[0] in INSTEAD:
            raise EdgeKVError(f"there is no command '{args[0]}'; {INSTEAD[args[0]]}")
        return super().resolve_command(ctx, args)

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        run: Callable[..., Any] = super().main
        if not standalone_mode:
            return run(*args, standalone_mode=False, **extra)
        _prepare_streams()
        try:
            result = run(*args, standalone_mode=False, **extra)
            code = result if isinstance(result, int) else 0
            sys.stdout.flush()
        except (click.Abort, KeyboardInterrupt, Cancelled):
            code = 130
        except EdgeKVError as error:
            fail(str(error))
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            sys.exit(2)
        except click.ClickException as error:
            fail(_one_line(error))
        except OSError as error:
            if error.errno not in UNWRITABLE or error.filename is not None:
                raise
            _give_up_output()
            fail(f"the output cannot be written: {error.strerror}")
        sys.exit(code)


UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What happens to standard output on a full disk."""


def _give_up_output() -> None:
    """Python would try to write the rest once more when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def fail(message: str) -> NoReturn:
    """Ends the program with one line on standard error and exit code 2."""
    click.echo(f"edgekv: {message}", err=True)
    sys.exit(2)


def _one_line(error: click.ClickException) -> str:
    """Click's message, with where to look things up if the command line was wrong."""
    message = " ".join(error.format_message().split()).rstrip(".")
    context = getattr(error, "ctx", None)
    return f"{message}; see '{context.command_path} --help'" if context else message


def _prepare_streams() -> None:
    """Bytes that are no text come in, and characters a terminal does not have go out, as
    replacement marks.

    What is piped in is UTF-8 whatever the locale says. A closed stream becomes an empty one.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))
        if hasattr(getattr(sys, name), "reconfigure"):
            getattr(sys, name).reconfigure(errors="replace")
    if hasattr(sys.stdin, "reconfigure") and not sys.stdin.isatty():
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")


@click.group(cls=Group, context_settings=SETTINGS, no_args_is_help=True)
@click.version_option(__version__, prog_name="edgekv")
def main() -> None:
    """Run any GGUF model with a KV cache that is physically a fraction of its full size."""
