"""edgekv look: which tokens of a document stay in the cache, as a page to look at."""

from __future__ import annotations

import os

import click

from edgekv.base import files
from edgekv.base.text import encodable, printable
from edgekv.commands import terminal
from edgekv.commands.options import EngineOptions, engine_and_words
from edgekv.commands.report import mib, percent
from edgekv.documents.extract import document_text
from edgekv.errors import BadInput, Unsupported
from edgekv.kept import look_page


@click.command("look", short_help="Show which tokens of a document stay in the cache.")
@engine_and_words("FILE", least=1, most=1)
@click.option("-o", "--output", required=True, metavar="PAGE", help="The HTML file to write.")
def command(engine: EngineOptions, output: str, words: tuple[str, ...]) -> None:
    """Write a page that shows a document's tokens, coloured by how many heads kept each.

    The page is one HTML file that loads nothing. The document is text, Markdown, HTML, or PDF (with
    the extra 'pdf'). It is read by itself, without a chat template. Layers with a sliding window do
    not count.
    """
    if not engine.kv.compresses:
        raise BadInput("this would keep every token; give a --kv-ratio below 1, such as 0.2")
    files.check(output, files.contains(look_page.MARK), look_page.KIND)
    (document,) = words
    text = document_text(document)
    named = {f"'{encodable(document)}'": text}
    from edgekv.commands.load import load_llama
    from edgekv.kept.tokens import kept_by, pieces

    llm = load_llama(engine, documents=named)
    if llm.engine is None:
        raise Unsupported(f"every token would be kept: the model {llm.kv_stats().note}")
    tokens = llm.tokenize(text.encode(), add_bos=True)
    with terminal.reading(llm):
        llm.eval(tokens)
    stats = llm.kv_stats()
    counts, n_heads = kept_by(llm.engine.store, len(tokens))
    share = percent(stats.n_bytes_used, max(stats.n_bytes_full, 1))
    about = (
        f"{os.path.basename(engine.model)}, method {stats.method}: {len(tokens):,} tokens, KV"
        f" {mib(stats.n_bytes_used)} of {mib(stats.n_bytes_full)} MiB, {share}"
    )
    page = look_page.page(
        encodable(os.path.basename(document)),
        encodable(about),
        pieces(llm, tokens),
        counts.tolist(),
        n_heads,
    )
    with files.replaced(output, files.contains(look_page.MARK), look_page.KIND) as file:
        file.write(page.encode())
    click.echo(printable(f"{output}: {about}"))
