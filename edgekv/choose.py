"""choose: from the user's words to a method, with the model's own profile where there is one.

`auto` is the score that the tables of docs/methods.md found best, with budgets per KV head from the model's profile; without a profile
it is the best method that needs none. A mix may name the profile too: score=keydiff,budget=profile.
"""

from __future__ import annotations

import re

from edgekv import methods
from edgekv.budget.profile import Profile as ProfileBudget
from edgekv.errors import BadInput
from edgekv.methods import Preset
from edgekv.profiles import NONE, find

AUTO = "auto"
WITH_PROFILE = "score=keydiff,budget=profile"
WITHOUT_PROFILE = "kvzip"


def choose(text: str, model_path: str, profile: str | None = None) -> Preset:
    """The preset that `text` means for a model file.

    profile: a profile's file, 'none', or None to look for one (see `edgekv.profiles.find`). Raises BadInput if `text` means none, or needs
    a profile and there is none.
    """
    if text == AUTO:
        found = None if profile == NONE else _budget(model_path, profile, WITH_PROFILE)
        return methods.get(WITHOUT_PROFILE) if found is None else methods.get(WITH_PROFILE, found)
    if not needs_profile(text):
        return methods.get(text)
    found = _budget(model_path, profile, text)
    if found is None:
        raise BadInput(f"there is no profile for {model_path}: make one with 'edgekv profile probe', or name one with --kv-profile")
    return methods.get(text, found)


def needs_profile(text: str) -> bool:
    """Whether a mix names the profile."""
    return "budget=profile" in text


def _budget(model_path: str, wish: str | None, text: str) -> ProfileBudget | None:
    """The budget of the model's profile, if there is one that serves the score that `text` names."""
    score = re.search(r"score=([^,:]+)", text)
    profile = find(model_path, wish, score.group(1) if score else "")
    return None if profile is None else ProfileBudget(profile.shares_at)
