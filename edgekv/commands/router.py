"""`edgekv serve` without a model: options about models that come and go, and the run."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from dataclasses import fields
from typing import Any

import click

from edgekv.commands.declare import is_typed
from edgekv.commands.declare import llama as _llama
from edgekv.commands.declare import option as _option
from edgekv.commands.declare import own as _own
from edgekv.commands.values import size
from edgekv.errors import BadInput
from edgekv.serve.options import ServeOptions
from edgekv.serve.router.options import RouterOptions

TERMINATED = 128 + signal.SIGTERM
"""Exit code after SIGTERM."""
OPEN = "whoever reaches {} may use this model: give an --api-key, or --host 127.0.0.1"
USUAL = RouterOptions()
_WORDS = "edgekv.words"


class Command(click.Command):
    """Keeps the words of its line, which the models' own servers get."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_WORDS] = tuple(args)
        return super().parse_args(ctx, args)


def _folder(ctx: click.Context, param: click.Parameter, path: str | None) -> str | None:
    """Click callback: a folder that exists. Raises BadInput."""
    if path is not None and not os.path.isdir(os.path.expanduser(path)):
        raise BadInput(f"'{path}' is no folder; name one that has GGUF files in it")
    return path and os.path.abspath(os.path.expanduser(path))


def _seconds(ctx: click.Context, param: click.Parameter, text: str) -> float:
    """Click callback: a duration. Raises BadInput."""
    from edgekv.serve.keep_alive import seconds

    return seconds(text)


OPTIONS = (
    _llama(
        "--models-dir",
        metavar="FOLDER",
        callback=_folder,
        help="A folder of models, besides those that 'edgekv models' finds.",
    ),
    _llama(
        "--models-max",
        type=click.IntRange(0),
        default=USUAL.models_max,
        help="Models that are loaded at a time at most; 0: any number. The one used longest ago"
        " leaves.",
    ),
    _own(
        "--models-memory",
        metavar="SIZE",
        callback=size,
        help="Memory that loaded models may take; without it a model is loaded if its files fit"
        " into what is free.",
    ),
    _llama(
        "--models-autoload/--no-models-autoload",
        default=USUAL.models_autoload,
        help="Load a model when a request names it.",
    ),
    _option(
        "--keep-alive",
        env="OLLAMA_KEEP_ALIVE",
        default="5m",
        metavar="TIME",
        callback=_seconds,
        help="How long a model stays without a request, such as 30s or 1h; -1: always.",
    ),
    _own(
        "--allow-pull",
        is_flag=True,
        help="Let clients download models of Hugging Face's: /api/pull.",
    ),
)
BEHIND = click.option("--behind-router", is_flag=True, hidden=True)
"""The server is a router's child: it ends with its input, and the router's options are not its."""


def check_one() -> None:
    """Raises BadInput for options that a server of one model has no use for."""
    for one in fields(RouterOptions):
        if is_typed(one.name):
            option = f"--{one.name.replace('_', '-')}"
            raise BadInput(f"{option} is for a server of many models: leave it out, or the model")


def run(options: ServeOptions, models: RouterOptions, verbose: bool) -> None:
    """Serve all models until Ctrl-C."""
    from edgekv.serve.listening import listen
    from edgekv.serve.router.run import RouterServer

    if options.packs or options.slot_save_path:
        raise BadInput("packs and slots belong to one model: name it, or leave them out")
    words = click.get_current_context().meta[_WORDS]
    with listen(options.host, options.port) as listening:
        server = RouterServer(options, models, words, verbose)
        end_in_order()
        say_where("all models", options, listening)
        server.run([listening])


def say_where(name: str, options: ServeOptions, listening: socket.socket) -> None:
    """Where the server is, and who may use it."""
    from edgekv.serve.gate import is_loopback

    if not (is_loopback(options.host) or options.api_keys or options.file_keys):
        click.echo(f"edgekv: {OPEN.format(options.host)}", err=True)
    host, port = listening.getsockname()[:2]
    place = f"[{host}]" if ":" in host else host
    click.echo(f"edgekv: {name} at http://{place}:{port}", err=True)


def end_in_order(*_: Any) -> None:
    """SIGTERM is as Ctrl-C from now on."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))


def end_with_input() -> None:
    """SIGTERM when the router closes this process' input, or has ended."""

    def wait() -> None:
        while os.read(0, 1):  # a buffered reader would hold a lock at the end
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="edgekv-router", daemon=True).start()
