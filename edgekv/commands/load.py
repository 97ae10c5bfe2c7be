"""From options to a loaded model: where alone commands meet the engine, and tests put a fake."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgekv.base.defaults import CTX_STEP, whole_ctx
from edgekv.base.pace import Pace
from edgekv.chat.drafts import Drafting
from edgekv.choice.config import MOST
from edgekv.commands import first_use, room, terminal
from edgekv.commands.later import Later
from edgekv.commands.options import EngineOptions, SamplingOptions
from edgekv.errors import BadInput

if TYPE_CHECKING:
    from edgekv import Llama

NONE: Mapping[str, str] = {}


def model_path(name: str) -> str:
    """The file that a model's name means: see `edgekv.models.found`; a path is remembered for
    `edgekv models`. Raises EdgeKVError.
    """
    from edgekv.models.found import remembered
    from edgekv.models.names import path_of

    path = path_of(name, terminal.status)
    if path == name:
        remembered.opened(path)
    return path


def load_llama(
    options: EngineOptions, later: Later | None = None, documents: Mapping[str, str] = NONE
) -> Llama:
    """The model with its context, after the first use also with its profile. later: see `learn`.
    documents: texts by their names, which will be read.

    Raises EdgeKVError; for documents that the context has no room for before anything takes long.
    """
    with terminal.killable():
        from edgekv import Llama
        from edgekv.model import kind
        from edgekv.model.facts import check_gguf
    if options.kv.compresses and options.loading.rpc:
        from edgekv.model.rpc import UNCOMPRESSED

        raise BadInput(UNCOMPRESSED)
    path = model_path(options.model)
    check_gguf(path)
    kind.check(path, writes=True)  # before a profile is made
    options.loading.check(path)
    if options.ctx_size % CTX_STEP and not (later and later.has_begun):
        terminal.status(
            f"edgekv: -c {options.ctx_size:,} is taken as {whole_ctx(options.ctx_size):,}: contexts"
            f" are multiples of {CTX_STEP} tokens"
        )

    def check_room() -> None:
        overrides = options.loading.arguments()["kv_overrides"]
        with Llama(path, vocab_only=True, kv_overrides=overrides, verbose=False) as words:
            room.check(words, whole_ctx(options.ctx_size), documents)

    learn(options, later, check_room if documents else None)
    with terminal.killable():
        try:
            llm = Llama(path, **llama_arguments(options))
        except MemoryError:
            raise BadInput(
                "the machine has not the memory for these settings: give a smaller -b or -c"
            ) from None
    if options.threads is None:
        llm.pace = Pace(count_threads(None))
    room.check(llm, llm.n_ctx(), documents)
    return llm


def llama_arguments(options: EngineOptions) -> dict[str, Any]:
    """Keyword arguments of `Llama`."""
    threads = count_threads(options.threads)
    seed = options.seed if options.seed >= 0 else random.SystemRandom().getrandbits(31)
    return dict(
        kv=replace(options.kv, seed=min(max(options.seed, 0), MOST)),
        n_ctx=whole_ctx(options.ctx_size),
        n_batch=options.batch_size,
        n_ubatch=options.ubatch_size,
        n_threads=threads,
        n_threads_batch=(
            threads if options.threads_batch is None else count_threads(options.threads_batch)
        ),
        n_gpu_layers=options.gpu_layers,
        flash_attn=options.flash_attn != "off",  # a quantised V cache needs it, so auto is on
        type_k=_type(options.cache_type_k),
        type_v=_type(options.cache_type_v),
        seed=seed,
        verbose=options.verbose,
        **options.loading.arguments(),
        **_drafts(options.drafts).arguments(),
    )


def _drafts(options: Drafting) -> Drafting:
    """With the file of the draft model. Raises EdgeKVError."""
    name = options.draft_model
    return replace(options, draft_model=model_path(name)) if name else options


def learn(
    options: EngineOptions, later: Later | None = None, before: Callable[[], None] | None = None
) -> None:
    """Make the model's profile if `options` want one and there is none; Ctrl-C leaves it for the
    next time. later: does what need not be waited for. before: called before it is made.
    """
    threads = count_threads(options.threads)
    first_use.make_profile(options, model_path(options.model), threads, later, before)


def build_info() -> dict[str, Any]:
    """What is installed and loaded: see `edgekv.model.facts.build_info`."""
    from edgekv.model import facts

    return facts.build_info()


def model_info(path: str) -> dict[str, Any]:
    """A model file's shape: see `edgekv.model.facts.model_info`. Raises EdgeKVError."""
    from edgekv.model import facts

    return facts.model_info(path)


def cache_types() -> dict[str, tuple[int, int, int]]:
    """name -> (ggml type, values of a block, bytes of a block)."""
    from edgekv.model import facts

    return facts.cache_types


def _type(name: str | None) -> int | None:
    """ggml's number of a cache type, None for what the method picks."""
    return None if name is None else cache_types()[name][0]


def end_tokens(llm: Llama) -> list[int]:
    """The tokens at which the model would stop: see `edgekv.chat.specials.end_tokens`."""
    from edgekv.chat import specials

    return specials.end_tokens(llm)


def sampling_arguments(llm: Llama, sampling: SamplingOptions) -> dict[str, Any]:
    """Keyword arguments of `create_completion` and `create_chat_completion`."""
    return {
        "max_tokens": sampling.predict if sampling.predict > 0 else None,
        "temperature": sampling.temp,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repeat_penalty,
        "logit_bias": (
            dict.fromkeys(end_tokens(llm), float("-inf")) if sampling.ignore_eos else None
        ),
    }


def count_threads(wish: int | None) -> int:
    """Threads for `-t wish`: 0 and less are all processors, None the physical cores."""
    if wish is not None and wish > 0:
        return wish
    processors = _processors()
    cores = {
        _read(f"/sys/devices/system/cpu/cpu{i}/topology/thread_siblings") for i in processors
    } - {""}
    if wish is not None:
        return len(processors)
    return len(cores) or (len(processors) if len(processors) <= 4 else len(processors) // 2)


def _processors() -> set[int]:
    """The processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
