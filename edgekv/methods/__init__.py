"""The methods by name: the built-in presets, and those that other packages offer.

A package adds one with an entry point in the group `edgekv.methods` whose object is a `Preset`:

    [project.entry-points."edgekv.methods"]
    mine = "my_package:preset"

Built-in names cannot be taken over. `get` also understands changed parameters and mixes, see
`edgekv.methods.spell`.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import entry_points

from edgekv.methods import spell
from edgekv.methods.base import STATS, Budget, Method, Observe, Preset, masked
from edgekv.methods.budget import BUDGETS
from edgekv.methods.cake import Cake
from edgekv.methods.centroid_merge import CentroidMerge
from edgekv.methods.expected import Expected
from edgekv.methods.full import FullCache
from edgekv.methods.h2o import H2O
from edgekv.methods.joint import Joint
from edgekv.methods.keydiff import KeyDiff
from edgekv.methods.knorm import Knorm
from edgekv.methods.kvzap import KVzap
from edgekv.methods.kvzip import KVzip
from edgekv.methods.late import Late
from edgekv.methods.layer import LayerStats
from edgekv.methods.merge import D2O
from edgekv.methods.random import Random
from edgekv.methods.snapkv import SnapKV
from edgekv.methods.streaming import Streaming
from edgekv.methods.tova import TOVA

__all__ = [
    "GROUP",
    "KEEPS_ALL",
    "MERGES",
    "REGISTRY",
    "STATS",
    "Budget",
    "LayerStats",
    "Method",
    "Observe",
    "Preset",
    "get",
    "masked",
    "presets",
]

GROUP = "edgekv.methods"
MERGES: dict[str, D2O | CentroidMerge | None] = {
    "none": None,
    "d2o": D2O(),
    "summary": CentroidMerge(),
}


def _same(method: Method, budget: str = "uniform", keeps_all: bool = False) -> Preset:
    """The method under its own name."""
    return Preset(
        method.name, method, BUDGETS[budget], method.title, method.paper, keeps_all=keeps_all
    )


def _under(method: Method, budget: str, name: str, merge: str = "none") -> Preset:
    """The method with a budget that gives the pair its name and paper."""
    how = MERGES[merge]
    title = "; ".join([method.name, BUDGETS[budget].title, *([how.title] if how else [])])
    return Preset(name, method, BUDGETS[budget], title, BUDGETS[budget].paper, merge=how)


REGISTRY: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        _same(SnapKV()),
        _under(SnapKV(), "pyramid", "pyramidkv"),
        _under(SnapKV(), "adakv", "adakv"),
        _same(Cake(), "cake"),
        _under(SnapKV(), "dynamickv", "dynamickv"),
        _under(H2O(), "d2o", "d2o", merge="d2o"),
        _under(SnapKV(), "lukv", "lukv"),
        _under(SnapKV(), "evolkv", "evolkv"),
        _same(KVzip(), "pooled"),
        _same(KVzap(), "profile"),
        _under(KVzap(), "profile", "kvzap-summary", merge="summary"),
        _same(Streaming()),
        _same(Late()),
        _same(Joint(), "profile"),
        _same(H2O()),
        _same(TOVA()),
        _same(Knorm()),
        _same(KeyDiff()),
        _same(Expected()),
        _same(Random()),
        _same(FullCache(), keeps_all=True),
    )
}


OLDER_NAMES = {"edgekv": "kvzap-summary"}
"""Names that presets had once: people, files and the environment may still say them."""


def renamed(text: str) -> str:
    """What a user writes for a method, with the name that the preset has now."""
    name, colon, rest = text.partition(":")
    return OLDER_NAMES.get(name, name) + colon + rest


@lru_cache(maxsize=1)
def _plugins() -> dict[str, Preset]:
    """Presets of installed packages; one that cannot be loaded is a line in the log."""
    found: dict[str, Preset] = {}
    for entry in entry_points(group=GROUP):
        try:
            preset = entry.load()
        except Exception as error:
            # any failure of foreign code must not take the built-in methods away
            logging.getLogger("edgekv").warning(
                "edgekv: method '%s' cannot be loaded: %s", entry.name, error
            )
            continue
        if isinstance(preset, Preset) and renamed(entry.name) not in REGISTRY:
            found[entry.name] = preset
        else:
            logging.getLogger("edgekv").warning(
                "edgekv: method '%s' is no new Preset and is left out", entry.name
            )
    return found


KEEPS_ALL = replace(REGISTRY["streaming"], name="full")
"""What a store that keeps everything is read with: nothing is observed."""


def presets() -> dict[str, Preset]:
    """Every preset by name: built-in ones first, then those of other packages."""
    return {**REGISTRY, **_plugins()}


def get(text: str) -> Preset:
    """The preset that `text` means: a name, a name with parameters, or a mix. Budgets of profiles
    have no table yet (see `edgekv.choice.choose`).

    Raises BadInput if it means none.
    """
    return spell.read(renamed(text), presets(), BUDGETS, MERGES)
