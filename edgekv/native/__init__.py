"""The native library: every ctypes call of the package (native/include/edgekv.h has the contracts).

Importing this module loads edgekv's build of llama.cpp. Its bindings are `edgekv.llama_cpp`; a
stock `llama_cpp` in the same process is another library.
"""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_bool,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_uint32,
    c_void_p,
)
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgekv.errors import BadInput, Cancelled, EdgeKVError, Unsupported
from edgekv.library import lib_dir

if TYPE_CHECKING:
    from edgekv.methods.merge import Plan

ABI = 8
CANCELLED, INVALID, UNSUPPORTED, NO_MEMORY = -1, -2, -3, -4
OUTPUTS = 32
"""Tokens of one step whose logits a compressed context can give."""
HIDDEN = {"f32": 0, "f16": 1, "disk": 2, "device": 3}
STATS = {"mean": 1, "var": 2, "max": 4, "col_entropy": 8, "queries": 16}


def _load() -> Any:
    """The bindings' functions on our library."""
    try:
        from edgekv.llama_cpp import llama_cpp as bindings
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("edgekv."):
            raise  # a package that the bindings need
        raise EdgeKVError(
            "edgekv is not built here: build and install it with 'pip install .'"
        ) from None
    if not hasattr(bindings._lib, "edgekv_abi") or bindings._lib.edgekv_abi() != ABI:
        raise EdgeKVError(
            f"the library in {lib_dir()} is of another edgekv version: build and install again"
        )
    return bindings


llama_cpp = _load()
_lib = llama_cpp._lib


class _Observer(Structure):
    _fields_ = [("begin", c_int32), ("end", c_int32), ("stats", c_uint32), ("every", c_int32)]


class _LayerInfo(Structure):
    _fields_ = [
        (n, c_int32)
        for n in ("n_head", "n_head_kv", "d_k", "d_v", "type_k", "type_v", "n_swa", "bytes_row")
    ]


class _MemoryInfo(Structure):
    _fields_ = [(n, c_int64) for n in ("n_past", "boundary", "bytes_now", "bytes_peak")]


class _ContextBytes(Structure):
    _fields_ = [("cache", c_int64), ("compute", c_int64)]


_Progress = CFUNCTYPE(c_bool, c_int32, c_int32, c_void_p)


class _PrefillParams(Structure):
    _fields_ = [
        ("tokens", POINTER(c_int32)),
        ("n_tokens", c_int32),
        ("pieces", POINTER(c_int32)),
        ("n_pieces", c_int32),
        ("observers", POINTER(_Observer)),
        ("n_observers", c_int32),
        ("hidden", c_int),
        ("dir", c_char_p),
        ("progress", _Progress),
        ("data", c_void_p),
    ]


_I32P, _F32P = POINTER(c_int32), POINTER(c_float)


class _Merge(Structure):
    _fields_ = [
        ("n", c_int32),
        ("rows", _I32P),
        ("own", _F32P),
        ("counts", _I32P),
        ("sources", _I32P),
        ("weights", _F32P),
    ]


def _declare() -> None:
    """Argument and result types of every function that is called below."""
    p = c_void_p
    for name, result, *args in (
        ("last_error", c_char_p),
        ("last_status", c_int),
        ("trim_heap", None),
        ("next_context", None, c_bool),
        ("why_unsupported", c_char_p, p),
        ("has_store", c_bool, p),
        ("check_finite", c_int, p),
        ("context_bytes_get", c_int, p, POINTER(_ContextBytes)),
        ("n_layer", c_int32, p),
        ("layer_get", c_int, p, c_int32, POINTER(_LayerInfo)),
        ("len", c_int, p, c_int32, _I32P),
        ("pos", c_int, p, c_int32, c_int32, _I32P),
        ("rows_f32", c_int, p, c_int32, c_int32, _F32P, _F32P),
        ("rows_bytes", c_int, p, c_int32, c_int32, p, p),
        ("memory_get", c_int, p, POINTER(_MemoryInfo)),
        ("evict", c_int, p, c_int32, _I32P, _I32P),
        ("write_rows", c_int, p, c_int32, c_int32, c_int32, _I32P, _F32P, _F32P),
        ("trim_capacity", c_int, p),
        ("prefill_begin", c_void_p, p, POINTER(_PrefillParams)),
        ("prefill_by_layer", c_bool, p),
        ("prefill_score_ms", c_double, p),
        ("prefill_run", c_int, p, c_int32),
        ("prefill_old", c_int, p, c_int32, _I32P),
        ("prefill_stat", c_int, p, c_int32, c_int, _F32P),
        ("prefill_rows", c_int, p, c_int32, _F32P, _F32P),
        ("prefill_some_rows", c_int, p, c_int32, c_int32, _I32P, _F32P, _F32P),
        (
            "prefill_foretell",
            c_int,
            p,
            c_int32,
            _F32P,
            c_int32,
            c_bool,
            c_int32,
            c_int32,
            _F32P,
            _F32P,
        ),
        ("prefill_queries", c_int, p, c_int32, _F32P, _F32P),
        ("prefill_rotation", c_int, p, c_int32, _F32P),
        ("prefill_keep", c_int, p, _I32P, _I32P),
        ("prefill_shrink", c_int, p, c_int32, _I32P),
        ("prefill_end", c_int, p),
        ("prefill_free", None, p),
        (
            "prefill_nearest",
            c_int,
            p,
            c_int32,
            c_int32,
            c_int32,
            _I32P,
            c_int32,
            _I32P,
            _F32P,
            _I32P,
        ),
        ("prefill_merge", c_int, p, c_int32, c_int32, POINTER(_Merge)),
    ):
        fn = getattr(_lib, "edgekv_" + name)
        fn.restype, fn.argtypes = result, args


_declare()


def _error(status: int) -> EdgeKVError:
    text = (_lib.edgekv_last_error() or b"").decode(errors="replace") or "the native library failed"
    kind = {CANCELLED: Cancelled, INVALID: BadInput, UNSUPPORTED: Unsupported}.get(
        status, EdgeKVError
    )
    return kind(text)


def _check(status: int) -> None:
    if status != 0:
        raise _error(status)


def _i32(x: Any) -> Any:
    return x.ctypes.data_as(_I32P)


def _f32(x: Any) -> Any:
    return None if x is None else x.ctypes.data_as(_F32P)


# ---- contexts


@dataclass(frozen=True)
class LayerInfo:
    """Shape of one layer's cache; `bytes_row` is one K row and one V row of one KV head, with ALiBi
    a float more.
    """

    n_head: int
    n_head_kv: int
    d_k: int
    d_v: int
    type_k: int
    type_v: int
    n_swa: int
    bytes_row: int


@dataclass(frozen=True)
class MemoryInfo:
    """n_past: tokens that went in; boundary: where the tail begins; bytes of the store now and at
    the peak, see edgekv.h.
    """

    n_past: int
    boundary: int
    bytes_now: int
    bytes_peak: int


def next_context(on: bool) -> None:
    """The next llama.cpp context that this thread creates gets a ragged store."""
    _lib.edgekv_next_context(on)


def context_error() -> str:
    """Why the context that `next_context` announced could not be created, one line; empty if
    llama.cpp itself refused it.

    After a `llama_decode` that failed: why it did.
    """
    return (_lib.edgekv_last_error() or b"").decode(errors="replace")


def trim_heap() -> None:
    """Give memory that was freed back to the system."""
    _lib.edgekv_trim_heap()


def context_bytes(ctx: Any) -> tuple[int, int]:
    """Bytes of a llama_context on all devices: its cache (llama.cpp's own, or the store) and
    compute buffers; without weights (no_alloc) what they would be.
    """
    bytes_ = _ContextBytes()
    _check(_lib.edgekv_context_bytes_get(ctx, bytes_))
    return bytes_.cache, bytes_.compute


def why_unsupported(model: Any) -> str | None:
    """Why this llama_model keeps llama.cpp's own cache, one line; None if it need not."""
    why = _lib.edgekv_why_unsupported(model)
    return why.decode() if why else None


def check_finite(ctx: Any) -> None:
    """Raise BadInput if llama.cpp's own cache in this context holds values that are no numbers."""
    _check(_lib.edgekv_check_finite(ctx))


class Store:
    """The ragged store of a llama_context."""

    def __init__(self, ctx: Any) -> None:
        self.ctx = ctx
        self.layers = [self._layer(il) for il in range(_lib.edgekv_n_layer(ctx))]
        self.n_head_kv = max(x.n_head_kv for x in self.layers)

    @staticmethod
    def of(ctx: Any) -> Store | None:
        """The store of a context, None if it has llama.cpp's own cache."""
        return Store(ctx) if _lib.edgekv_has_store(ctx) else None

    def _layer(self, il: int) -> LayerInfo:
        info = _LayerInfo()
        _check(_lib.edgekv_layer_get(self.ctx, il, info))
        return LayerInfo(*(getattr(info, n) for n, *_ in _LayerInfo._fields_))

    def memory(self) -> MemoryInfo:
        info = _MemoryInfo()
        _check(_lib.edgekv_memory_get(self.ctx, info))
        return MemoryInfo(*(getattr(info, n) for n, *_ in _MemoryInfo._fields_))

    def length(self, il: int) -> NDArray[np.int32]:
        """int32 [n_head_kv]: rows that attention reads."""
        out = np.empty(self.layers[il].n_head_kv, np.int32)
        _check(_lib.edgekv_len(self.ctx, il, _i32(out)))
        return out

    def positions(self, il: int, head: int) -> NDArray[np.int32]:
        """int32 [rows]: the token index of each row, in the order of the store."""
        out = np.empty(self.length(il)[head], np.int32)
        _check(_lib.edgekv_pos(self.ctx, il, head, _i32(out)))
        return out

    def rows(
        self, il: int, head: int, some: NDArray[np.int32] | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """K [rows, d_k] and V [rows, d_v] of one head as float32; or of `some` of its rows."""
        n, info = int(self.length(il)[head]), self.layers[il]
        k, v = np.empty((n, info.d_k), np.float32), np.empty((n, info.d_v), np.float32)
        _check(_lib.edgekv_rows_f32(self.ctx, il, head, _f32(k), _f32(v)))
        return (k, v) if some is None else (k[some], v[some])

    def row_bytes(self, il: int, head: int) -> tuple[bytes, bytes]:
        """K and V of one head as they are stored."""
        import gguf

        n, info = int(self.length(il)[head]), self.layers[il]
        buffers = []
        for kind, d in ((info.type_k, info.d_k), (info.type_v, info.d_v)):
            block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
            buffers.append(ctypes.create_string_buffer(max(n * d // block * size, 1)))
        _check(_lib.edgekv_rows_bytes(self.ctx, il, head, *buffers))
        return tuple(b.raw if n else b"" for b in buffers)  # type: ignore[return-value]

    def evict(self, il: int, keep: list[NDArray[np.int32]]) -> None:
        """Keep only these rows (row numbers per head), in this order."""
        counts, rows = _lists(keep)
        _check(_lib.edgekv_evict(self.ctx, il, _i32(counts), _i32(rows)))

    def write(
        self,
        il: int,
        head: int,
        rows: NDArray[np.int32],
        keys: NDArray[np.float32],
        values: NDArray[np.float32],
    ) -> None:
        """These rows of one head become keys [n, d_k] and values [n, d_v], as the cache's type
        holds them. Raises BadInput if that cannot.
        """
        rows = np.ascontiguousarray(rows, np.int32)
        keys, values = (np.ascontiguousarray(x, np.float32) for x in (keys, values))
        assert keys.shape == (len(rows), self.layers[il].d_k) and values.shape == (
            len(rows),
            self.layers[il].d_v,
        )
        _check(
            _lib.edgekv_write_rows(
                self.ctx, il, head, len(rows), _i32(rows), _f32(keys), _f32(values)
            )
        )

    def trim_capacity(self) -> None:
        """Room that no row uses goes back to the allocator."""
        _check(_lib.edgekv_trim_capacity(self.ctx))


def _lists(keep: list[NDArray[np.int32]]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    counts = np.array([len(x) for x in keep], np.int32)
    rows = (
        np.concatenate([np.asarray(x, np.int32) for x in keep])
        if counts.sum()
        else np.zeros(1, np.int32)
    )
    return counts, np.ascontiguousarray(rows)


# ---- prefill


Observer = tuple[int, int, tuple[str, ...]]
"""(begin, end, names of STATS): tokens whose queries are observed, and the statistics of them."""


class Prefill:
    """A prompt that is read layer by layer. Use as a context manager: leaving it without `end`
    forgets the prompt.

    tokens: the prompt; pieces: token lists, each read behind the prompt, seeing no other piece and
    never stored.
    observers: (begin, end, names of STATS), tokens counted through the prompt and all pieces;
    every: `queries` looks at one of so many tokens, for each of them. progress(done, total) is
    called between chunks; if it raises, reading stops and the exception comes out of `run`.
    """

    def __init__(
        self,
        ctx: Any,
        tokens: Iterable[int],
        observers: list[Observer],
        *,
        pieces: Sequence[Sequence[int]] = (),
        every: Sequence[int] = (),
        hidden: str = "f32",
        hidden_dir: str | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        tokens = list(tokens)
        self.n_tokens = len(tokens)
        self._store = Store(ctx)
        self._raised: BaseException | None = None
        self._progress = progress
        self._tokens = np.asarray(tokens + [t for piece in pieces for t in piece], np.int32)
        self._pieces = np.asarray([len(piece) for piece in pieces] or [0], np.int32)
        self._observers = (_Observer * max(len(observers), 1))(
            *(
                _Observer(a, b, sum(STATS[s] for s in stats), step)
                for (a, b, stats), step in zip(
                    observers, every or [1] * len(observers), strict=True
                )
            )
        )
        self._callback: Any = _Progress(self._report)
        params = _PrefillParams(
            _i32(self._tokens),
            self.n_tokens,
            _i32(self._pieces),
            len(pieces),
            self._observers,
            len(observers),
            HIDDEN[hidden],
            hidden_dir.encode() if hidden_dir else None,
            self._callback,
            None,
        )
        self._p = _lib.edgekv_prefill_begin(ctx, params)
        if not self._p:
            raise _error(_lib.edgekv_last_status())
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
            _lib.edgekv_prefill_free(self._p)
            self._p = None
        self._callback = self._progress = None  # they hold this object, and whoever asked for it

    @property
    def by_layer(self) -> bool:
        return bool(_lib.edgekv_prefill_by_layer(self._p))

    @property
    def score_ms(self) -> float:
        return float(_lib.edgekv_prefill_score_ms(self._p))

    def run(self, il: int) -> None:
        """Compute layer il; layers come in order and each must be kept before the next."""
        with self._interrupts():
            status = _lib.edgekv_prefill_run(self._p, il)
        if self._raised:
            raised, self._raised = self._raised, None
            raise raised
        _check(status)
        self.il = il

    def n_old(self) -> NDArray[np.int32]:
        """int32 [n_head_kv]: rows of earlier turns in front of this turn's, in the layer in
        work.
        """
        out = np.empty(self._store.layers[self.il].n_head_kv, np.int32)
        _check(_lib.edgekv_prefill_old(self._p, self.il, _i32(out)))
        return out

    def stat(self, observer: int, name: str) -> NDArray[np.float32]:
        """float32 [n_head_kv, max(n_old) + n_tokens]; see edgekv.methods.LayerStats for the
        meaning.
        """
        n_old = self.n_old()
        out = np.empty((len(n_old), int(n_old.max(initial=0)) + self.n_tokens), np.float32)
        _check(_lib.edgekv_prefill_stat(self._p, observer, STATS[name], _f32(out)))
        return out

    def rows(
        self, head: int, some: NDArray[np.int32] | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """K and V of one head of the layer in work, [n_old + n_tokens, d], float32; or of `some` of
        its rows.
        """
        n, info = (
            int(self.n_old()[head]) + self.n_tokens if some is None else len(some),
            self._store.layers[self.il],
        )
        k, v = np.empty((n, info.d_k), np.float32), np.empty((n, info.d_v), np.float32)
        if some is None:
            _check(_lib.edgekv_prefill_rows(self._p, head, _f32(k), _f32(v)))
        else:
            _check(
                _lib.edgekv_prefill_some_rows(
                    self._p, head, n, _i32(np.ascontiguousarray(some, np.int32)), _f32(k), _f32(v)
                )
            )
        return k, v

    def foretell(
        self, head: int, weights: NDArray[np.float32], neighbours: bool, blocks: tuple[int, int]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """float32 [n_old + n_tokens] each: what a map of `edgekv.methods.kvzap` (weights
        [n_features + 1]) says of the rows of one head of the layer in work, and KeyDiff's score.
        neighbours: which values of a key RoPE turns together; blocks: see `edgekv.model.rotation`.
        """
        out, unlike = np.empty((2, int(self.n_old()[head]) + self.n_tokens), np.float32)
        weights = np.ascontiguousarray(weights, np.float32)
        _check(
            _lib.edgekv_prefill_foretell(
                self._p,
                head,
                _f32(weights),
                len(weights),
                neighbours,
                *blocks,
                _f32(out),
                _f32(unlike),
            )
        )
        return out, unlike

    def queries(self, observer: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """An observer's queries before RoPE: mean [n_head, d_k] and covariance [n_head, d_k, d_k],
        float32.

        Raises Unsupported if the model's positions are no plain RoPE.
        """
        info = self._store.layers[self.il]
        mean, cov = (
            np.empty((info.n_head, info.d_k), np.float32),
            np.empty((info.n_head, info.d_k, info.d_k), np.float32),
        )
        _check(_lib.edgekv_prefill_queries(self._p, observer, _f32(mean), _f32(cov)))
        return mean, cov

    def rotation(self, n_future: int) -> NDArray[np.float32]:
        """float32 [d_k, d_k]: R such that k . (R q) is the logit of a stored key k for a query q
        before RoPE, with R the mean over the next n_future positions. Raises as `queries`.
        """
        out = np.empty((self._store.layers[self.il].d_k,) * 2, np.float32)
        _check(_lib.edgekv_prefill_rotation(self._p, n_future, _f32(out)))
        return out

    def keep(self, rows: list[NDArray[np.int32]]) -> None:
        """evict: the layer in work keeps these rows of each head, in this order."""
        counts, flat = _lists(rows)
        _check(_lib.edgekv_prefill_keep(self._p, _i32(counts), _i32(flat)))

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
        _check(
            _lib.edgekv_prefill_nearest(
                self._p,
                il,
                head,
                len(gone),
                _i32(gone),
                len(kept),
                _i32(kept),
                _f32(cosine),
                _i32(nearest),
            )
        )
        return cosine, nearest

    def merge(self, il: int, head: int, plan: Plan) -> None:
        """merge: rows of one head, numbered as in `nearest`, receive what is going to be
        evicted.
        """
        _check(
            _lib.edgekv_prefill_merge(
                self._p,
                il,
                head,
                _Merge(
                    len(plan.rows),
                    _i32(plan.rows),
                    _f32(plan.own),
                    _i32(plan.counts),
                    _i32(plan.sources),
                    _f32(plan.weights),
                ),
            )
        )

    def shrink(self, il: int, counts: NDArray[np.int32]) -> None:
        """A finished layer shrinks to the first counts[k] rows of each head."""
        counts = np.ascontiguousarray(counts, np.int32)
        _check(_lib.edgekv_prefill_shrink(self._p, il, _i32(counts)))

    def end(self) -> None:
        """All layers are kept: they are the conversation now."""
        _check(_lib.edgekv_prefill_end(self._p))
