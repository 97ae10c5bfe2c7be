"""What a conversation's cache holds and costs, for people and programs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Progress = Callable[[int, int], None]
"""progress(done, total) is told how far work has come, in units that take about equally long.

The first call says what was done before, by an earlier run: no time was spent on that. Raising in
it stops the work.
"""


@dataclass(frozen=True)
class KVStats:
    """What a conversation's cache holds and costs.

    Bytes are read from the backend's buffers, kept tokens from the store that attention reads.
    """

    method: str
    """The method that ran: of 'auto' the one that it chose."""
    ratio: float
    """Share of the full f16 cache's bytes that was asked for; with kv_memory what it left the last
    prompt."""
    n_seen: int
    """Tokens of the conversation."""
    n_kept: float
    """Kept tokens per layer and KV head, the mean over the layers that attend to everything."""
    kept: NDArray[np.int32]
    """[n_layer, n_head_kv] tokens that each head keeps (0 where a layer has fewer heads)."""
    n_bytes: int
    """K and V now, as allocated: room for the next tokens included, of an uncompressed cache all.
    """
    n_bytes_peak: int
    """The most that K, V, the layer in work, hidden states and buffers took together since the
    conversation began."""
    n_bytes_full: int
    """K and V of all tokens seen in a full f16 cache (of sliding-window layers their window)."""
    prefill_ms: float
    """Reading the last prompt, compression included."""
    compress_ms: float
    """Scoring, selecting and moving tokens, as part of that: the sum of `stage_ms`."""
    mode: str
    """'layers', 'full then compress' or 'uncompressed'."""
    hidden: str = ""
    """Where hidden states of the last prompt waited: 'f32', 'f16', 'disk', 'device' or 'whole';
    empty if no prompt was compressed yet."""
    type_k: str = "f16"
    """Cache type of K."""
    type_v: str = "f16"
    """Cache type of V."""
    per_f16: float = 1.0
    """Tokens in these types that take the bytes of one in f16."""
    n_bytes_used: int = 0
    """The part of `n_bytes` that kept tokens take, which attention reads."""
    n_bytes_limit: int | None = None
    """What `kv_memory` allows."""
    n_bytes_reserved: int = 0
    """The part of `n_bytes_limit` that is kept free for new tokens and for sliding windows."""
    n_ctx: int = 0
    """Tokens that the context can hold."""
    note: str = ""
    """Why the cache cannot be compressed or its graph not be cut, one line; else empty."""
    peak_note: str = ""
    """One line if the last prompt took more than a full f16 cache at its peak; else empty."""
    profile: str = ""
    """The file of the profile that the method used; empty: none."""
    why: str = ""
    """Why 'auto' chose this method; empty if the method was named."""
    measured: str = ""
    """How near to the full cache that came when the model was prepared, one line, or empty."""
    n_bytes_recurrent: int = 0
    """State of recurrent layers, whose size does not depend on the tokens; not part of `n_bytes`.
    """
    n_bytes_checkpoints: int = 0
    """Saved states, from which an answer is written again; not part of `n_bytes`."""
    n_bytes_archive: int = 0
    """Rows of all tokens in the archive's file; not part of `n_bytes`, which has the index."""
    n_bytes_index: int = 0
    """The part of `n_bytes` by which tokens are recalled."""
    n_bytes_recalled: int = 0
    """Rows that new tokens looked up in the archive since the conversation began or was loaded."""
    recall: float = 0.0
    """Share of the tokens that each new token looks up; 0: none."""
    recall_gain: float | None = None
    """How many times as near to the full cache that came when the model was prepared; None where it
    was not measured, or cannot be had now."""
    n_bytes_draft: int = 0
    """K and V of the draft model, of all conversations; not part of `n_bytes`."""
    stage_ms: Mapping[str, float] = field(default_factory=dict)
    """What each of STAGES took of the last prompt; empty if nothing was compressed."""


Work = Mapping[str, tuple[float, float]]
"""What the CPU's kernels did of reading a prompt: for each of WORK, milliseconds and multiply-adds.
What llama.cpp computes itself is not there.
"""
WORK = ("weights", "levels", "attention")
"""Weights: products with quantised ones; levels: such products in 8 bits."""
STAGES = ("observe", "score", "budget", "select", "merge", "evict")
"""Observe: statistics of attention, native, while the prompt is read (a probe's own reading is no
part of it); the others come after each layer.
"""


class StageClock:
    """Milliseconds of one prompt by stage: `with clock("score"): ...`"""

    def __init__(self) -> None:
        self.ms = dict.fromkeys(STAGES, 0.0)
        self.work: Work = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.ms[stage] += 1e3 * (time.perf_counter() - begin)
