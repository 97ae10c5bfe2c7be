"""Where the profiles of a model are: beside it, shipped with edgekv, or in the user's cache.

Several may lie side by side: kvbudget-<model>.gguf and kvbudget-<model>.<anything>.gguf, such as
kvbudget-<model>.lukv-snapkv.gguf. What a profile is for, says the file; names only say where to
look, and in which order: the plain one first.
"""

from __future__ import annotations

import glob
import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from edgekv.base import folders
from edgekv.errors import BadInput
from edgekv.model.identity import Identity, identify
from edgekv.profiles.file import Profile, read

NONE = "none"
"""What `--kv-profile` says to have no profile."""
TASK_KIND = "evolkv"
"""Profiles of this kind are for their task, and are used only when they are asked for."""
SHIPPED = Path(__file__).parent.parent / "data" / "profiles"


def find(
    model_path: str,
    wish: str | None = None,
    score: str = "",
    kind: str = "",
    predicts: bool = False,
) -> Profile | None:
    """The profile for a model file, None if there is none or if none is wanted.

    predicts: only one that has what the score kvzap needs.

    wish: a profile's file, NONE, or None to look for one: beside the model, then shipped, then in
    the cache; the first that belongs to this model, serves `score` (empty: any) and is of `kind`
    (empty: any but evolkv, which is for its task alone). The plain one beside the model, if it
    cannot be used, is left out with a line in the log. Raises BadInput if the file of `wish` cannot
    be used. A model that cannot be identified has no profile: it has no KV heads, or whoever loads
    it will say what is wrong.
    """
    if wish == NONE:
        return None
    if wish is not None:
        profile = replace(read(wish), path=str(wish))
        profile.check(identify(model_path), score, wish, kind)
        return profile if profile.surrogate or not predicts else None
    try:
        model = identify(model_path)
    except BadInput:
        return None
    for path in candidates(model_path, model):
        try:
            profile = replace(read(path), path=str(path))
            profile.check(model, score, str(path))
        except BadInput as error:
            if path == beside(model_path):
                logging.getLogger("edgekv").warning("edgekv: %s", error)
            continue
        if (profile.kind == kind or not kind and profile.kind != TASK_KIND) and (
            profile.surrogate or not predicts
        ):
            return profile
    return None


def shapes() -> set[tuple[object, ...]]:
    """What the models of the shipped and the cached profiles are like, as
    `edgekv.model.identity.shape` gives it: a model of no such shape has no profile there.
    """
    found: set[tuple[object, ...]] = set()
    for path in [*SHIPPED.glob("*.gguf"), *(user_cache() / "profiles").glob("*.gguf")]:
        with suppress(BadInput):
            model = read(path).model
            found.add((model.arch, model.n_head_kv, model.d_head_k, model.d_head_v))
    return found


def candidates(model_path: str, model: Identity) -> Iterator[Path]:
    """The files that exist where `find` looks, in its order."""
    paths = [
        *together(beside(model_path)),
        *sorted(SHIPPED.glob("*.gguf")),
        *together(cached(model)),
        *together(cached(model.older)),
    ]
    return (path for path in paths if os.path.isfile(path))  # raises nothing, however long the name


def together(plain: Path) -> list[Path]:
    """A profile's path, and those beside it with something between name and ending."""
    more = plain.parent.glob(f"{glob.escape(plain.stem)}.*.gguf")
    return [plain, *sorted(path for path in more if path.name.isprintable())]  # names are printed


def beside(model_path: str, kind: str = "") -> Path:
    """The profile that lies beside a model: kvbudget-<name of the model>.gguf, or with a kind
    kvbudget-<name of the model>.<kind>.gguf.
    """
    path = Path(model_path)
    return path.with_name(f"kvbudget-{path.stem}{'.' * bool(kind)}{kind}.gguf")


def cached(model: Identity, kind: str = "") -> Path:
    """The same in the user's cache, by the model's identity; the folder need not exist."""
    return user_cache() / "profiles" / f"kvbudget-{model.digest}{'.' * bool(kind)}{kind}.gguf"


def user_cache() -> Path:
    """This user's folder for what can be made again."""
    return folders.cache()
