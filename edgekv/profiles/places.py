"""Where the profile of a model is: beside it, shipped with edgekv, or in the user's cache."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from edgekv.errors import BadInput
from edgekv.profiles.file import Profile, read
from edgekv.profiles.identity import Identity, identify

NONE = "none"
"""What `--kv-profile` says to have no profile."""
SHIPPED = Path(__file__).parent.parent / "data" / "profiles"


def find(model_path: str, wish: str | None = None, score: str = "") -> Profile | None:
    """The profile for a model file, None if there is none or if none is wanted.

    wish: a profile's file, NONE, or None to look for one: beside the model, then shipped, then in the cache; the first that belongs to
    this model and serves `score` (empty: any). One beside the model that does not is left out with a line in the log.
    Raises BadInput if the file of `wish` cannot be used. A model that cannot be identified has no profile: it has no KV heads, or whoever
    loads it will say what is wrong.
    """
    if wish == NONE:
        return None
    if wish is not None:
        profile = read(wish)
        profile.check(identify(model_path), score, wish)
        return profile
    try:
        model = identify(model_path)
    except BadInput:
        return None
    for path in candidates(model_path, model):
        try:
            profile = read(path)
            profile.check(model, score, str(path))
            return profile
        except BadInput as error:
            if path == beside(model_path):
                logging.getLogger("edgekv").warning("edgekv: %s", error)
    return None


def candidates(model_path: str, model: Identity) -> Iterator[Path]:
    """The files that exist where `find` looks, in its order."""
    paths = [beside(model_path), *sorted(SHIPPED.glob("*.gguf")), cached(model)]
    return (path for path in paths if path.is_file())


def beside(model_path: str) -> Path:
    """The profile that lies beside a model: kvbudget-<name of the model>.gguf."""
    path = Path(model_path)
    return path.with_name(f"kvbudget-{path.stem}.gguf")


def cached(model: Identity) -> Path:
    """The profile of a model in the user's cache; the folder need not exist."""
    return user_cache() / "profiles" / f"kvbudget-{model.digest}.gguf"


def user_cache() -> Path:
    """This user's folder for what can be made again: what the platform calls it, and `edgekv` in it."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "edgekv"
