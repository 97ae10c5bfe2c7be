"""The methods by name: the built-in presets, and those that other packages offer.

A package adds one with an entry point in the group `edgekv.methods` whose object is a `Preset`:

    [project.entry-points."edgekv.methods"]
    mine = "my_package:preset"

Built-in names cannot be taken over.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from importlib.metadata import entry_points

from edgekv.budget import BUDGETS
from edgekv.errors import BadInput
from edgekv.methods.base import STATS, Budget, LayerStats, Method, Observe, Preset, masked
from edgekv.methods.full import Full
from edgekv.methods.random import Random
from edgekv.methods.snapkv import SnapKV
from edgekv.methods.streaming import Streaming

__all__ = [
    "DEFAULT", "GROUP", "REGISTRY", "STATS", "Budget", "LayerStats", "Method", "Observe", "Preset", "get", "masked",
    "presets",
]

GROUP = "edgekv.methods"
DEFAULT = "snapkv"


def _same(method: Method, keeps_all: bool = False) -> Preset:
    """The method under its own name with the uniform budget."""
    return Preset(method.name, method, BUDGETS["uniform"], method.title, method.paper, keeps_all=keeps_all)


REGISTRY: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        _same(Full(), keeps_all=True),
        _same(Random()),
        _same(Streaming()),
        _same(SnapKV()),
        Preset("pyramidkv", SnapKV(), BUDGETS["pyramid"], "snapkv with more rows in the first layers than in the last",
               "PyramidKV, arXiv 2406.02069"),
    )
}


@lru_cache(maxsize=1)
def _plugins() -> dict[str, Preset]:
    """Presets of installed packages; one that cannot be loaded is left out with a line in the log."""
    found: dict[str, Preset] = {}
    for entry in entry_points(group=GROUP):
        try:
            preset = entry.load()
        except Exception as error:  # any failure of foreign code must not take the built-in methods away
            logging.getLogger("edgekv").warning("edgekv: method '%s' cannot be loaded: %s", entry.name, error)
            continue
        if isinstance(preset, Preset) and entry.name not in REGISTRY:
            found[entry.name] = preset
        else:
            logging.getLogger("edgekv").warning("edgekv: method '%s' is no new Preset and is left out", entry.name)
    return found


def presets() -> dict[str, Preset]:
    """Every preset by name: built-in ones first, then those of other packages."""
    return {**REGISTRY, **_plugins()}


def get(name: str) -> Preset:
    """The preset called `name`.

    Raises BadInput if there is none.
    """
    found = REGISTRY.get(name) or _plugins().get(name)
    if found is None:
        raise BadInput(f"there is no method '{name}'; choose one of: {', '.join(presets())}")
    return found
