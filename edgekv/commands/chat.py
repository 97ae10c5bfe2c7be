"""edgekv chat: a conversation, typed or piped (then each line of standard input is one turn)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from edgekv.base.text import encodable
from edgekv.commands import llama_cli, packed, slash, terminal
from edgekv.commands.chat_warnings import warnings
from edgekv.commands.conversation import Conversation
from edgekv.commands.later import Later
from edgekv.commands.options import (
    EngineOptions,
    SamplingOptions,
    drafts_options,
    engine_options,
    sampling_options,
)
from edgekv.commands.report import compression_line, recall_line, status_line
from edgekv.commands.stream import Piece, or_larger
from edgekv.errors import Cancelled, EdgeKVError
from edgekv.models.demo import proposal

if TYPE_CHECKING:
    from edgekv import Llama

PIPED_MAX = 1024
"""Tokens of a reply without a terminal."""


@click.command("chat", short_help="Chat with a model, about documents too.")
@engine_options
@drafts_options
@sampling_options
@llama_cli.system_prompt
@llama_cli.CHAT
@packed.PACK
def command(
    engine: EngineOptions, sampling: SamplingOptions, system_prompt: str | None, pack: str | None
) -> int:
    """Chat with a model, about documents too. /help in the chat lists its commands.

    Replies go to standard output, everything else to standard error. Without a terminal each line
    of standard input is one turn, replies have at most 1024 tokens unless -n says otherwise, and
    the exit code is 2 if a line was refused.
    """
    from edgekv.commands import load

    found = packed.read(pack, system_prompt) if pack else None
    if pack and found:
        engine = packed.with_settings(engine, found, pack)
    with Later() as later:
        typed = terminal.is_interactive()
        waiting = later if typed else None
        llm = load.load_llama(engine, waiting)
        arguments = load.sampling_arguments(llm, sampling if typed else ending(sampling))
        conversation = Conversation(llm, arguments, encodable(system_prompt or ""))
        conversation.learn = lambda share: load.learn(
            replace(engine, kv=replace(engine.kv, ratio=share)), waiting
        )
        if pack and found:
            conversation.open(found, pack)
            slash.say(f"{pack}: {', '.join(map(str, conversation.documents))}")
        for line in warnings(llm, engine.ctx_size):
            slash.say(line)
        if not typed:
            return talk(conversation, terminal.piped_lines(), typed=False)
        slash.say(
            f"{engine.model}: context of {llm.n_ctx():,} tokens; /help lists the commands,"
            " Ctrl-D ends"
        )
        say_cache(llm, engine)
        if engine.model == "demo":
            slash.say(f"the demo model is a very small one; this it can answer:\n{proposal()}")
        names = [*slash.COMMANDS, *slash.ALIASES]
        lines = terminal.typed_lines(names, slash.WITH_PATH)
        talk(conversation, with_later(lines, later, conversation, engine), typed=True)
        return 0


def ending(sampling: SamplingOptions) -> SamplingOptions:
    """`sampling` with an end to each reply, unless the user said it: nobody is there to stop it."""
    source = click.get_current_context().get_parameter_source("predict")
    is_usual = getattr(source, "name", "") == "DEFAULT"
    return replace(sampling, predict=PIPED_MAX) if is_usual else sampling


def with_later(
    lines: Iterator[str], later: Later, conversation: Conversation, engine: EngineOptions
) -> Iterator[str]:
    """The lines, while whose typing `later` works. The model is loaded anew with what it found, but
    once, and only if nothing was asked yet and no command has chosen otherwise.
    """
    first, is_open = _choice(conversation), True
    while True:
        later.go_on()
        try:
            line = next(lines, None)
        finally:
            later.stand_still()
        if line is None:
            return
        if is_open and later.is_done() and conversation.is_new and _choice(conversation) == first:
            is_open = False
            if not _load_anew(conversation, engine, later):
                slash.say("edgekv: stopped")
                continue
        yield line


def _load_anew(conversation: Conversation, engine: EngineOptions, later: Later) -> bool:
    """Load the model with what `later` has found. False if Ctrl-C was pressed meanwhile."""
    from edgekv.commands import load

    wishes: list[str] = []
    with terminal.interruptible(lambda: wishes.append("stop")):
        conversation.llm.close()
        conversation.llm = load.load_llama(engine, later)
    say_cache(conversation.llm, engine)
    return not wishes


def say_cache(llm: Llama, engine: EngineOptions) -> None:
    """Whether the cache is compressed, and what else would bring answers nearer."""
    stats = llm.kv_stats()
    slash.say(compression_line(stats, engine))
    if line := recall_line(stats):
        slash.say(line)


def _choice(conversation: Conversation) -> tuple[str, float]:
    stats = conversation.llm.kv_stats()
    return stats.method, stats.ratio


def talk(conversation: Conversation, lines: Iterable[str], typed: bool) -> int:
    """One turn per line. Returns the exit code: 2 if a line was refused.

    At the end it names the documents that still wait for a message.
    """
    code = 0
    for line in lines:
        try:
            answer(conversation, encodable(line).rstrip().lstrip(" \t"), typed)
        except slash.Quit:
            break
        except Cancelled as stopped:
            slash.say(f"edgekv: {stopped}")
            if not typed:
                raise click.Abort from None
        except EdgeKVError as error:
            slash.say(f"edgekv: {error}")
            code = 2
        except KeyboardInterrupt:
            if not typed:
                raise
            slash.say("edgekv: stopped")
    if unread := [x for x in conversation.documents if not x.is_read]:
        names = ", ".join(map(str, unread))
        slash.say(f"edgekv: no message followed, so this was not read: {names}")
    return code


def answer(conversation: Conversation, line: str, typed: bool) -> None:
    """Carries out a command, or asks the model. Raises Quit, and EdgeKVError: all is as before."""
    if line.startswith("/"):
        reply = slash.run(conversation, line)
    else:
        reply = conversation.ask(line.strip()) if line else None
    if reply is not None:
        take_turn(conversation, reply, typed)


def take_turn(conversation: Conversation, reply: Iterator[Piece], typed: bool) -> None:
    """Prints the reply as it comes, then the status line. Raises EdgeKVError, and Abort."""
    conversation.is_stopped = False  # a Ctrl-C that came too late for an earlier turn
    terminal.show(conversation.llm, reply, conversation.stop, typed)
    stream, stats = conversation.stream, conversation.llm.kv_stats()
    assert stream is not None  # the reply came from it
    terminal.status(status_line(stats, stream, terminal.width()))
    if stats.note and not typed and len(conversation.messages) <= 3:  # once, after the first turn
        slash.say(f"edgekv: {stats.note}")
    if stream.finish == "stopped" and not typed:
        raise click.Abort
    most = conversation.arguments["max_tokens"]
    if stream.finish != "length":
        return
    if not most or stream.n_decoded < most - 1:
        slash.say(f"edgekv: the context is full; /reset starts afresh{or_larger(conversation.llm)}")
    elif most == PIPED_MAX and not typed:
        slash.say(f"edgekv: stopped after {most:,} tokens; -n -1 lets a reply end by itself")
