"""A server of embeddings as a process."""

from __future__ import annotations

import socket
from pathlib import Path

from edgekv.llama.llama import Llama
from edgekv.serve.embedding.app import create_embedding_app
from edgekv.serve.embedding.embedder import Embedder
from edgekv.serve.listening import ListeningServer
from edgekv.serve.ollama.paths import One
from edgekv.serve.options import ServeOptions


class EmbeddingServer(ListeningServer):
    """`run` returns when it has been told to stop. The model may be closed afterwards."""

    def __init__(self, llm: Llama, options: ServeOptions, verbose: bool = False) -> None:
        self.name = (options.names or [Path(llm.model_path).name])[0]
        self._embedder = embedder = Embedder(llm, options.parallel + options.max_queue)
        one = One(self.name, options.names, llm.model_path, embedder.n_ctx)
        super().__init__(create_embedding_app(embedder, one, options), verbose)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        self._embedder.close()
