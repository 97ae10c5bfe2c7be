"""edgekv look: which tokens of a document stay in the cache, as a page to look at."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click
import numpy as np
from numpy.typing import NDArray

from edgekv.base import files
from edgekv.commands import look_page, terminal
from edgekv.commands.extract import document_text
from edgekv.commands.options import EngineOptions, engine_and_words
from edgekv.commands.report import mib, percent
from edgekv.commands.stream import refused_prompts
from edgekv.commands.text import encodable, printable
from edgekv.errors import BadInput, Cancelled, Unsupported

if TYPE_CHECKING:
    from edgekv import Llama
    from edgekv.native.store import Store


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

    llm = load_llama(engine, documents=named)
    if llm._kv is None:
        raise Unsupported(f"every token would be kept: the model {llm.kv_stats().note}")
    tokens = llm.tokenize(text.encode(), add_bos=True)
    stops = terminal.interruptible(llm.kv_cancel)
    try:
        with stops, terminal.reading_bar(llm), refused_prompts(llm):
            llm.eval(tokens)
    except Cancelled:
        raise click.Abort from None
    stats = llm.kv_stats()
    counts, n_heads = kept_by(llm._kv.store, len(tokens))
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


def layers_of(store: Store) -> list[int]:
    """Layers that attend to everything and have KV entries of their own."""
    return [
        il for il, layer in enumerate(store.layers) if layer.selects and layer.reads in (-1, il)
    ]


def kept_by(
    store: Store, n_tokens: int, layers: Sequence[int] | None = None
) -> tuple[NDArray[np.int32], int]:
    """int32 [n_tokens]: how many KV heads kept each token; and how many heads there are.

    layers: whose heads; None: of all that `layers_of` has.
    """
    counts, n_heads = np.zeros(n_tokens, np.int32), 0
    for il in layers_of(store) if layers is None else layers:
        for head in range(store.layers[il].n_head_kv):
            counts[np.unique(store.positions(il, head))] += 1
            n_heads += 1
    return counts, n_heads


def pieces(llm: Llama, tokens: list[int]) -> list[bytes]:
    """The bytes that each token stands for; a character may be spread over several."""
    return [llm.detokenize([token], special=True) for token in tokens]
