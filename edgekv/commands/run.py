"""edgekv run: one prompt, one answer."""

from __future__ import annotations

import json
import select
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from edgekv.base.console import say
from edgekv.base.machine import rss_peak
from edgekv.base.text import encodable
from edgekv.commands import llama_cli, packed, terminal
from edgekv.commands.chat_warnings import has_template, warnings
from edgekv.commands.conversation import content_of, plain_text
from edgekv.commands.declare import grouped, option_field
from edgekv.commands.options import (
    EngineOptions,
    SamplingOptions,
    drafts_options,
    engine_and_words,
    sampling_options,
)
from edgekv.commands.report import recall_line, status_line
from edgekv.commands.stream import Stream
from edgekv.documents.extract import document_text, text_of
from edgekv.documents.plain import read_bounded
from edgekv.errors import BadInput

if TYPE_CHECKING:
    from edgekv import Llama
    from edgekv.base.stats import KVStats


Complete = Callable[..., Any]
"""Completes the prompt, as a message or as it is: `complete(stream=...)`."""
STDIN = "-"
WAITS_S = 2.0
"""Seconds after which a line says that standard input is waited for."""


@dataclass(frozen=True)
class RunOptions:
    """What is asked, and how the answer is printed. Fields are the options' names."""

    prompt: str | None = option_field("-p --prompt", metavar="TEXT", help="The prompt.")
    file: str | None = option_field(
        "-f --file", metavar="FILE", help="A document for the prompt, or -."
    )
    raw: bool = option_field(
        "--raw",
        is_flag=True,
        help="Give the prompt to the model as it is, without its chat template.",
    )
    as_json: bool = option_field(
        "--json as_json",
        is_flag=True,
        help="Print one JSON object with the answer and what it cost.",
    )


@click.command("run", short_help="Answer one prompt.")
@engine_and_words("[PROMPT|-]", most=1)
@drafts_options
@sampling_options
@llama_cli.system_prompt
@llama_cli.RUN
@packed.PACK
@grouped("asked", RunOptions)
def command(
    engine: EngineOptions,
    sampling: SamplingOptions,
    asked: RunOptions,
    system_prompt: str | None,
    pack: str | None,
    conversation: bool | None,
    words: tuple[str, ...],
) -> None:
    """Answer one prompt: -p TEXT or just the text, -f FILE, or standard input.

    What is piped in goes in front of the prompt, and so does FILE: first the text, then what to do
    with it. The answer goes to standard output, everything else to standard error.
    """
    raw, file = asked.raw or conversation is False, asked.file
    text = prompt_text(asked.prompt, file, words[0] if words else None)
    if not text:
        raise no_prompt(engine.model, pack)
    if raw and system_prompt:
        raise BadInput("--raw has no system message; leave -sys out, or put it into the prompt")
    if raw and pack:
        raise BadInput("--raw has no messages, which a pack begins with; leave one of them out")
    from edgekv.commands.load import load_llama, sampling_arguments

    found = packed.read(pack, system_prompt) if pack else None
    if pack and found:
        engine, system_prompt = packed.with_settings(engine, found, pack), found.system
    name = f"the prompt with '{encodable(file)}'" if file not in (None, STDIN) else "the prompt"
    llm = load_llama(engine, documents={name: text})
    documents = packed.opened(llm, pack) if pack else []
    system = encodable(system_prompt or "")
    content = content_of(documents, text)
    if not raw:
        for line in warnings(llm, engine.ctx_size):
            click.echo(f"edgekv: {line}", err=True)
        if not has_template(llm):
            raw = True
            content = plain_text([*system_of(system), {"role": "user", "content": content}])
    if sys.stdout.isatty() and not asked.as_json and (line := recall_line(llm.kv_stats())):
        terminal.status(f"edgekv: {line}")
    arguments = sampling_arguments(llm, sampling)
    messages = [*system_of(system), {"role": "user", "content": content}]
    complete: Complete = (
        partial(llm.create_completion, content, **arguments)
        if raw
        else partial(llm.create_chat_completion, messages=messages, **arguments)
    )
    print_json(llm, complete, engine) if asked.as_json else print_text(llm, complete)


def prompt_text(prompt: str | None, file: str | None, words: str | None) -> str:
    """The prompt from where it was given; what is piped in stands in front of it.

    Empty if that is nowhere. Raises BadInput if it was given twice, or without a text.
    """
    is_asked = STDIN in (file, words)
    if is_asked and file not in (None, STDIN):
        raise BadInput("give -f FILE or -, not both")
    if words not in (None, STDIN):
        if prompt is not None:
            raise BadInput(
                f"give the prompt once: -p TEXT, or '{words}' (quote a text with blanks)"
            )
        prompt = words
    parts = []
    if file not in (None, STDIN):
        parts.append(document_text(file, may_be_pipe=True))
    piped = piped_in(is_asked)
    if is_asked or piped.strip():
        parts.append(text_of(piped, "standard input"))
    if prompt is not None:
        parts.append(encodable(prompt))
    text = "\n\n".join(parts)
    if parts and not text.strip():
        raise BadInput("the prompt is empty; give some text")
    return text


def piped_in(is_asked: bool) -> bytes:
    """All of standard input, if it is no terminal or is asked for."""
    if not is_asked:
        if sys.stdin.isatty():
            return b""
        with suppress(OSError, ValueError):  # what is no pipe is there at once
            if not select.select([sys.stdin], [], [], WAITS_S)[0]:
                say("waiting for standard input to end; '</dev/null' leaves it out")
    return read_bounded(sys.stdin.buffer, "standard input")


def no_prompt(model: str, pack: str | None) -> BadInput:
    """What to say about a missing prompt. Raises BadInput if there is no such model either."""
    from edgekv.models import names

    try:
        names.check(model)
    except BadInput:
        if not pack and " " not in model.strip():
            raise
        whose = f", and the pack belongs to {packed.owner(pack)}" if pack else ""
        more = f" --pack {shlex.quote(pack)}" if pack else ""
        raise BadInput(
            f"which model? '{model}' is none{whose}; name one in front of the prompt: edgekv run"
            f" MODEL{more} {shlex.quote(model)}"
        ) from None
    return BadInput(
        "there is no prompt; give -p TEXT, -f FILE, or - for standard input; to talk:"
        f" edgekv chat {shlex.quote(model)}"
    )


def system_of(text: str) -> list[dict[str, Any]]:
    """The system message, if there is one."""
    return [{"role": "system", "content": text}] if text else []


def print_text(llm: Llama, complete: Complete) -> None:
    """The answer as it comes, then a status line. Raises Abort after Ctrl-C."""
    stream = Stream(llm, partial(complete, stream=True))
    terminal.show(llm, stream, stream.stop, sys.stdout.isatty())
    stats = llm.kv_stats()
    terminal.status(status_line(stats, stream, terminal.width()))
    if stats.note:
        terminal.status(f"edgekv: {stats.note}")
    if stream.finish == "stopped":
        raise click.Abort


def print_json(llm: Llama, complete: Complete, engine: EngineOptions) -> None:
    """One object with the answer and what it cost."""
    times = Times(llm)
    with terminal.reading(llm), times:
        done = complete(stream=False)
    print(json.dumps(record(done, llm.kv_stats(), engine, times), ensure_ascii=False))


class Times:
    """How long a completion takes: its prompt, which is the first `eval` of the model, and all the
    rest.

    A streamed completion would show the same but not how many tokens there were, a whole one only
    the sum.
    """

    def __init__(self, llm: Llama) -> None:
        self._llm = llm
        self._start = 0.0
        self.prefill_ms = 0.0
        self.decode_ms = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()
        self._llm.__dict__["eval"] = self._first_eval  # the instance's own, in front of the class's

    def __exit__(self, *_: object) -> None:
        self._restore()
        self.decode_ms = 1000 * (time.perf_counter() - self._start) - self.prefill_ms

    def _first_eval(self, tokens: Any) -> None:
        self._restore()
        self._llm.eval(tokens)
        self.prefill_ms = 1000 * (time.perf_counter() - self._start)

    def _restore(self) -> None:
        self._llm.__dict__.pop("eval", None)


def record(
    done: dict[str, Any], stats: KVStats, engine: EngineOptions, times: Times
) -> dict[str, Any]:
    """The JSON object. `prefill_ms` includes `compress_ms`."""
    choice, usage = done["choices"][0], done["usage"]
    return {
        "text": choice["text"] if "text" in choice else choice["message"]["content"],
        "model": engine.model,
        "kv_method": stats.method,
        "kv_ratio": round(stats.ratio, 6),
        "kv_bytes": stats.n_bytes,
        "kv_bytes_used": stats.n_bytes_used,
        "kv_bytes_peak": stats.n_bytes_peak,
        "kv_bytes_full": stats.n_bytes_full,
        "kv_bytes_limit": stats.n_bytes_limit,
        "kv_bytes_reserved": stats.n_bytes_reserved,
        "kv_bytes_checkpoints": stats.n_bytes_checkpoints,
        "kv_bytes_archive": stats.n_bytes_archive,
        "kv_bytes_index": stats.n_bytes_index,
        "kv_bytes_recalled": stats.n_bytes_recalled,
        "kv_bytes_draft": stats.n_bytes_draft,
        "type_k": stats.type_k,
        "type_v": stats.type_v,
        "prompt_n": usage["prompt_tokens"],
        "kept_n": round(stats.n_kept, 2),
        "gen_n": usage["completion_tokens"],
        "prefill_ms": round(times.prefill_ms, 3),
        "compress_ms": round(stats.compress_ms, 3),
        "decode_ms": round(times.decode_ms, 3),
        "prefill_tps": rate(usage["prompt_tokens"], times.prefill_ms),
        "decode_tps": rate(usage["completion_tokens"], times.decode_ms),
        "rss_peak_bytes": rss_peak(),
    }


def rate(n: int, ms: float) -> float:
    """Per second."""
    return round(1000 * n / ms, 2) if ms > 0 else 0.0
