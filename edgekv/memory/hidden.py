"""Hidden states: where a prompt's wait if nobody says it (`auto`).

Read layer by layer, a prompt has 4 x n_embd bytes a token waiting between two layers. In a model
whose few attention layers have few KV heads that is as much as its full cache. So each prompt takes
the way whose peak is smaller by enough to be worth it. On a GPU they wait in its own memory where
that has room: through main memory a prompt took 1.6 times as long (docs/results/gpu.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from edgekv.memory.footprint import (
    WHOLE,
    Extent,
    PromptBytes,
    Surroundings,
    f16_full_bytes,
    prompt_bytes,
)

if TYPE_CHECKING:
    from edgekv.native import LayerInfo

AUTO = "auto"
EXACT = "f32"
DEVICE = "device"
"""As exact, in the memory of the device that has all layers."""
WAYS = (EXACT, WHOLE, "f16")
"""What `auto` chooses from. Reading all layers at once is as exact as f32, so it goes before f16,
which rounds. A file is never chosen: it writes to a disk where nobody expects it.
"""
ENOUGH = 0.5
"""A peak of this share of the full f16 cache is small enough for f32."""
SPARE = 2**28
"""Bytes of a device that nothing is planned for: pools of its backend, other programs' windows."""
WORTH = 0.1
"""Share of the full f16 cache by which another way has to be smaller: rounded states cost about as
much as a q8_0 cache does, and a dense Llama would save 6 % of its cache at ratio 0.5.
"""


def choose(peaks: Mapping[str, int], n_bytes_full: int) -> str:
    """One of WAYS. peaks: bytes of each; n_bytes_full: of a full f16 cache of the same tokens."""
    best = EXACT
    for way in WAYS[1:]:
        is_large = peaks[best] > ENOUGH * n_bytes_full
        if is_large and peaks[way] < peaks[best] - WORTH * n_bytes_full:
            best = way
    return best


def where_offloaded(need: PromptBytes, n_bytes_free: int) -> str:
    """DEVICE or EXACT. need: what the prompt takes with DEVICE; n_bytes_free: on the device now."""
    return DEVICE if need.peak - need.old + SPARE <= n_bytes_free else EXACT


def definite(wish: str) -> str:
    """Where hidden states wait if there is nothing to choose by."""
    return EXACT if wish == AUTO else wish


def planned(
    wish: str,
    layers: Sequence[LayerInfo],
    what: Extent,
    n_rows: int,
    around: Surroundings,
    n_seen: int,
    products: tuple[int, int] = (0, 0),
) -> PromptBytes:
    """What reading a prompt takes, by the way that is going to be taken.

    wish: where hidden states are to wait, or AUTO; n_seen: tokens of the conversation with this
    prompt; products: see `native.product_bytes`; n_rows: see `prompt_bytes`. Where nothing is
    evicted AUTO changes nothing.
    """
    words, weights = products
    evicts = n_rows < around.n_old + what.n_tokens
    find = partial(prompt_bytes, layers, what, n_rows, around)
    if not evicts:
        return find(hidden=definite(wish), words=words + weights)
    full = f16_full_bytes(layers, n_seen)
    if wish == AUTO:
        ways = {way: find(hidden=way, words=words) for way in WAYS}
        peaks = {way: found.peak - found.merge for way, found in ways.items()}  # the same for all
        wish = choose(peaks, full)
    return _with_weights(partial(find, hidden=wish), words, weights, full)


def _with_weights(
    find: Callable[..., PromptBytes], words: int, weights: int, full: int
) -> PromptBytes:
    """What reading takes where products keep weights as far as the peak stays below a full f16
    cache: memory is what compression is for.
    """
    least, most = find(words=words), find(words=words + weights)
    beyond = max(most.peak - max(full, least.peak), 0)
    return find(words=words + max(weights - beyond, 0)) if beyond else most
