"""A model's own heads for further tokens (MTP): hidden states out of its context, and the context
that the heads have for themselves.
"""

from __future__ import annotations

from ctypes import c_bool, c_int8
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.base.defaults import whole_ctx
from edgekv.errors import EdgeKVError, StepFailed
from edgekv.native.bindings import f32, i32, lib, llama_cpp
from edgekv.native.context import context_bytes, context_error, logits, next_context, stop_if_set

N_UBATCH = 64
"""Tokens that heads read at once."""
CELLS = 1024
"""Tokens in their cache at most."""
WINDOW = 256
"""Last tokens of a conversation whose hidden states are kept: those of a prompt that heads read."""


def why_no_mtp(model: Any) -> str:
    """Why a llama_model, loaded with load_mtp, has no usable heads, one line; empty if it has."""
    return (lib.edgekv_why_no_heads(model) or b"").decode()


def keep_hidden(ctx: Any) -> None:
    """From now on steps of a llama_context keep hidden states, and prompts the last WINDOW."""
    lib.edgekv_keep_hidden(ctx, True, WINDOW)


def hidden(ctx: Any, n_tokens: int, n_last: int) -> NDArray[np.float32]:
    """float32 [n, n_embd]: a copy of the hidden states of the last n_last tokens, or all if they
    are fewer, of a llama_context's last step, which had n_tokens, behind `keep_hidden`.
    """
    n = min(n_tokens, n_last)
    first = lib.edgekv_hidden_ith(ctx, n_tokens - n)
    if not first:
        raise EdgeKVError("the model has no hidden states for its heads")
    width = llama_cpp.llama_model_n_embd_out(llama_cpp.llama_get_model(ctx))
    return np.ctypeslib.as_array(first, (n, width)).copy()


class MtpContext:
    """The heads of a llama_model in a context of their own, whose cache is llama.cpp's: of their
    layer alone, in f16.

    A token at position p goes in with the hidden state of the one before it, and logits say what
    follows it. n_ctx: of the model's own context; stop: ends a step between two operations once it
    is set. Raises EdgeKVError if there can be none.
    """

    def __init__(
        self, model: Any, n_ctx: int, n_threads: int, on_device: bool, stop: c_bool
    ) -> None:
        params = llama_cpp.llama_context_default_params()
        params.ctx_type = llama_cpp.LLAMA_CONTEXT_TYPE_MTP
        self.n_cells = min(CELLS, whole_ctx(n_ctx + N_UBATCH))
        """Tokens that the cache has room for, at any positions."""
        params.n_ctx, params.n_batch, params.n_ubatch = self.n_cells, N_UBATCH, N_UBATCH
        params.n_outputs_max, params.offload_kqv = 1, on_device
        params.n_threads = params.n_threads_batch = n_threads
        with next_context(False):
            self._ctx = llama_cpp.llama_init_from_model(model, params)
        if not self._ctx:
            raise EdgeKVError("llama.cpp makes no context for this model's MTP heads")
        self._memory = llama_cpp.llama_get_memory(self._ctx)
        self._n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        lib.edgekv_keep_hidden(self._ctx, False, 0)
        self._stop = stop  # lives as long
        stop_if_set(self._ctx, stop)

    def close(self) -> None:
        if self._ctx:
            llama_cpp.llama_free(self._ctx)
            self._ctx = None

    @property
    def n_bytes(self) -> int:
        """Of its cache and of compute buffers."""
        return sum(context_bytes(self._ctx))

    def set_n_threads(self, n_threads: int) -> None:
        llama_cpp.llama_set_n_threads(self._ctx, n_threads, n_threads)

    def remove(self, begin: int, end: int = -1) -> None:
        """Forget tokens at the positions [begin, end); -1: all behind `begin`."""
        llama_cpp.llama_memory_seq_rm(self._memory, 0, begin, end)

    def read(self, tokens: NDArray[np.int32], begin: int, before: NDArray[np.float32]) -> None:
        """Read tokens that stand at `begin` and behind it. before: float32 [n, n_embd], hidden
        states of the tokens at begin - 1 and behind it. Raises StepFailed; the cache may then have
        some of them.
        """
        last = len(tokens) - 1  # by itself: its output is then the only one, whatever the graph
        for i in range(0, last, N_UBATCH):
            end = min(i + N_UBATCH, last)
            self._decode(tokens[i:end], begin + i, before[i:end], False)
        self._decode(tokens[last:], begin + last, before[last:], True)

    def _decode(
        self, tokens: NDArray[np.int32], begin: int, before: NDArray[np.float32], has_output: bool
    ) -> None:
        n = len(tokens)
        tokens, before = np.ascontiguousarray(tokens), np.ascontiguousarray(before)
        positions = np.arange(begin, begin + n, dtype=np.int32)
        outputs = (c_int8 * n)(*[has_output] * n)
        batch = llama_cpp.llama_batch(
            n_tokens=n, token=i32(tokens), embd=f32(before), pos=i32(positions), logits=outputs
        )
        if llama_cpp.llama_decode(self._ctx, batch) != 0:
            raise StepFailed(context_error() or "the model's MTP heads could not be computed")

    def logits(self) -> NDArray[np.float32]:
        """[n_vocab] of the token that was read last; they change with the next one."""
        found = logits(self._ctx, self._n_vocab)
        assert found is not None
        return found

    def hidden(self) -> NDArray[np.float32]:
        """[1, n_embd]: a copy of the hidden state that stands for the token that was read last."""
        return hidden(self._ctx, 1, 1)
