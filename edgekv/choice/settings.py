"""Settings of the engine: a KVConfig whose method was chosen for one model."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from edgekv import methods
from edgekv.base import folders
from edgekv.base.defaults import MIN_TOKENS, SINK, TAIL, WINDOW
from edgekv.choice.choose import choose
from edgekv.choice.config import KVConfig
from edgekv.methods import KEEPS_ALL, Preset
from edgekv.methods.centroid_merge import CentroidMerge


@dataclass
class Settings:
    """The limits, and the method. Of ratio, tokens, n_bytes and memory the smallest counts; see
    `edgekv.methods.budget.rows_for`.
    """

    ratio: float = 1.0
    tokens: int | None = None
    n_bytes: int | None = None
    """For the kept rows."""
    memory: int | None = None
    """Bytes for the whole cache, tails and room for them included; see `edgekv.memory.limit`."""
    table: NDArray[np.int32] | None = None
    """Explicit rows of each head [n_layer, n_head_kv], instead of the above and the preset's
    budget.
    """
    preset: Preset = field(default_factory=lambda: methods.get("snapkv"))
    sink: int = SINK
    window: int = WINDOW
    min_tokens: int = MIN_TOKENS
    tail: int = TAIL
    """Tokens that may gather behind the compressed prompt before they are compressed too."""
    hidden: str = "auto"
    """Where a prompt's hidden states wait; see `edgekv.memory.hidden`."""
    seed: int = 0
    prefill_memory: int | None = None
    """Bytes that products with weights may work with while a prompt is read; None: any."""
    fast_prefill: bool = False
    """Nothing is evicted, and prompts are read into a store."""
    archive: str | None = None
    """The folder of the archive; None: there is none."""
    recall: float = 0.0
    """Share of the tokens that a new one recalls from it."""

    @property
    def stores(self) -> bool:
        """Whether the cache is a store; else it is llama.cpp's own."""
        return self.compresses or self.fast_prefill

    @property
    def compresses(self) -> bool:
        limits = (self.tokens, self.n_bytes, self.memory, self.table)
        wish = self.ratio < 1 or any(x is not None for x in limits)
        return wish and not self.preset.keeps_all


UNKNOWN_RATIO = 0.2
"""What `auto` goes by where a limit in bytes decides the ratio of each prompt."""


def resolve(config: KVConfig, model_path: str, types: tuple[str, str] | None = None) -> Settings:
    """Return the settings that a configuration means for a model file.

    types: cache types of K and V that were named. Raises BadInput if its method needs a profile and
    there is none.
    """
    settings = Settings(
        ratio=config.ratio,
        tokens=None if config.table is not None else config.budget,
        n_bytes=None if config.budget_mb is None else int(config.budget_mb * 2**20),
        memory=config.memory,
        table=config.table,
        preset=choose(config.method, model_path, config.profile, contested(config), types),
        sink=config.sink,
        window=config.window,
        min_tokens=config.min_tokens,
        tail=config.tail,
        hidden=config.hidden,
        seed=config.seed,
        prefill_memory=config.prefill_memory,
        archive=archive_folder(
            "temporary" if config.recall and config.archive == "off" else config.archive
        ),
        recall=config.recall,
    )
    if config.recall and isinstance(settings.preset.merge, CentroidMerge):
        # what stands for evicted tokens are groups that know what a token has looked up
        settings = replace(settings, preset=replace(settings.preset, merge=None))
    # With `memory` the method is `full`: the whole cache is checked against it as it is allocated,
    # and a store allocates nothing then.
    if not config.fast_prefill or settings.compresses or settings.memory is not None:
        return settings
    settings = replace(settings, ratio=1.0, tokens=None, n_bytes=None, table=None)
    return replace(settings, preset=KEEPS_ALL, fast_prefill=True)


def archive_folder(wish: str) -> str | None:
    """The folder that `KVConfig.archive` means; None: there is to be no archive."""
    if wish == "off":
        return None
    return str(folders.cache()) if wish == "temporary" else os.path.expanduser(wish)


def contested(config: KVConfig) -> float | None:
    """The ratio at which `auto` follows the model's contest; None where it does not: a budget in
    tokens has nothing to win from another type, and without a limit nothing is evicted.
    """
    if config.budget is not None or not config.compresses:
        return None
    return config.ratio if config.ratio < 1 else UNKNOWN_RATIO
