"""The options of `KVConfig` as `edgekv.Llama` takes them, for type checkers.

Generated from the options in `choice/config.py` by `python -m edgekv_lab.commands.docs`.
"""

from __future__ import annotations

from typing import Any, TypedDict


class CacheArguments(TypedDict, total=False):
    kv_ratio: float
    kv_budget: Any
    kv_budget_mb: float | None
    kv_memory: int | str | None
    kv_method: str
    kv_profile: str | None
    kv_sink: int
    kv_window: int
    kv_min_tokens: int
    kv_hidden: str
    kv_tail: int
    kv_prefill_memory: int | str | None
    kv_fast_prefill: bool
    kv_checkpoints: bool
    kv_archive: str
    kv_recall: float | str
    kv_seed: int
