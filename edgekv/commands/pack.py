"""edgekv pack: read documents once, and ask about them whenever."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from edgekv.base import files
from edgekv.base.text import encodable, printable
from edgekv.commands import llama_cli, terminal
from edgekv.commands.chat_warnings import has_template
from edgekv.commands.conversation import content_of, plain_text
from edgekv.commands.options import EngineOptions, engine_and_words
from edgekv.commands.report import mib, percent, table
from edgekv.documents.extract import document_text

if TYPE_CHECKING:
    from edgekv import Llama
    from edgekv.llama.pack import Pack, PackedDocument


class WithUsual(click.Group):
    """A group with a command that need not be named."""

    usual = "create"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        asks_for_help = args and args[0] in ctx.help_option_names
        if args and not asks_for_help and args[0] not in self.commands:
            args = [self.usual, *args]
        return super().parse_args(ctx, args)


@click.group("pack", cls=WithUsual, short_help="Read documents once, and ask about them whenever.")
def command() -> None:
    """Read documents once into a file, and ask about them whenever: 'edgekv chat --pack FILE'."""


@command.command("create", short_help="Read documents into a pack; the usual command.")
@engine_and_words("FILE...", least=1, most=-1)
@llama_cli.system_prompt
@click.option("-o", "--output", required=True, metavar="PACK", help="The file to write.")
def create(
    engine: EngineOptions, system_prompt: str | None, output: str, words: tuple[str, ...]
) -> None:
    """Read documents into a pack. The word 'create' may be left out.

    Documents are text, Markdown, HTML, or PDF (with the extra 'pdf'). A pack belongs to its model;
    whoever opens it takes over its options for the cache.
    """
    from edgekv.conversation.session import KIND

    files.check(output, files.begins_with(KIND), "pack")
    texts = {path: document_text(path) for path in words}
    named = {f"'{encodable(path)}'": text for path, text in texts.items()}
    from edgekv.commands.load import load_llama
    from edgekv.llama import pack as packs

    llm = load_llama(engine, documents=named)
    is_chat = has_template(llm)
    found = [_document(llm, path, text) for path, text in texts.items()]
    system = [{"role": "system", "content": encodable(system_prompt)}] if system_prompt else []
    question: dict[str, Any] = {"role": "user", "content": content_of([x.text for x in found], "?")}

    with terminal.reading(llm):
        messages = [*system, question]
        tokens = _tokens(llm, messages) if is_chat else _plain(llm, messages)
        pack = packs.write(llm, messages, found, tokens, output)
    click.echo(f"{output}: {_summary(pack)}")


def _tokens(llm: Llama, messages: list[dict[str, Any]]) -> list[int]:
    """Tokens of the prompt that a chat makes of messages."""
    from edgekv.chat.template import Chat

    return llm.chat_template.prompt(Chat(messages)).tokens


def _plain(llm: Llama, messages: list[dict[str, Any]]) -> list[int]:
    """The same for a model without a chat template."""
    return llm.tokenize(plain_text(messages).encode(), add_bos=True, special=True)


def _document(llm: Llama, path: str, text: str) -> PackedDocument:
    from edgekv.llama.pack import PackedDocument

    n_tokens = len(llm.tokenize(text.encode(), add_bos=False))
    return PackedDocument(
        encodable(os.path.basename(path)), text, files.expanded(path).stat().st_size, n_tokens
    )


@command.command("show", short_help="What a pack holds.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.argument("pack", metavar="PACK")
def show(pack: str, as_json: bool) -> None:
    """Print a pack's documents, and what its cache was made with."""
    from edgekv.llama import pack as packs

    found, owner = packs.read(pack), packs.owner(pack)
    packs.verify(pack)
    if as_json:
        said = {**asdict(found), "model": asdict(owner)}
        for document in said["documents"]:
            del document["text"]
        print(json.dumps(said, ensure_ascii=False))
        return
    click.echo(table([("model", str(owner)), *_rows(found)]))


def _rows(pack: Pack) -> list[tuple[str, str]]:
    rows = [
        (f"document {i}", f"{printable(x.name)}: {x.n_tokens:,} tokens, {x.n_bytes:,} bytes")
        for i, x in enumerate(pack.documents, 1)
    ]
    if pack.system:
        rows.append(("system message", " ".join(printable(pack.system).split())))
    kinds = "/".join(dict.fromkeys(pack.cache_types))
    return [
        *rows,
        ("tokens", f"{pack.n_tokens:,}"),
        ("KV cache", _cache(pack)),
        ("cache type", kinds),
        ("method", pack.method),
        ("share asked for", percent(pack.settings.ratio, 1)),
    ]


def _cache(pack: Pack) -> str:
    share = percent(pack.n_bytes, max(pack.n_bytes_full, 1))
    return f"{mib(pack.n_bytes)} of {mib(pack.n_bytes_full)} MiB, {share}"


def _summary(pack: Pack) -> str:
    n = len(pack.documents)
    return f"{n} document{'s' * (n > 1)}, {pack.n_tokens:,} tokens, KV {_cache(pack)}"
