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
from copy import copy
from dataclasses import replace
from functools import cached_property
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


class Profiles:
    """The profiles of a model file. Whatever is asked of them, a file is read once.

    wish: a profile's file, NONE, or None for those beside the model, then shipped, then in the
    cache.
    """

    def __init__(self, model_path: str, wish: str | None = None) -> None:
        self.model_path, self.wish = model_path, wish
        self._known: dict[str, Profile | BadInput] = {}

    def named(self, wish: str | None) -> Profiles:
        """The same with another wish."""
        other = copy(self)
        other.wish = wish
        return other

    @cached_property
    def _model(self) -> Identity:
        return identify(self.model_path)

    def find(self, score: str = "", kind: str = "", predicts: bool = False) -> Profile | None:
        """The first one that belongs to this model, serves `score` (empty: any) and is of `kind`
        (empty: any but evolkv, which is for its task alone); None if there is none.

        predicts: only one that has what the score kvzap needs. The plain one beside the model, if
        it cannot be used, is left out with a line in the log. Raises BadInput if the file of `wish`
        cannot be used. A model that cannot be identified has no profile: it has no KV heads, or
        whoever loads it will say what is wrong.
        """
        if self.wish == NONE:
            return None
        if self.wish is not None:
            profile = self._read(self.wish)
            profile.check(self._model, score, self.wish, kind)
            return profile if profile.surrogate or not predicts else None
        try:
            model = self._model
        except BadInput:
            return None
        for path in candidates(self.model_path, model):
            try:
                profile = self._read(str(path))
                profile.check(model, score, str(path))
            except BadInput as error:
                if path == beside(self.model_path):
                    logging.getLogger("edgekv").warning("edgekv: %s", error)
                continue
            if (profile.kind == kind or not kind and profile.kind != TASK_KIND) and (
                profile.surrogate or not predicts
            ):
                return profile
        return None

    def _read(self, path: str) -> Profile:
        """Raises BadInput."""
        if path not in self._known:
            try:
                self._known[path] = replace(read(path), path=path)
            except BadInput as error:
                self._known[path] = error
        found = self._known[path]
        if isinstance(found, BadInput):
            raise found
        return found


def find(
    model_path: str,
    wish: str | None = None,
    score: str = "",
    kind: str = "",
    predicts: bool = False,
) -> Profile | None:
    """The profile for a model file: see `Profiles.find`."""
    return Profiles(model_path, wish).find(score, kind, predicts)


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
