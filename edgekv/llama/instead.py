"""Another cache for a model that is loaded: the one that a saved conversation was made with, or the
one that the model would be loaded with now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from typing import Any

from edgekv.choice.config import KVConfig
from edgekv.conversation.session import CacheKind
from edgekv.errors import BadInput
from edgekv.llama.loaded import LoadedModel
from edgekv.memory.dense import can_have
from edgekv.memory.room import check_whole_cache
from edgekv.model import facts

_REPLACED = (
    *("_kv_config", "settings", "_kv_types", "_kv_note"),
    *("_ctx", "engine", "n_tokens", "_requires_eval"),
)
_PARAMS = ("type_k", "type_v", "flash_attn_type", "n_outputs_max", "n_seq_max", "kv_unified")
"""Parameters of a context that depend on its cache."""
_F16 = facts.cache_types["f16"][0]


def instead(llm: LoadedModel, config: KVConfig, cache: CacheKind) -> AbstractContextManager[None]:
    """A `with` block in which `llm` has another cache and its options; where its present cache will
    do, that stays with its conversation.

    If the block fails, all is as before. Raises EdgeKVError if the model cannot have the cache.
    """
    return _changed(llm, config, (cache.type_k, cache.type_v), lambda: cache)


def renewed(llm: LoadedModel) -> AbstractContextManager[None]:
    """The same with what the model would be loaded with now: its profile may be a newer one."""
    return _changed(llm, llm._kv_config, llm._kv_types, lambda: _of_load(llm))


@contextmanager
def _changed(
    llm: LoadedModel,
    config: KVConfig,
    types: tuple[int | None, int | None],
    cache_of: Callable[[], CacheKind],
) -> Iterator[None]:
    """types: those that are named. cache_of: called when the settings have changed."""
    before, fresh = _Before(llm), None
    try:
        llm._kv_types = types
        settings = llm._kv_resolve(config, llm.model_path, anew=True)
        llm._kv_config, llm.settings = config, settings
        cache = cache_of()
        archives = settings.archive_folder is not None, settings.recall
        if cache != _present(llm) or (llm.engine and llm.engine.archives != archives):
            fresh = _context(llm, cache)
            llm._kv_enter(fresh, llm.settings.stores)
        elif llm.engine is not None:
            llm.engine.settings = llm.settings
        llm._kv_check_memory(llm.settings)
        yield
    except BaseException:
        before.put_back()
        if fresh is not None:
            fresh.close()
        raise
    if fresh is not None:
        before.values["_ctx"].close()
        llm._stack.enter_context(closing(fresh))


class _Before:
    """What another cache replaces."""

    def __init__(self, llm: LoadedModel) -> None:
        self._llm = llm
        self.values = {name: getattr(llm, name) for name in _REPLACED}
        self._params = {name: getattr(llm.context_params, name) for name in _PARAMS}
        self._tokens = llm.input_ids[: llm.n_tokens].copy()

    def put_back(self) -> None:
        llm = self._llm
        for name, value in self.values.items():
            setattr(llm, name, value)
        for name, value in self._params.items():
            setattr(llm.context_params, name, value)
        llm.input_ids[: len(self._tokens)] = self._tokens
        if llm.engine is not None:
            llm.engine.settings = llm.settings


def _present(llm: LoadedModel) -> CacheKind:
    params = llm.context_params
    kinds = int(params.type_k), int(params.type_v), int(params.flash_attn_type)
    return CacheKind(*kinds, llm.engine is not None)


def _of_load(llm: LoadedModel) -> CacheKind:
    """The present cache with the types that these settings pick."""
    picks = llm._kv_pick_types(llm.model_path, llm.model_params.n_gpu_layers)
    type_k, type_v = picks or (_F16 if kind is None else kind for kind in llm._kv_types)
    return replace(_present(llm), type_k=type_k, type_v=type_v)


def _context(llm: LoadedModel, cache: CacheKind) -> Any:
    """A context with this cache. Raises EdgeKVError."""
    llm._kv_check_wish(llm.settings)
    kinds = facts.type_name(cache.type_k), facts.type_name(cache.type_v)
    if not can_have(facts.model_info(llm.model_path), kinds):
        raise BadInput(f"{llm.model_path} cannot have a cache of the types {'/'.join(kinds)}")
    stores, n_gpu_layers = llm.settings.stores, llm.model_params.n_gpu_layers
    if not llm._kv_servers:  # which have memory of their own
        check_whole_cache(
            llm.model_path, llm.n_ctx(), cache.type_k, cache.type_v, stores, n_gpu_layers
        )
    for name in _PARAMS[:3]:
        setattr(llm.context_params, name, getattr(cache, name))
    return llm._kv_make_context(stores)
