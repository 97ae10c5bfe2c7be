"""A prompt that is read layer by layer."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_double
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgekv.base.stats import WORK, Work
from edgekv.native.bindings import (
    CMerge,
    CObserver,
    CPrefillParams,
    CProgress,
    f32,
    i32,
    lib,
    llama_cpp,
)
from edgekv.native.store import Store, listed

HIDDEN = {"f32": 0, "f16": 1, "disk": 2, "device": 3, "whole": 4}
STATS = {"mean": 1, "var": 2, "max": 4, "col_entropy": 8, "queries": 16}


class Observer(NamedTuple):
    """Tokens whose queries are observed, and the statistics of them, names of STATS. The tokens are
    counted through the prompt and all pieces; `queries` looks at one of `every`.
    """

    begin: int
    end: int
    stats: tuple[str, ...]
    every: int = 1


Ints = NDArray[np.int32]
Fold = tuple[Ints, NDArray[np.float32], Ints, Ints, NDArray[np.float32]]
"""rows, own, counts, sources, weights: see `edgekv.methods.merge.FoldPlan`."""


class Prefill:
    """A prompt that is read layer by layer. Use as a context manager: leaving it without `end`
    forgets the prompt.

    tokens: the prompt; pieces: token lists, each read behind the prompt, seeing no other piece and
    never stored.
    logits: f32 [len(tokens), n_vocab] for those of every token, if it is given; the context has the
    last one's alone.
    most_work: bytes that products with weights may work with; with less llama.cpp's are taken.
    progress(done, total) is called between chunks; if it raises, reading stops and the exception
    comes out of `run`.
    """

    def __init__(
        self,
        ctx: Any,
        tokens: Iterable[int],
        observers: list[Observer],
        *,
        pieces: Sequence[Sequence[int]] = (),
        logits: NDArray[np.float32] | None = None,
        hidden: str = "f32",
        most_work: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        tokens = list(tokens)
        self.n_tokens = len(tokens)
        self._store = Store(ctx)
        self._raised: BaseException | None = None
        self._progress = progress
        self._tokens = np.asarray(tokens + [t for piece in pieces for t in piece], np.int32)
        self._pieces = np.asarray([len(piece) for piece in pieces] or [0], np.int32)
        self._observers = (CObserver * max(len(observers), 1))(
            *(
                CObserver(one.begin, one.end, sum(STATS[s] for s in one.stats), one.every)
                for one in observers
            )
        )
        self._logits = logits  # written to until the last layer has run
        self._callback: Any = CProgress(self._report)
        params = CPrefillParams(
            i32(self._tokens),
            self.n_tokens,
            f32(logits),
            i32(self._pieces),
            len(pieces),
            self._observers,
            len(observers),
            HIDDEN[hidden],
            None,  # the folder of temporary files
            most_work or 0,
            self._callback,
            None,
        )
        self._p = lib.edgekv_prefill_begin(ctx, params)
        self.il = -1

    def _report(self, done: int, total: int, _: Any) -> bool:
        try:  # nothing may travel through the C frames
            if self._progress:
                self._progress(done, total)
            return self._raised is None
        except BaseException as error:
            self._raised = error
            return False

    @contextmanager
    def _interrupts(self) -> Iterator[None]:
        """Ctrl-C is noted instead of raised: it would be raised where a callback begins, and Python
        throws away what leaves a callback.
        """
        if (
            threading.current_thread() is not threading.main_thread()
            or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        ):
            yield
            return

        def note(*_: Any) -> None:
            self._raised = KeyboardInterrupt()

        signal.signal(signal.SIGINT, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def __enter__(self) -> Prefill:
        return self

    def __exit__(self, *_: object) -> None:
        if self._p:
            lib.edgekv_prefill_free(self._p)
            self._p = None
        self._callback = self._progress = None  # they hold this object, and whoever asked for it

    @property
    def n_head(self) -> int:
        """Query heads of the layer in work."""
        return self._store.layers[self.il].n_head

    @property
    def by_layer(self) -> bool:
        return bool(lib.edgekv_prefill_by_layer(self._p))

    @property
    def score_ms(self) -> float:
        return float(lib.edgekv_prefill_score_ms(self._p))

    @property
    def work(self) -> Work:
        """What products with weights and attention have done so far."""
        found = (c_double * 6)()
        lib.edgekv_prefill_work(self._p, found)
        return dict(zip(WORK, zip(found[::2], found[1::2], strict=True), strict=True))

    def run(self, il: int) -> None:
        """Compute layer il; layers come in order and each must be kept before the next."""
        try:
            with self._interrupts():
                lib.edgekv_prefill_run(self._p, il)
        finally:
            raised, self._raised = self._raised, None
            if raised:
                raise raised from None
        self.il = il

    def hidden(self) -> NDArray[np.float32]:
        """float32 [n, n_embd]: hidden states of the prompt's last tokens, once the last layer has
        run, where `edgekv.native.mtp.keep_hidden` has asked for them.
        """
        model = llama_cpp.llama_get_model(self._store.ctx)
        n = lib.edgekv_prefill_hidden(self._p, None)
        out = np.empty((n, llama_cpp.llama_model_n_embd_out(model)), np.float32)
        lib.edgekv_prefill_hidden(self._p, out)
        return out

    def pause(self) -> None:
        """Inside of `progress`: the conversation is as before the prompt, until `resume`, and may
        wait in a `Place` while others use the context.

        Raises BadInput if another prompt of the context waits already.
        """
        lib.edgekv_prefill_pause(self._p)

    def resume(self) -> None:
        """The prompt is half read again, and `progress` may return.

        Raises BadInput if the context does not hold the conversation of `pause`. After any error
        the prompt is lost.
        """
        lib.edgekv_prefill_resume(self._p)

    def n_old(self) -> NDArray[np.int32]:
        """int32 [n_head_kv]: rows of earlier turns before this one's, in the layer in work."""
        out = np.empty(self._store.layers[self.il].n_head_kv, np.int32)
        lib.edgekv_prefill_old(self._p, self.il, out)
        return out

    def stat(self, observer: int, name: str) -> NDArray[np.float32]:
        """float32 [n_head_kv, max(n_old) + n_tokens]; see edgekv.methods.LayerStats."""
        n_old = self.n_old()
        out = np.empty((len(n_old), int(n_old.max(initial=0)) + self.n_tokens), np.float32)
        lib.edgekv_prefill_stat(self._p, observer, STATS[name], out)
        return out

    def rows(
        self, head: int, some: NDArray[np.int32] | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """K and V of a head of the layer in work, float32 [n_old + n_tokens, d]; or `some` rows."""
        n = int(self.n_old()[head]) + self.n_tokens if some is None else len(some)
        info = self._store.layers[self.il]
        k, v = np.empty((n, info.d_k), np.float32), np.empty((n, info.d_v), np.float32)
        if some is None:
            lib.edgekv_prefill_rows(self._p, head, k, v)
        else:
            some = np.ascontiguousarray(some, np.int32)
            lib.edgekv_prefill_some_rows(self._p, head, n, some, k, v)
        return k, v

    def some_rows(self, head: int, some: NDArray[np.int32], part: str) -> NDArray[np.float32]:
        """`rows`, but the K ("k") or the V ("v") alone."""
        info = self._store.layers[self.il]
        out = np.empty((len(some), info.d_k if part == "k" else info.d_v), np.float32)
        k, v = (out, None) if part == "k" else (None, out)
        some = np.ascontiguousarray(some, np.int32)
        lib.edgekv_prefill_some_rows(self._p, head, len(some), some, k, v)
        return out

    def predicted_scores(
        self, head: int, weights: NDArray[np.float32], neighbours: bool, blocks: tuple[int, int]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """float32 [n_old + n_tokens] each: what a map of `edgekv.methods.kvzap` (weights
        [n_features + 1]) says of the rows of one head of the layer in work, and KeyDiff's score.
        neighbours: which values of a key RoPE turns together; blocks: see `edgekv.model.rotation`.
        """
        out, diversity = np.empty((2, int(self.n_old()[head]) + self.n_tokens), np.float32)
        weights = np.ascontiguousarray(weights, np.float32)
        map_ = weights, len(weights), neighbours, *blocks
        lib.edgekv_prefill_predict(self._p, head, *map_, out, diversity)
        return out, diversity

    def queries(self, observer: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """An observer's queries before RoPE: mean [n_head, d_k] and covariance [n_head, d_k, d_k],
        float32.

        Raises Unsupported if the model's positions are no plain RoPE.
        """
        heads = (self.queries_of(observer, head) for head in range(self.n_head))
        mean, cov = zip(*heads, strict=True)
        return np.stack(mean), np.stack(cov)

    def queries_of(
        self, observer: int, head: int
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """`queries` of one query head: [d_k] and [d_k, d_k]."""
        d = self._store.layers[self.il].d_k
        mean, cov = np.empty(d, np.float32), np.empty((d, d), np.float32)
        lib.edgekv_prefill_queries(self._p, observer, head, mean, cov)
        return mean, cov

    def drop_queries(self, observer: int) -> None:
        """The layer's queries have been looked at: their memory goes back."""
        lib.edgekv_prefill_drop_queries(self._p, observer)

    @property
    def n_threads(self) -> int:
        """Threads that read a prompt."""
        n: int = llama_cpp.llama_n_threads_batch(self._store.ctx)
        return n

    def rotation(self, n_future: int) -> NDArray[np.float32]:
        """float32 [d_k, d_k]: R such that k . (R q) is the logit of a stored key k for a query q
        before RoPE, with R the mean over the next n_future positions. Raises as `queries`.
        """
        out = np.empty((self._store.layers[self.il].d_k,) * 2, np.float32)
        lib.edgekv_prefill_rotation(self._p, n_future, out)
        return out

    def keep(self, rows: list[NDArray[np.int32]]) -> None:
        """evict: the layer in work keeps these rows of each head, in this order."""
        counts, flat = listed(rows)
        lib.edgekv_prefill_keep(self._p, counts, flat)

    def nearest(
        self, il: int, head: int, gone: NDArray[np.int32], kept: NDArray[np.int32]
    ) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """For each of the rows `gone` the largest cosine that its key has with one of the rows
        `kept`, float32, and which: an index into kept.

        Rows of one head of the layer in work, numbered as in `keep`, or of a finished layer, in the
        order in which `shrink` cuts them.
        """
        gone, kept = np.ascontiguousarray(gone, np.int32), np.ascontiguousarray(kept, np.int32)
        cosine, nearest = np.empty(len(gone), np.float32), np.empty(len(gone), np.int32)
        both = len(gone), gone, len(kept), kept
        lib.edgekv_prefill_nearest(self._p, il, head, *both, cosine, nearest)
        return cosine, nearest

    def merge(self, il: int, head: int, plan: Fold) -> None:
        """merge: rows of one head, numbered as in `nearest`, receive what will be evicted."""
        rows, own, counts, sources, weights = plan
        merge = CMerge(len(rows), i32(rows), f32(own), i32(counts), i32(sources), f32(weights))
        lib.edgekv_prefill_merge(self._p, il, head, merge)

    def shrink(self, il: int, counts: NDArray[np.int32]) -> None:
        """A finished layer shrinks to the first counts[k] rows of each head."""
        counts = np.ascontiguousarray(counts, np.int32)
        lib.edgekv_prefill_shrink(self._p, il, counts)

    def end(self) -> None:
        """All layers are kept: they are the conversation now."""
        lib.edgekv_prefill_end(self._p)
