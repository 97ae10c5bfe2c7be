"""Room: whether the machine has the memory for a prompt, and for llama.cpp's own cache. That one is
allocated for the whole context when a model is loaded, and cleared at once, so one that is larger
than memory ends the process.
"""

from __future__ import annotations

from edgekv.base.machine import memory_free
from edgekv.base.sizes import size_text
from edgekv.errors import BadInput
from edgekv.memory.footprint import F16, WHOLE, PromptBytes, row_bytes
from edgekv.model import facts
from edgekv.model.blueprint import Blueprint
from edgekv.model.header import DAMAGE, Header, file_bytes, opened
from edgekv.model.identity import shape

WORK_ROOM = 2**30
"""Of a process that prepares a model, beside weights: its cache, and hundreds of predictions."""


def check_prompt(need: PromptBytes, n_tokens: int, offloaded: bool) -> None:
    """Raises BadInput if the machine certainly has not the memory to read a prompt of n_tokens.

    offloaded: entries lie in another memory than the CPU's.
    """
    free = memory_free(swap=True)
    more = need.hidden * (not need.waits_there) + need.inputs if offloaded else need.peak - need.old
    if more > free:
        layers = "all layers" if need.way == WHOLE else "one layer"
        raise BadInput(
            f"reading {n_tokens:,} tokens takes {size_text(more)} (kept tokens"
            f" {size_text(need.kept)}, {layers} {size_text(need.layer)}, hidden states"
            f" {size_text(need.hidden)}), and {size_text(free)} are free: give a shorter"
            " prompt, a smaller --kv-ratio or cache type (-ctk, -ctv), or --kv-hidden disk"
        )


def fits_twice(path: str, n_gpu_layers: int) -> bool:
    """Whether weights of the model at `path` may be copied: repacked they are memory of the
    process, and where that has less than the whole model it is ended. In the file they can be read
    again, once for each layer of a long prompt.
    """
    return facts.is_offloaded(n_gpu_layers) or file_bytes(path) <= memory_free(swap=False)


def fits_beside(path: str) -> bool:
    """Whether another process can work with the model at `path` too, while this one loads it."""
    return 2 * file_bytes(path) + WORK_ROOM <= memory_free(swap=False)


def check_whole_cache(
    path: str, n_ctx: int, type_k: int | None, type_v: int | None, compress: bool, n_gpu_layers: int
) -> None:
    """Raises BadInput if the cache certainly does not fit into main memory.

    n_ctx: 0 is what the model was trained with. compress: edgekv's cache is wanted, so this is only
    about models that cannot have it.
    """
    kinds = F16 if type_k is None else int(type_k), F16 if type_v is None else int(type_v)
    free = memory_free(swap=True)
    if facts.is_offloaded(n_gpu_layers) or _at_most(path, n_ctx, *kinds) <= free:
        return
    with Blueprint(path) as blueprint:
        if compress and not blueprint.why:
            return
        n = n_ctx or blueprint.n_ctx_train
        n_bytes = blueprint.context(False, n, *kinds).cache
    if n_bytes > free:
        raise BadInput(
            f"the cache of {n:,} tokens takes {size_text(n_bytes)}, and {size_text(free)} are free:"
            " give a smaller -c, a --kv-ratio below 1, or smaller cache types (-ctk, -ctv);"
            " 'edgekv fit' says what fits"
        )


def _at_most(path: str, n_ctx: int, type_k: int, type_v: int) -> int:
    """Bytes of the cache if every layer has one, from the file's header: quick, and enough for
    nearly everybody. 0 if it cannot be read.
    """
    try:
        with opened(path) as file:
            meta = Header(file).meta
        arch, heads, d_head_k, d_head_v = shape(meta)
        entry = row_bytes(type_k, d_head_k) + row_bytes(type_v, d_head_v)
        return sum(heads) * entry * (n_ctx or int(meta[f"{arch}.context_length"]))
    except (OSError, *DAMAGE):
        return 0  # whoever loads the file says what is wrong with it
