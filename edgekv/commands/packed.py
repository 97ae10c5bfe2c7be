"""The option --pack: a model with a pack's settings, and the pack's documents in a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from edgekv.base.cache_types import CACHE_TYPES
from edgekv.choice.config import KVConfig
from edgekv.commands.options import EngineOptions
from edgekv.errors import BadInput

if TYPE_CHECKING:
    from edgekv import Llama
    from edgekv.llama.pack import Pack

PACK = click.option(
    "--pack",
    metavar="FILE",
    help=(
        "Begin with the documents of a pack, which are not read again. Its options for the cache"
        " are taken over ('edgekv pack')."
    ),
)


def read(path: str, system: str | None) -> Pack:
    """The pack that --pack names. Raises BadInput if it is none, or has another system message."""
    from edgekv.llama import pack as packs

    found = packs.read(path)
    if system and system != found.system:
        raise BadInput(
            f"'{path}' was made with another system message: leave -sys out, or pack the documents"
            " again with it"
        )
    return found


def owner(path: str) -> str:
    """The model that a pack belongs to, in words. Raises BadInput if it is no pack."""
    from edgekv.llama import pack as packs

    return str(packs.owner(path))


def with_settings(engine: EngineOptions, pack: Pack, path: str) -> EngineOptions:
    """`engine` with the cache of a pack; of a pack with an archive with what else was given.

    Raises BadInput if an option was given that says otherwise, or if the pack belongs to another
    model: before anything takes long.
    """
    from edgekv.llama.pack import SAID, said, taken_over

    _check_model(engine, path)
    mine, its, usual = engine.kv, pack.settings, KVConfig()
    wishes = {}
    for name in SAID:
        given, wanted = getattr(mine, name), getattr(its, name)
        if given == getattr(usual, name) or given == wanted:
            continue
        if pack.is_archived:
            wishes[name] = given
        elif name != "archive":  # which it goes on without
            option = f"--kv-{name.replace('_', '-')}"
            raise BadInput(
                f"'{path}' was made with {option} {wanted}: leave {option} {given} out, or pack the"
                " documents again with it"
            )
    kv = replace(taken_over(mine, said(its)), **wishes)
    type_k, type_v = (x if x in CACHE_TYPES else None for x in pack.cache_types)
    return replace(
        engine,
        kv=kv,
        cache_type_k=engine.cache_type_k or type_k,
        cache_type_v=engine.cache_type_v or type_v,
    )


def _check_model(engine: EngineOptions, path: str) -> None:
    from edgekv.commands import load
    from edgekv.llama.pack import check_model
    from edgekv.model import adapters, metadata

    model, said = load.model_path(engine.model), engine.loading.arguments()
    loras = adapters.chosen(said["lora_path"], said["lora_scale"])
    check_model(path, model, metadata.check(said["kv_overrides"], model), loras)


def with_settings_of_all(engine: EngineOptions, paths: Sequence[str]) -> EngineOptions:
    """`engine` with the cache of some packs. Raises BadInput if one is none, or they differ."""
    from edgekv.llama import pack as packs

    found = [packs.read(path) for path in paths]
    for path, pack in zip(paths, found):
        if (pack.config, pack.cache_types) != (found[0].config, found[0].cache_types):
            raise BadInput(
                f"'{path}' and '{paths[0]}' were made with different options for the cache: serve"
                " them apart, or pack the documents again with the same ones"
            )
        _check_model(engine, path)
    return with_settings(engine, found[0], paths[0]) if found else engine


def opened(llm: Llama, path: str) -> list[str]:
    """Put a pack into `llm`. Returns the texts of its documents."""
    from edgekv.llama import pack as packs

    packs.load(llm, path)
    return [x.text for x in packs.read(path).documents]
