"""From texts to vectors, one text at a time: llama.cpp's own cache, without compression."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from edgekv.chat.specials import encoded
from edgekv.errors import BadInput
from edgekv.llama.llama import Llama
from edgekv.native import llama_cpp
from edgekv.serve.errors import ApiError, too_long
from edgekv.serve.queue import many_wait

POOLINGS = {
    "none": llama_cpp.LLAMA_POOLING_TYPE_NONE,
    "mean": llama_cpp.LLAMA_POOLING_TYPE_MEAN,
    "cls": llama_cpp.LLAMA_POOLING_TYPE_CLS,
    "last": llama_cpp.LLAMA_POOLING_TYPE_LAST,
    "rank": llama_cpp.LLAMA_POOLING_TYPE_RANK,
}
"""llama.cpp's words for how the vectors of tokens become one."""
Tokens = list[int]


class Embedder:
    """Answers requests for embeddings, one at a time.

    llm: made with `embedding=True`, and room for a whole text in a ubatch; n_most: requests that
    may wait. Requests are answered in their order.
    """

    def __init__(self, llm: Llama, n_most: int) -> None:
        self._llm, self._n_most, self._n_waiting = llm, n_most, 0
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "edgekv-embedder")
        """The one that uses the model."""
        self._vocab = llama_cpp.llama_model_get_vocab(llm.model)
        self.ranks = llama_cpp.llama_pooling_type(llm.ctx) == POOLINGS["rank"]
        count = llama_cpp.llama_model_n_cls_out if self.ranks else llama_cpp.llama_model_n_embd_out
        self.n_out: int = count(llm.model)
        self.n_ctx = llm.n_ctx()

    # ---- tokens

    def tokens_of(self, text: str, truncates: bool = False) -> Tokens:
        """As the model was trained to see a text. truncates: what does not fit is left out.

        Raises ApiError for what does not fit, BadInput for an empty text.
        """
        return self._fitting(self._tokens(text, is_whole=True), truncates)

    def checked(self, tokens: Sequence[int | str]) -> Tokens:
        """Tokens that a client has made. Raises ApiError and BadInput."""
        n_vocab = self._llm.n_vocab()
        found = [one for one in tokens if isinstance(one, int) and 0 <= one < n_vocab]
        if len(found) != len(tokens):
            raise BadInput(f"a token is none of this model's {n_vocab:,}")
        return self._fitting(found, False)

    def pair(self, query: str, document: str) -> Tokens:
        """Tokens of a query beside a document, as llama-server makes them. Raises ApiError."""
        template = llama_cpp.llama_model_chat_template(self._llm.model, b"rerank")
        if template:
            text = template.decode(errors="replace").replace("{query}", query)
            return self._fitting(self._tokens(text.replace("{document}", document)), False)
        model, vocab = llama_cpp, self._vocab
        eos, sep = model.llama_vocab_eos(vocab), model.llama_vocab_sep(vocab)
        end = [eos if eos >= 0 else sep] if model.llama_vocab_get_add_eos(vocab) else []
        between = [sep] if model.llama_vocab_get_add_sep(vocab) else []
        begin = [model.llama_vocab_bos(vocab)] if model.llama_vocab_get_add_bos(vocab) else []
        one, other = self._tokens(query), self._tokens(document)
        return self._fitting([*begin, *one, *end, *between, *other, *end], False)

    def _tokens(self, text: str, is_whole: bool = False) -> Tokens:
        return self._llm.tokenize(encoded(text), add_bos=is_whole, special=True)

    def _fitting(self, tokens: Tokens, truncates: bool) -> Tokens:
        if not tokens:
            raise BadInput("a text is empty: leave it out")
        if len(tokens) <= self.n_ctx:
            return tokens
        if truncates:
            return tokens[: self.n_ctx]
        n, n_ctx = len(tokens), self.n_ctx
        raise too_long(f"a text has {n:,} tokens, and {n_ctx:,} fit: give shorter ones", n, n_ctx)

    def close(self) -> None:
        """Wait for a text that is being read."""
        self._thread.shutdown(cancel_futures=True)

    # ---- vectors

    async def vectors(self, texts: Sequence[Tokens]) -> NDArray[np.float32]:
        """[n_texts, n_out]. Raises ApiError if too many requests wait."""
        if self._n_waiting >= self._n_most:
            raise many_wait(self._n_waiting)
        self._n_waiting += 1
        try:
            async with self._turn:
                # a client that goes away is noticed between two texts
                loop = asyncio.get_running_loop()
                found = [await loop.run_in_executor(self._thread, self._vector, x) for x in texts]
        finally:
            self._n_waiting -= 1
        return np.stack(found) if found else np.empty((0, self.n_out), np.float32)

    def _vector(self, tokens: Tokens) -> NDArray[np.float32]:
        n = len(tokens)
        with self._llm.guard.use():
            memory = llama_cpp.llama_get_memory(self._llm.ctx)
            if memory:
                llama_cpp.llama_memory_clear(memory, True)
            array = (llama_cpp.llama_token * n)(*tokens)  # stays until it is read
            batch = llama_cpp.llama_batch_get_one(array, n)
            if llama_cpp.llama_decode(self._llm.ctx, batch) != 0:
                raise ApiError(500, "llama.cpp cannot read a text: see the server's log")
            found = llama_cpp.llama_get_embeddings_seq(self._llm.ctx, 0)
            return np.array(found[: self.n_out], np.float32)


def normalized(vectors: NDArray[np.float32], n: int | None = None) -> NDArray[np.float32]:
    """[n_texts, n_out]: of length 1; n: only their first numbers. Raises BadInput for too many."""
    if n is not None and not 0 < n <= vectors.shape[1]:
        raise BadInput(f"dimensions is 1 to {vectors.shape[1]}: this model's vectors have as many")
    cut = vectors[:, :n]
    lengths = np.linalg.norm(cut, axis=1, keepdims=True)
    return np.asarray(cut / np.where(lengths > 0, lengths, 1), np.float32)
