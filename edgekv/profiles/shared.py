"""Profiles that travel: a folder of them, named by the fingerprints of their models.

Whoever has the same model file takes them over from there. They come from strangers, so a file's
name only says where to look: what is in it is read with distrust and held against the model. What
is kept is written anew from what was understood.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from edgekv.base.files import made_folder
from edgekv.errors import BadInput
from edgekv.model.identity import Identity, identify
from edgekv.profiles.file import Profile, read, write
from edgekv.profiles.places import cached, candidates

SIZE_MAX = 1 << 24
"""Bytes of a file that is worth fetching: see `edgekv.profiles.file`."""
_MAPS_MAX = 1e4
"""Weights of maps that were fitted to normalised features stay below a hundred."""


def kind_of(profile: Profile) -> str:
    """What stands in the name of its file behind the model: nothing where it serves any score."""
    if profile.kind == "probe" and not profile.score:
        return ""
    return "-".join(filter(None, (profile.kind, profile.score)))


def name_of(profile: Profile) -> str:
    """The name of its file in a folder that is shared."""
    return cached(profile.model, kind_of(profile)).name


def own(model_path: str) -> list[Profile]:
    """The profiles of a model file that can be shared, one of each kind: those that are used here.

    Raises BadInput if there is none.
    """
    model = identify(model_path)
    found: dict[str, Profile] = {}
    older = False
    for path in candidates(model_path, model):
        try:
            profile = replace(read(path), path=str(path))
            profile.check(model)
        except BadInput:
            continue
        older = older or not profile.model.attention
        if profile.model == model:
            found.setdefault(kind_of(profile), profile)
    if found:
        return list(found.values())
    why = "is of an older edgekv and names no attention weights" if older else "is not here"
    raise BadInput(
        f"a profile of {model_path} {why}; 'edgekv profile probe {model_path} -o"
        f" kvbudget-{Path(model_path).stem}.gguf' beside the model makes one"
    )


def pack(models: Iterable[str], folder: Path) -> list[Path]:
    """Write the profiles of model files into a folder, which is made. Returns their paths.

    Raises BadInput, also if the folder has something else under their names.
    """
    profiles = [profile for path in models for profile in own(path)]
    made_folder(folder, "name another one")
    paths = [folder / name_of(profile) for profile in profiles]
    for profile, path in zip(profiles, paths, strict=True):
        write(profile, path)
    return paths


def names_for(model: Identity, there: Iterable[str]) -> list[str]:
    """Of the names of files those that say that they are of this model, sorted."""
    pattern = re.compile(rf"kvbudget-{model.digest}(\.[\w-]{{1,80}})?\.gguf", re.ASCII)
    return sorted(filter(pattern.fullmatch, there))


def take(paths: Iterable[Path], model: Identity, may_replace: bool) -> list[Path]:
    """Check files of profiles and put them where `find` finds them. Returns the places.

    Raises BadInput, and changes nothing, if one of them is damaged, is of another model, has values
    that no profile has, or if there is one of its kind already and it may not be replaced.
    """
    profiles = [_checked(path, model) for path in paths]
    targets = [cached(model, kind_of(profile)) for profile in profiles]
    for target in targets:
        if target.exists() and not may_replace:
            raise BadInput(f"there is a profile already: {target}; --replace takes the other one")
    for profile, target in zip(profiles, targets, strict=True):
        made_folder(target.parent, "make room for it")
        write(profile, target, is_ours=True)
    return targets


def _checked(path: Path, model: Identity) -> Profile:
    """Raises BadInput."""
    profile = read(path)
    profile.check(model, name=str(path))
    if not profile.model.attention:
        raise BadInput(
            f"{path} names no attention weights, so it may be of another model: not taken"
        )
    maps = profile.surrogate.weights if profile.surrogate else None
    if maps is not None and np.abs(maps).max(initial=0) > _MAPS_MAX:
        raise BadInput(f"{path} has maps with values that no profile has: it is not taken")
    return profile
