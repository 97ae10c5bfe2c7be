"""edgekv serve: one model for many clients, over HTTP."""

from __future__ import annotations

import signal
import sys
from dataclasses import replace
from typing import Any

import click

from edgekv.commands.declare import Decorator
from edgekv.commands.declare import llama as _llama
from edgekv.commands.declare import option as _option
from edgekv.commands.options import (
    EngineOptions,
    SamplingOptions,
    engine_options,
    sampling_options,
)
from edgekv.commands.text import read_document
from edgekv.commands.values import size
from edgekv.errors import BadInput

REASONING = ("auto", "none", "deepseek")
MIB_MOST = 2**40
TERMINATED = 128 + signal.SIGTERM
"""Exit code after SIGTERM."""
NO_TEMPLATE = "this model has no chat template: chats are written as ChatML"

OPTIONS: tuple[Decorator, ...] = (
    _llama("--host", env="HOST", default="127.0.0.1", metavar="NAME", help="Address to listen on."),
    _llama(
        "--port",
        env="PORT",
        type=click.IntRange(0, 65535),
        default=8080,
        metavar="N",
        help="Port to listen on; 0: a free one.",
    ),
    _option(
        "--api-key",
        env="LLAMA_API_KEY",
        metavar="KEY",
        help="Keys that clients may give, with commas between them; without it none is asked for.",
    ),
    _option(
        "--api-key-file",
        env=None,
        metavar="FILE",
        help="A file with such keys, one on each line.",
    ),
    _llama(
        "-a",
        "--alias",
        env="ALIAS",
        metavar="NAME",
        help="The model's name in answers; without it that of its file.",
    ),
    _option(
        "--cors-origin",
        "cors_origins",
        env="EDGEKV_CORS_ORIGIN",
        multiple=True,
        metavar="ORIGIN",
        help="Let web pages of this origin ask, such as https://example.org; again for more.",
    ),
    _llama(
        "-np",
        "--parallel",
        env="N_PARALLEL",
        type=click.IntRange(1, 256),
        default=4,
        metavar="N",
        help="Answers that are written in turns.",
    ),
    _llama(
        "-cram",
        "--cache-ram",
        env="CACHE_RAM",
        type=click.IntRange(-1, MIB_MOST),
        metavar="MIB",
        help="Memory in MiB for conversations that wait; 0: none, -1: no limit; without it 8192,"
        " or half of what is free.",
    ),
    _option(
        "--cache-disk",
        env="EDGEKV_CACHE_DISK",
        metavar="FOLDER",
        help="Where conversations go that do not fit; a later start finds them.",
    ),
    _option(
        "--cache-disk-size",
        env="EDGEKV_CACHE_DISK_SIZE",
        metavar="SIZE",
        callback=size,
        help="Size of that folder at most; without it 16GiB.",
    ),
    _option(
        "--max-queue",
        env="EDGEKV_MAX_QUEUE",
        type=click.IntRange(0, 65536),
        default=64,
        metavar="N",
        help="Requests that may wait; more get status 503.",
    ),
    _option(
        "--max-request",
        env="EDGEKV_MAX_REQUEST",
        default="64MiB",
        metavar="SIZE",
        callback=size,
        help="Size of a request's body at most.",
    ),
    _llama(
        "--metrics",
        env="ENDPOINT_METRICS",
        is_flag=True,
        help="Give sums for Prometheus at /metrics.",
    ),
    _llama(
        "--slots/--no-slots",
        env="ENDPOINT_SLOTS",
        default=True,
        help="Show at /slots which answers are written.",
    ),
    _llama(
        "--chat-template-file",
        env="CHAT_TEMPLATE_FILE",
        metavar="FILE",
        help="A chat template (Jinja) in the place of the model's.",
    ),
    _llama(
        "--reasoning-format",
        env="REASONING_FORMAT",
        type=click.Choice(REASONING),
        default="auto",
        help="Where thoughts go: apart as reasoning_content, or with 'none' into the text.",
    ),
)


def serve_options(command: Any) -> Any:
    for option in reversed(OPTIONS):
        command = option(command)
    return command


@click.command("serve", short_help="Serve a model to programs, over HTTP.")
@engine_options
@sampling_options
@serve_options
def command(engine: EngineOptions, sampling: SamplingOptions, **given: Any) -> None:
    """Serve a model over HTTP, with OpenAI's and Anthropic's protocols, as llama-server does.

    Paths, fields and options are llama-server's. The sampling options hold where a request says
    nothing. Ctrl-C ends it.
    """
    try:
        from edgekv.serve.run import Server, listen
    except ImportError as error:
        raise BadInput(
            f"edgekv serve needs more packages ({error.name} is missing):"
            " pip install 'edgekv[server]'"
        ) from None
    from edgekv.commands import load
    from edgekv.serve.options import ServeOptions
    from edgekv.serve.sampling import Sampling

    template = given.pop("chat_template_file")
    options = ServeOptions(
        api_keys=keys(given.pop("api_key"), given.pop("api_key_file")),
        cors_origins=tuple(given.pop("cors_origins")),
        alias=given.pop("alias") or "",
        chat_template=read_document(template) if template else "",
        max_tokens=sampling.predict if sampling.predict > 0 else None,
        cache_ram=ram_of(given.pop("cache_ram")),
        **given,
    )
    with listen(options.host, options.port) as listening, load.load_llama(engine) as llm:
        usual = Sampling(
            sampling.temp,
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
            repeat_penalty=sampling.repeat_penalty,
            seed=engine.seed if engine.seed >= 0 else None,
            logit_bias=(
                dict.fromkeys(load.end_tokens(llm), float("-inf")) if sampling.ignore_eos else {}
            ),
        )

        def say() -> None:
            name, port = listening.getsockname()[:2]
            place = f"[{name}]" if ":" in name else name
            click.echo(f"edgekv: {server.service.model} at http://{place}:{port}", err=True)

        server = Server(llm, replace(options, sampling=usual), engine.verbose, say)
        if server.service.template.is_fallback:
            click.echo(f"edgekv: {NO_TEMPLATE}", err=True)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # in order, as after Ctrl-C
        server.run([listening])


def ram_of(mib: int | None) -> int | None:
    """Bytes of `--cache-ram`."""
    return None if mib is None else (MIB_MOST if mib < 0 else mib) * 2**20


def keys(given: str | None, file: str | None) -> tuple[str, ...]:
    """API keys. Raises BadInput for an empty one, which would let everybody in, and for a file
    without any.
    """
    found = [] if given is None else [key.strip() for key in given.split(",")]
    if not all(found):
        raise BadInput("an API key is empty; give another --api-key")
    if file is not None:
        lines = [line.strip() for line in read_document(file).splitlines()]
        found += filter(None, lines)
        if not any(lines):
            raise BadInput(f"'{file}' holds no API key; write one on each line")
    return tuple(found)
