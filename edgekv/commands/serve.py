"""edgekv serve: one model for many clients, over HTTP."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from edgekv.base.files import expanded
from edgekv.commands import embedding as embedding_
from edgekv.commands import llama_server, router
from edgekv.commands.declare import Decorator, grouped
from edgekv.commands.declare import llama as _llama
from edgekv.commands.declare import option as _option
from edgekv.commands.declare import own as _own
from edgekv.commands.embedding import EmbeddingOptions
from edgekv.commands.later import WHAT, Later
from edgekv.commands.options import EngineOptions, SamplingOptions, drafts_options, engine_and_words
from edgekv.commands.report import recall_line
from edgekv.commands.values import size
from edgekv.documents.plain import read_document
from edgekv.errors import BadInput
from edgekv.serve.options import REASONING, THINKS, ServeOptions
from edgekv.serve.router.options import RouterOptions

if TYPE_CHECKING:
    from edgekv import Llama
    from edgekv.serve.run import Server

MIB_MOST = 2**40
NO_TEMPLATE = "this model has no chat template: chats are written as ChatML"
USUAL = ServeOptions()


def _ram(ctx: click.Context, param: click.Parameter, mib: int | None) -> int | None:
    """Click callback: bytes of `--cache-ram`."""
    return None if mib is None else (MIB_MOST if mib < 0 else mib) * 2**20


def _keys(ctx: click.Context, param: click.Parameter, given: str | None) -> tuple[str, ...]:
    """Click callback: API keys. Raises BadInput for an empty one, which would let everybody in."""
    keys = () if given is None else tuple(key.strip() for key in given.split(","))
    if not all(keys):
        raise BadInput("an API key is empty; give another --api-key")
    return keys


def _keys_of(ctx: click.Context, param: click.Parameter, file: str | None) -> tuple[str, ...]:
    """Click callback: API keys of a file. Raises BadInput for one without any."""
    lines = [] if file is None else [line.strip() for line in read_document(file).splitlines()]
    keys = tuple(filter(None, lines))
    if file is not None and not keys:
        raise BadInput(f"'{file}' holds no API key; write one on each line")
    return keys


def _origins(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    """Click callback: origins, with commas between those of one option."""
    return tuple(one.strip() for some in given for one in some.split(",") if one.strip())


def _text(ctx: click.Context, param: click.Parameter, file: str | None) -> str:
    """Click callback: the text of a file, or that of --chat-template. Raises BadInput."""
    return read_document(file) if file else llama_server.given_template(ctx)


def _folder(ctx: click.Context, param: click.Parameter, path: str | None) -> str | None:
    """Click callback: a folder that exists. Raises BadInput."""
    if path is None or (found := expanded(path)).is_dir():
        return path and str(found)
    raise BadInput(f"'{path}' is no folder; make it, or give another {param.opts[0]}")


def _pattern(ctx: click.Context, param: click.Parameter, text: str | None) -> str | None:
    """Click callback: a regular expression. Raises BadInput."""
    if text is not None:
        with _needs_packages():
            from edgekv.serve.pattern import Pattern
        Pattern(text)
    return text


@contextmanager
def _needs_packages() -> Iterator[None]:
    """A `with` block that imports what the server is made of. Raises BadInput."""
    try:
        yield
    except ImportError as error:
        raise BadInput(
            f"edgekv serve needs more packages ({error.name} is missing):"
            " pip install 'edgekv[server]'"
        ) from None


OPTIONS: tuple[Decorator, ...] = (
    *llama_server.OPTIONS,
    _llama("--host", default=USUAL.host, metavar="NAME", help="Address to listen on."),
    _llama(
        "--port",
        type=click.IntRange(0, 65535),
        default=USUAL.port,
        help="Port to listen on; 0: a free one.",
    ),
    _option(
        "--api-key api_keys",
        env="LLAMA_API_KEY",
        metavar="KEY",
        callback=_keys,
        help="Keys that clients may give, with commas between them; without it none is asked for.",
    ),
    _option(
        "--api-key-file file_keys",
        metavar="FILE",
        callback=_keys_of,
        help="A file with such keys, one on each line.",
    ),
    _llama(
        "-a",
        "--alias",
        metavar="NAME,...",
        help="The model's names: the first one by its letters stands in answers. Without it the"
        " name of its file.",
    ),
    _llama("--tags", metavar="WORD,...", help="Words that the list of models has with the model."),
    _own(
        "--cors-origin --cors-origins",
        "cors_origins",
        multiple=True,
        metavar="ORIGIN,...",
        callback=_origins,
        help="Let web pages of this origin ask, such as https://example.org; 'localhost': those of"
        " this machine, * all; again for more.",
    ),
    _llama(
        "--ui/--no-ui page --webui/--no-webui", default=USUAL.page, help="Have a page to chat at /."
    ),
    _own(
        "--allow-host",
        "allow_hosts",
        multiple=True,
        metavar="NAME",
        help="Answer requests to this name of the server, such as chat.example.org; again for more,"
        " * for all.",
    ),
    _llama(
        "-np",
        "--parallel",
        env="N_PARALLEL",
        type=click.IntRange(1, 256),
        default=USUAL.parallel,
        help="Answers under way at once.",
    ),
    _llama(
        "-cb/-nocb",
        "--cont-batching/--no-cont-batching",
        default=USUAL.cont_batching,
        help="Write answers in one pass over the weights even where their last bits may change;"
        " without it only where they cannot; -nocb: in turns.",
    ),
    _llama(
        "-cram",
        "--cache-ram",
        type=click.IntRange(-1, MIB_MOST),
        metavar="MIB",
        callback=_ram,
        help="Memory in MiB for conversations that wait; 0: none, -1: no limit; without it 8192,"
        " or half of what is free.",
    ),
    _own(
        "--cache-disk",
        metavar="FOLDER",
        help="Where conversations go that do not fit; a later start finds them.",
    ),
    _own(
        "--cache-disk-size",
        metavar="SIZE",
        callback=size,
        help="Size of that folder at most, and of the archives of conversations in memory; without"
        " it 16GiB.",
    ),
    _own(
        "--max-queue",
        type=click.IntRange(0, 65536),
        default=USUAL.max_queue,
        help="Requests that may wait; more get status 503.",
    ),
    _own(
        "--max-request",
        default=f"{USUAL.max_request // 2**20}MiB",
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
        default=USUAL.slots,
        help="Show at /slots which answers are written.",
    ),
    _option(
        "--pack",
        "packs",
        multiple=True,
        metavar="FILE",
        help="Open a pack ('edgekv pack'): prompts that begin with its documents read what follows."
        " Its options for the cache are taken over; again for more.",
    ),
    _llama(
        "--slot-save-path",
        metavar="FOLDER",
        callback=_folder,
        help="Let clients save conversations to files of this folder, and restore them: /slots.",
    ),
    _own(
        "--ignore-prefix",
        metavar="REGEX",
        callback=_pattern,
        help="Text at the front of the first message, such as a date, that is not compared; that of"
        " the conversation found stands in.",
    ),
    _llama(
        "--chat-template-file chat_template",
        metavar="FILE",
        callback=_text,
        help="A chat template (Jinja) in the place of the model's.",
    ),
    _llama(
        "-rea",
        "--reasoning",
        type=click.Choice(THINKS),
        default=USUAL.reasoning,
        help="Whether the model thinks where a request says nothing; auto: as its template has it.",
    ),
    _llama(
        "--reasoning-format",
        type=click.Choice(REASONING),
        default=USUAL.reasoning_format,
        help="Where thoughts go: apart as reasoning_content, or with 'none' into the text.",
    ),
)


serve_options = grouped("options", ServeOptions, OPTIONS)


@click.command("serve", cls=router.Command, short_help="Serve models to programs, over HTTP.")
@engine_and_words(optional=True)
@drafts_options
@grouped("drawn", SamplingOptions)  # `sampling` is a field of ServeOptions
@serve_options
@grouped("models", RouterOptions, router.OPTIONS)
@grouped("embedding", EmbeddingOptions)
@router.BEHIND
def command(
    engine: EngineOptions,
    drawn: SamplingOptions,
    options: ServeOptions,
    models: RouterOptions,
    embedding: EmbeddingOptions,
    behind_router: bool,
) -> None:
    """Serve a model over HTTP, with OpenAI's, Anthropic's and Ollama's protocols.

    Paths, fields and options are llama-server's. The sampling options hold where a request says
    nothing. Ctrl-C ends it.

    Without a model it serves all that 'edgekv models' finds: a request names one, which is loaded
    in a process of its own. The other options are those of each model.
    """
    with _needs_packages():
        from edgekv.serve.listening import listen
        from edgekv.serve.run import Server
    if not engine.model:
        router.run(options, models, engine.verbose)
        return
    if behind_router:
        router.end_with_input()
    else:
        router.check_one()
    from edgekv.commands import load, packed

    path = load.model_path(engine.model)
    if embedding_.is_wanted(path, embedding):
        embedding_.run(path, engine, options, embedding)
        return
    engine = packed.with_settings_of_all(engine, options.packs)
    with listen(options.host, options.port) as listening, Later(takes_all=True) as later:
        server = Server(None, options, engine.verbose)
        with server.running([listening]), load.load_llama(engine, later) as llm:
            options = _with_usual(options, llm, engine, drawn)
            router.end_in_order()
            server.answer_with(
                llm, options, lambda: _say(server, options, listening, llm), _beside(server, later)
            )


def _with_usual(
    options: ServeOptions, llm: Llama, engine: EngineOptions, drawn: SamplingOptions
) -> ServeOptions:
    """The options, with how tokens are drawn where a request says nothing."""
    from edgekv.chat.sampling import Sampling
    from edgekv.commands.load import sampling_arguments

    said = sampling_arguments(llm, drawn)
    most, bias = said.pop("max_tokens"), said.pop("logit_bias") or {}
    seed = engine.seed if engine.seed >= 0 else None
    return replace(options, sampling=Sampling(**said, seed=seed, logit_bias=bias), max_tokens=most)


def _say(server: Server, options: ServeOptions, listening: socket.socket, llm: Llama) -> None:
    """Where the server is, and what a user may not expect."""
    if line := recall_line(llm.kv_stats()):
        click.echo(f"edgekv: {line}", err=True)
    for path in options.packs:
        click.echo(f"edgekv: {path} is open", err=True)
    if server.service.prompts.template.is_fallback:
        click.echo(f"edgekv: {NO_TEMPLATE}", err=True)
    router.say_where(server.service.model, options, listening)


def _beside(server: Server, later: Later) -> Callable[[], None]:
    """What is called now and then: `later` works while nobody waits, and what it found is used."""
    renewing: Future[None] | None = None
    has_said = False

    def said() -> str:
        """How the preparation ended; nothing if it has not."""
        nonlocal renewing
        if later.has_failed:
            return f"{WHAT} has failed: the next start begins it again"
        if not later.is_done():
            return ""
        renewing = renewing or server.renew()
        if not renewing.done():
            return ""
        error = renewing.exception()
        return f"{WHAT} is done: " + (
            f"the next start goes by it ({error})" if error else "the server goes by it now"
        )

    def tick() -> None:
        nonlocal has_said
        if not has_said and (line := said()):
            has_said = True
            click.echo(f"edgekv: {line}", err=True)
        elif server.worker.is_idle:
            later.go_on()
        else:
            later.stand_still()

    return tick
