"""`edgekv serve` of a model that gives embeddings, or ranks documents."""

from __future__ import annotations

from dataclasses import dataclass, replace

import click

from edgekv.choice.config import KVConfig
from edgekv.commands import router
from edgekv.commands.declare import llama_field
from edgekv.commands.options import EngineOptions
from edgekv.model.header import header_of
from edgekv.serve.options import ServeOptions

POOLINGS = ("mean", "cls", "last", "rank")
CTX_USUAL = 2048
"""Tokens of a text where nothing is said: memory for them is taken at the start."""


@dataclass(frozen=True)
class EmbeddingOptions:
    """Fields are the options' names."""

    embedding: bool = llama_field(
        "--embedding --embeddings",
        env="EMBEDDINGS",
        is_flag=True,
        help="Give embeddings. A model that was made for them needs no option.",
    )
    reranking: bool = llama_field(
        "--rerank --reranking reranking",
        env="RERANKING",
        is_flag=True,
        help="Rank documents. A model that was made for that needs no option.",
    )
    pooling: str | None = llama_field(
        "--pooling",
        type=click.Choice(POOLINGS),
        help="How the vectors of a text's tokens become one; without it the model's own way, else"
        " their mean.",
    )


def is_wanted(path: str, options: EmbeddingOptions) -> bool:
    """Whether the server gives embeddings or ranks: it was told so, or the model writes no text."""
    if options.embedding or options.reranking or options.pooling:
        return True
    from edgekv.model import kind

    header = header_of(path)
    return header is not None and kind.is_embedder(header)


def run(
    path: str, engine: EngineOptions, options: ServeOptions, embedding: EmbeddingOptions
) -> None:
    """Serve until Ctrl-C. Raises EdgeKVError for a model that cannot be loaded."""
    from edgekv.commands import load, terminal
    from edgekv.serve.embedding.embedder import POOLINGS as NUMBERS
    from edgekv.serve.embedding.run import EmbeddingServer
    from edgekv.serve.listening import listen

    with terminal.killable():
        from edgekv import Llama
    header = header_of(path)
    arch = str(header.meta.get("general.architecture", "")) if header else ""
    meta = header.meta if header else {}
    n_ctx = min(int(meta.get(f"{arch}.context_length", CTX_USUAL)), engine.ctx_size or CTX_USUAL)
    own = {number: name for name, number in NUMBERS.items()}.get(meta.get(f"{arch}.pooling_type"))
    pooling = "rank" if embedding.reranking else embedding.pooling or own
    arguments = load.llama_arguments(replace(engine, ctx_size=n_ctx, kv=KVConfig()))
    more = {"n_batch": n_ctx, "n_ubatch": n_ctx, "embedding": True}
    number = NUMBERS["mean" if pooling in (None, "none") else pooling]
    with listen(options.host, options.port) as listening:
        with terminal.killable():
            llm = Llama(path, **{**arguments, **more, "pooling_type": number})
        try:
            server = EmbeddingServer(llm, options, engine.verbose)
            router.end_in_order()
            router.say_where(server.name, options, listening)
            server.run([listening])
        finally:
            llm.close()
