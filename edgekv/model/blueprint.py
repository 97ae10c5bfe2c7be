"""Blueprint: what a model file would take, from llama.cpp itself, without reading a weight or
allocating a cache.

A model without weights can have contexts; they say the exact shape of each layer's cache and how
large the buffers are that llama.cpp would allocate.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from ctypes import c_bool
from dataclasses import dataclass
from functools import cached_property, lru_cache

from edgekv import native
from edgekv.base.defaults import N_UBATCH
from edgekv.errors import EdgeKVError
from edgekv.library import muted
from edgekv.model import facts, mtp
from edgekv.model.header import tensor_sizes
from edgekv.model.placement import CPU, EXPERTS, Placement, on_host
from edgekv.native import LayerInfo, ProductBytes, llama_cpp
from edgekv.native.mtp import WINDOW, MtpContext, why_no_mtp

TOKEN_TABLE = "token_embd.weight"


@dataclass(frozen=True)
class Context:
    """What a context of some kind would hold: its layers (none if edgekv cannot compress), bytes of
    all devices.

    compute: of compute buffers; cache: of llama.cpp's own cache.
    """

    layers: tuple[LayerInfo, ...]
    compute: int
    cache: int
    recurrent: int = 0
    """Bytes of recurrent layers' state, of one conversation; the same with a store."""


class Blueprint:
    """A model without weights. Use as a context manager. Raises BadInput if the file is no model.

    placed: where its tensors would go; with_mtp: it drafts with its own heads. weights: bytes in
    the file; n_embd: values of a hidden state between two layers; n_ctx_train; rows_alike: see
    `native.rows_alike`;
    why: the reason if its cache cannot be compressed, else empty.
    """

    def __init__(
        self,
        path: str,
        n_ubatch: int = N_UBATCH,
        on_gpu: bool = True,
        placed: Sequence[Placement] = (),
        with_mtp: bool = False,
    ) -> None:
        self.path, self._n_ubatch, self._placed = path, n_ubatch, placed
        self._on_gpu = on_gpu
        if with_mtp:
            mtp.check(path)
        self._model = facts.load_without_weights(path, -1 if on_gpu else 0, placed, with_mtp)
        if with_mtp and (why := why_no_mtp(self._model)):
            raise mtp.none(path, why)
        self.shape = facts.model_shape(self._model)
        self.weights: int = self.shape["size_bytes"]
        self.n_embd: int = native.hidden_width(self._model)
        self.n_ctx_train: int = self.shape["n_ctx_train"]
        self.why: str = self.shape["note"]
        self.rows_alike = native.rows_alike(self._model)
        self.context = lru_cache(maxsize=None)(self._context)
        """`_context`, remembered."""

    def __enter__(self) -> Blueprint:
        return self

    def __exit__(self, *_: object) -> None:
        llama_cpp.llama_model_free(self._model)
        self._model = None

    def product_bytes(self, n_tokens: int, n_ubatch: int, most: int | None = None) -> ProductBytes:
        """See `native.product_bytes`; of a prompt of so many tokens."""
        n_chunk, again = min(n_tokens, n_ubatch), n_tokens > n_ubatch
        return native.product_bytes(self._model, n_chunk, again, most)

    def mtp_bytes(self, n_ctx: int, ratio: float = 1.0) -> int:
        """Of its heads at any ratio: cache, buffers, hidden states of last tokens and a batch."""
        with closing(MtpContext(self._model, n_ctx, 1, self._on_gpu, c_bool())) as heads:
            width = 4 * llama_cpp.llama_model_n_embd_out(self._model)
            return heads.n_bytes + width * (WINDOW + self._n_batch)

    @cached_property
    def on_host(self) -> int:
        """Bytes of the weights that stay in main memory where all layers are on a GPU: the token
        table, unless the output shares it, which is then there as well, and what is placed there.
        """
        return sum(self._sizes[name] for name in self._names_on_host)

    @cached_property
    def experts(self) -> int:
        """Bytes of the experts' weights that do not stay in main memory."""
        there = set(self._names_on_host)
        expert = Placement(EXPERTS, CPU)
        return sum(
            n for name, n in self._sizes.items() if expert.matches(name) and name not in there
        )

    @cached_property
    def _names_on_host(self) -> list[str]:
        unplaced = TOKEN_TABLE if "output.weight" in self._sizes else ""
        return on_host(list(self._sizes), self._placed, unplaced)

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return tensor_sizes(self.path)

    @property
    def _n_batch(self) -> int:
        return max(self._n_ubatch, 2048)

    def _context(
        self,
        compressed: bool,
        n_ctx: int,
        type_k: int,
        type_v: int,
        n_outputs: int = 1,
        n_seq_max: int = 1,
    ) -> Context:
        """n_outputs: tokens of a chunk whose logits are reserved; 1 is what a prompt really uses,
        n_batch what the bindings ask for. n_seq_max: see `edgekv.Llama`.
        """
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_ubatch = self._n_ubatch
        params.n_batch = self._n_batch
        params.type_k, params.type_v, params.n_outputs_max = type_k, type_v, n_outputs
        params.n_seq_max, params.kv_unified = n_seq_max, n_seq_max > 1
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        with native.next_context(compressed), muted():
            ctx = llama_cpp.llama_init_from_model(self._model, params)
        if not ctx:
            raise EdgeKVError(f"llama.cpp makes no context of {n_ctx:,} tokens for {self.path}")
        try:
            store = native.Store.of(ctx)
            cache, compute = native.context_bytes(ctx)
            recurrent = store.memory().bytes_recurrent if store else 0
            return Context(tuple(store.layers) if store else (), compute, cache, recurrent)
        finally:
            llama_cpp.llama_free(ctx)
