"""Settings of the engine: a KVConfig whose method was chosen for one model."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace

from edgekv import methods
from edgekv.base import folders
from edgekv.choice.choose import choose
from edgekv.choice.config import AUTO, KVConfig
from edgekv.choice.recall import why_not
from edgekv.errors import BadInput
from edgekv.methods import KEEPS_ALL, Preset
from edgekv.methods.centroid_merge import CentroidMerge
from edgekv.profiles.winners import RECALL


@dataclass(frozen=True, eq=False)
class Settings(KVConfig):
    """The options as they were given, and the method that is meant. Of ratio, tokens, n_bytes and
    memory the smallest counts; see `edgekv.methods.budget.rows_for`. A table counts instead of them
    and of the preset's budget.
    """

    preset: Preset = field(default_factory=lambda: methods.get("snapkv"))
    why_no_recall: str = ""
    """Why recall is off where it was left to `auto`; else empty."""

    def __post_init__(self) -> None:
        """The options were checked as a KVConfig."""

    @property
    def tokens(self) -> int | None:
        """The budget, if it is a number."""
        return self.budget if isinstance(self.budget, int) else None

    @property
    def n_bytes(self) -> int | None:
        """For the kept rows."""
        return None if self.budget_mb is None else int(self.budget_mb * 2**20)

    @property
    def archive_folder(self) -> str | None:
        """Where the archive is; None: there is none."""
        if self.archive == "off" and not self.recall:
            return None
        is_named = self.archive not in ("off", "temporary")
        return os.path.expanduser(self.archive) if is_named else str(folders.cache())

    @property
    def stores(self) -> bool:
        """Whether the cache is a store; else it is llama.cpp's own."""
        return self.compresses or self.fast_prefill

    @property
    def compresses(self) -> bool:
        return super().compresses and not self.preset.keeps_all


UNKNOWN_RATIO = 0.2
"""What `auto` goes by where a limit in bytes decides the ratio of each prompt."""


def resolve(
    config: KVConfig,
    model_path: str,
    types: tuple[str, str] | None = None,
    why_no_recall: Callable[[Preset, bool], str] = why_not,
) -> Settings:
    """Return the settings that a configuration means for a model file.

    types: cache types of K and V that were named. why_no_recall: asked where that is left to
    `auto`, see `edgekv.choice.recall`. Raises BadInput if its method needs a profile and there is
    none, and if there is to be an archive where nothing is evicted.
    """
    preset = choose(config.method, model_path, config.profile, contested(config), types)
    given = {one.name: getattr(config, one.name) for one in fields(config)}
    why = ""
    if config.recall == AUTO:
        why = why_no_recall(preset, config.compresses)
        given["recall"] = 0.0 if why else RECALL
    if given["recall"] and isinstance(preset.merge, CentroidMerge):
        # what stands for evicted tokens are groups that know what a token has looked up
        preset = replace(preset, merge=None)
    settings = Settings(**given, preset=preset, why_no_recall=why)
    if settings.archive_folder is not None and not settings.compresses:
        raise BadInput(
            "nothing is evicted, so there is nothing to recall: give kv_ratio below 1 and a method"
            " that evicts, or leave kv_archive and kv_recall out"
        )
    # With `memory` the method is `full`: the whole cache is checked against it as it is allocated,
    # and a store allocates nothing then.
    if not config.fast_prefill or settings.compresses or settings.memory is not None:
        return replace(settings, fast_prefill=False)
    return replace(settings, ratio=1.0, budget=None, budget_mb=None, preset=KEEPS_ALL)


def contested(config: KVConfig) -> float | None:
    """The ratio at which `auto` follows the model's contest; None where it does not: a budget in
    tokens has nothing to win from another type, and without a limit nothing is evicted.
    """
    if config.budget is not None or not config.compresses:
        return None
    return config.ratio if config.ratio < 1 else UNKNOWN_RATIO
