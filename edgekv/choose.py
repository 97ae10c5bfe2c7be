"""choose: from the user's words to a method, with the model's own profile where there is one.

`auto` is the score that the tables of docs/methods.md found best, with budgets per KV head from the model's profile; without a profile
it is the best method that needs none. Budgets named profile, lukv or evolkv take a profile of that kind (`profile`: any), in a mix
(score=keydiff,budget=lukv) or as a preset (lukv).
"""

from __future__ import annotations

from dataclasses import replace

from edgekv import methods
from edgekv.budget import Profile as ProfileBudget
from edgekv.errors import BadInput
from edgekv.methods import Preset
from edgekv.profiles import Profile, find

AUTO = "auto"
WITH_PROFILE = "score=keydiff,budget=profile"
WITHOUT_PROFILE = "kvzip"


def choose(text: str, model_path: str, profile: str | None = None) -> Preset:
    """The preset that `text` means for a model file.

    profile: a profile's file, 'none', or None to look for one (see `edgekv.profiles.find`). Raises BadInput if `text` means none, or needs
    a profile and there is none.
    """
    if text == AUTO:
        preset = methods.get(WITH_PROFILE)
        found = find(model_path, profile, preset.score.name)
        return _with(preset, found) if found else methods.get(WITHOUT_PROFILE)
    preset = methods.get(text)
    return preset if not isinstance(preset.budget, ProfileBudget) else _looked_up(preset, text, model_path, profile)


def _looked_up(preset: Preset, text: str, model_path: str, wish: str | None) -> Preset:
    """`preset` with the profile that it needs.

    A plain name leaves the score open: a profile for another one than the preset's own then brings it along.
    """
    budget, is_open = preset.budget, text in methods.REGISTRY
    assert isinstance(budget, ProfileBudget)
    scores = [""] if is_open and wish else [preset.score.name, ""][: 1 + is_open]
    found = next((p for score in scores if (p := find(model_path, wish, score, budget.kind))), None)
    if found is None:
        raise BadInput(f"there is no {budget.kind or 'profile'}{' profile' * bool(budget.kind)} for {model_path}: make one with "
                       f"'edgekv profile {budget.kind or 'probe'}', or name one with --kv-profile")
    if is_open and found.score and found.score != preset.score.name:
        preset = replace(methods.get(f"score={found.score},budget={budget.name}"), name=preset.name)
    return _with(preset, found)


def learns(text: str) -> bool:
    """Whether the profile that first use makes would serve `text`: auto, or budgets from any profile."""
    if text == AUTO:
        return True
    budget = methods.get(text).budget
    return isinstance(budget, ProfileBudget) and not budget.kind


def _with(preset: Preset, profile: Profile) -> Preset:
    assert isinstance(preset.budget, ProfileBudget)
    return replace(preset, budget=replace(preset.budget, shares=profile.shares_at))
