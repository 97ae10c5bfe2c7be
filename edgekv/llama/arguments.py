"""The arguments of `edgekv.Llama` by name and type, for editors and type checkers.

Nothing is checked with these; tests hold them against `KVConfig` and the parent's signature.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from edgekv.choice.config import KVConfig, argument_type
from edgekv.llama.cache_arguments import CacheArguments

if TYPE_CHECKING:
    from edgekv.llama_cpp.llama_chat_format import LlamaChatCompletionHandler
    from edgekv.llama_cpp.llama_speculative import LlamaDraftModel
    from edgekv.llama_cpp.llama_tokenizer import BaseLlamaTokenizer


class Arguments(CacheArguments, total=False):
    """Those of llama-cpp-python that edgekv passes on, and the options of the cache."""

    n_gpu_layers: int
    split_mode: int
    main_gpu: int
    tensor_split: Sequence[float] | None
    vocab_only: bool
    use_mmap: bool
    use_mlock: bool
    seed: int
    n_ctx: int
    n_batch: int
    n_ubatch: int
    n_threads: int | None
    n_threads_batch: int | None
    rope_scaling_type: int | None
    pooling_type: int
    attention_type: int
    rope_freq_base: float
    rope_freq_scale: float
    yarn_ext_factor: float
    yarn_attn_factor: float
    yarn_beta_fast: float
    yarn_beta_slow: float
    yarn_orig_ctx: int
    logits_all: bool
    embedding: bool
    offload_kqv: bool
    op_offload: bool | None
    swa_full: bool | None
    no_perf: bool
    last_n_tokens_size: int
    lora_base: str | None
    numa: bool | int
    chat_format: str | None
    chat_handler: LlamaChatCompletionHandler | None
    draft_model: LlamaDraftModel | None
    tokenizer: BaseLlamaTokenizer | None
    type_k: int | None
    type_v: int | None
    spm_infill: bool
    verbose: bool


def signature(own: Callable[..., None], parents: Callable[..., None]) -> inspect.Signature:
    """Of an `__init__` that takes `KVConfig`'s options and its parent's arguments by `**kwargs`."""
    found = {
        name: one
        for name, one in inspect.signature(own).parameters.items()
        if one.kind is not one.VAR_KEYWORD
    }
    by_name = inspect.Parameter.KEYWORD_ONLY
    for one in fields(KVConfig):
        name = f"kv_{one.name}"
        found[name] = inspect.Parameter(
            name, by_name, default=one.default, annotation=argument_type(one)
        )
    for name, parameter in inspect.signature(parents).parameters.items():
        if parameter.kind is by_name:
            found.setdefault(name, parameter)
    return inspect.Signature(list(found.values()))
