"""choose: from the user's words to a method, with the model's own profile where there is one.

`auto` is what came nearest to the full cache on this model, if its profile says so
(`edgekv.profiles.winners`) and no other cache type was named. Else it is what the tables of
docs/results found best, score and merge, with budgets per KV head from the model's profile; without
a profile it is the best method that needs none. Budgets named profile,
lukv or evolkv take a profile of that kind (`profile`: any), in a mix (score=keydiff,budget=lukv) or
as a preset (lukv). The score kvzap takes its maps from a profile, whatever the budget.
"""

from __future__ import annotations

from dataclasses import replace

from edgekv import methods
from edgekv.errors import BadInput
from edgekv.methods import Preset
from edgekv.methods.budget import ProfileBudget
from edgekv.methods.kvzap import KVzap
from edgekv.profiles import NONE, Profiles
from edgekv.profiles.winners import OFFLINE

AUTO = "auto"
WITH_PROFILE = "kvzap-summary"
WITH_SHARES = "score=keydiff,budget=profile,merge=summary"
"""With a profile that has no maps for kvzap: of another kind, or imported."""
WITHOUT_PROFILE = "kvzip"
UNPREPARED = "score=keydiff,budget=pooled"
"""Needs no profile and reads a prompt once; spreads rows as freely as `auto` with a profile."""


def choose(
    text: str,
    model_path: str,
    profile: str | None = None,
    ratio: float | None = None,
    types: tuple[str, str] | None = None,
) -> Preset:
    """The preset that `text` means for a model file.

    profile: a profile's file, 'none', or None to look for one (see `edgekv.profiles.find`). ratio:
    share of the full f16 cache's bytes, for which `auto` follows the model's contest; None: it does
    not. types: cache types of K and V that were named. Raises BadInput if `text` means none, or
    needs a profile and there is none.
    """
    profiles = Profiles(model_path, profile)
    if text == AUTO and (winner := _winner(profiles, ratio, types)):
        return winner
    why = ""
    if text == AUTO:
        text, why = _automatic(profiles)
    return _with_profile(replace(methods.get(text), why=why), text, profiles)


def _with_profile(preset: Preset, text: str, profiles: Profiles) -> Preset:
    """`preset`, which `text` spells, with what it needs of the model's profile."""
    if isinstance(preset.budget, ProfileBudget):
        preset = _with_shares(preset, text, profiles)
    return _with_maps(preset, profiles) if isinstance(preset.score, KVzap) else preset


def _winner(
    profiles: Profiles, ratio: float | None, types: tuple[str, str] | None
) -> Preset | None:
    """What `auto` takes by the model's contest; None where that says nothing."""
    profile = None if ratio is None else profiles.find(predicts=True)
    contest = profile.contest if profile else None
    winner = contest.at(ratio) if contest and ratio else None
    if profile is None or contest is None or winner is None or types not in (None, winner.types):
        return None
    offline = winner.method in OFFLINE  # which have a profile of their own
    if offline and not profiles.named(None).find(kind=winner.method):
        return None
    profiles = profiles.named(None if offline else profile.path)
    preset = _with_profile(methods.get(winner.method), winner.method, profiles)
    return replace(
        preset,
        why="nearest to the full cache in this model's contest",
        types=winner.types,
        measured=contest.line(winner.ratio),
        recall_gain=winner.recall_gain,
        profile=preset.profile or profile.path,
    )


def _automatic(profiles: Profiles) -> tuple[str, str]:
    """The method that 'auto' takes, and why."""
    if profiles.find(predicts=True):
        return WITH_PROFILE, "this model has a profile"
    if profiles.find(methods.get(WITH_SHARES).score.name):
        return WITH_SHARES, "this model's profile has budgets alone"
    refused = "profiles are switched off" if profiles.wish == NONE else "this model has no profile"
    return WITHOUT_PROFILE, f"{refused}: prompts are read twice instead"


def _with_shares(preset: Preset, text: str, profiles: Profiles) -> Preset:
    """`preset` with the shares of the profile that its budget needs.

    A plain name leaves the score open: a profile for another one than the preset's own then brings
    it along.
    """
    budget = preset.budget
    assert isinstance(budget, ProfileBudget)
    is_open = text in methods.REGISTRY and bool(budget.kind)
    scores = [""] if is_open and profiles.wish else [preset.score.name, ""][: 1 + is_open]
    found = next((p for score in scores if (p := profiles.find(score, budget.kind))), None)
    if found is None:
        raise BadInput(
            f"there is no {budget.kind or 'profile'}{' profile' * bool(budget.kind)} for"
            f" {profiles.model_path}: make one with 'edgekv profile {budget.kind or 'probe'}', or"
            " name one with --kv-profile"
        )
    if is_open and found.score and found.score != preset.score.name:
        preset = replace(methods.get(f"score={found.score},budget={budget.name}"), name=preset.name)
    assert isinstance(preset.budget, ProfileBudget)
    return replace(
        preset, budget=replace(preset.budget, shares=found.shares_at), profile=found.path
    )


def _with_maps(preset: Preset, profiles: Profiles) -> Preset:
    """`preset` with the maps of kvzap: of the profile that was named, or else of any with maps."""
    assert isinstance(preset.score, KVzap)
    found = profiles.find(predicts=True)
    if found is None and profiles.wish not in (None, NONE):
        found = profiles.named(None).find(predicts=True)
    if found is None:
        raise BadInput(
            f"there are no maps for kvzap in a profile for {profiles.model_path}: make one with"
            " 'edgekv profile probe'"
        )
    score = replace(preset.score, surrogate=found.surrogate)
    return replace(preset, score=score, profile=preset.profile or found.path)


def learns(text: str) -> bool:
    """Whether the profile of a first use would serve `text`: auto, or budgets of any profile."""
    if wants_predictions(text):
        return True
    budget = methods.get(text).budget
    return isinstance(budget, ProfileBudget) and not budget.kind


def wants_predictions(text: str) -> bool:
    """Whether `text` wants maps for kvzap."""
    return text == AUTO or isinstance(methods.get(text).score, KVzap)
