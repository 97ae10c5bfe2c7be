"""A model through the same public face, by the unpatched bindings or by edgekv."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def llama(
    model: str, n_ctx: int, n_threads: int, cache: Mapping[str, Any] | None, **more: Any
) -> Any:
    """cache: options of edgekv's cache; None: the unpatched bindings, and not edgekv. more: what
    both sides take."""
    shared = dict(
        n_ctx=n_ctx,
        n_threads=n_threads,
        n_threads_batch=n_threads,
        flash_attn=True,
        verbose=False,
    )
    if cache is None:
        from edgekv.llama_cpp import Llama

        return Llama(model, **{**shared, **more})
    from edgekv import Llama as Compressed

    return Compressed(model, **{**shared, **more, **cache})
