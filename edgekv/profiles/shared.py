"""Profiles that one person makes and others use: a folder or a repository of them, by the model.

A file's name has the digest of the model's identity: kvbudget-DIGEST.gguf, of another kind than
the probe's kvbudget-DIGEST.KIND.gguf. Names only say where to look: what comes from there is read
with distrust, and must be of exactly this model.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edgekv.errors import BadInput
from edgekv.hub.files import fetch
from edgekv.hub.repository import Repository, is_offline
from edgekv.model.identity import Identity, identify
from edgekv.profiles import places
from edgekv.profiles.file import MAX_BYTES, Profile, read, write

HUB = "hf:"
_FILES_MAX = 32
"""Profiles of one model: there are four kinds, one of them for each score."""


def pack(model_path: str, folder: str) -> list[Path]:
    """Write the profiles that a model has here into a folder; returns their paths.

    A profile of the same kind that lies there is replaced. Raises BadInput if the model has none,
    or if one cannot be written.
    """
    if folder.startswith(HUB):
        repo = folder.removeprefix(HUB)
        raise BadInput(f"pack into a folder, and publish that: hf upload {repo} FOLDER")
    model = identify(model_path)
    found: dict[str, Profile] = {}
    for path in places.candidates(model_path, model):
        profile = _of(path, model)
        if profile:
            found.setdefault(name_of(profile), profile)
    if not found:
        raise BadInput(
            f"{model_path} has no profile of its own here; make one with 'edgekv profile probe'"
        )
    target = Path(os.path.expanduser(folder))
    try:
        target.mkdir(exist_ok=True)
    except OSError as error:
        raise BadInput(f"{folder} is no folder to write to ({error.strerror})") from None
    for name, profile in found.items():
        write(profile, target / name)
    return [target / name for name in found]


def get(model_path: str, source: str, may_replace: bool = False) -> tuple[list[Path], list[Path]]:
    """Take a model's profiles from a folder, or from a repository 'hf:USER/REPO', into the user's
    cache; returns the paths of those that were written, and of those that were there already and
    stay as they are unless `may_replace`.

    Raises BadInput, one line, if there is none, or if one is damaged or of another model; nothing
    is written then.
    """
    model = identify(model_path)
    with _opened(source, model) as paths:
        if not paths:
            raise BadInput(
                f"{source} has no profile of this model (kvbudget-{model.digest}.gguf); another"
                " quantisation of it has other profiles"
            )
        profiles = {name_of(one): one for one in (_checked(path, model) for path in paths)}
    folder = places.cached(model).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"{folder} cannot be written ({error.strerror})") from None
    written, kept = [], []
    for name, profile in profiles.items():
        if (folder / name).exists() and not may_replace:
            kept.append(folder / name)
            continue
        write(profile, folder / name)
        written.append(folder / name)
    return written, kept


def name_of(profile: Profile) -> str:
    """The file's name: by model, kind and score. The probe's is the plain one."""
    kind = "" if profile.kind == "probe" else profile.kind
    kind += f"-{profile.score}" if kind and profile.score else ""
    return places.cached(profile.model, kind).name


def _of(path: Path, model: Identity) -> Profile | None:
    """A profile if it is of exactly this model; None for any other file."""
    try:
        profile = read(path)
    except BadInput:
        return None
    return profile if profile.model == model else None


def _checked(path: Path, model: Identity) -> Profile:
    """Raises BadInput unless a file is a profile of exactly this model."""
    profile = read(path)
    profile.check(model, name=path.name)
    if profile.model != model:
        raise BadInput(f"{path.name} does not say which attention weights it is of; make it again")
    return profile


def _wanted(name: str, model: Identity) -> bool:
    """Whether a file is this model's by its name."""
    return name == places.cached(model).name or (
        name.startswith(f"kvbudget-{model.digest}.") and name.endswith(".gguf")
    )


@contextmanager
def _opened(source: str, model: Identity) -> Iterator[list[Path]]:
    """A `with` block that has the files of a model in a folder or a repository."""
    if not source.startswith(HUB):
        try:
            names = sorted(os.listdir(os.path.expanduser(source)))
        except OSError as error:
            raise BadInput(
                f"{source} cannot be read ({error.strerror}); name a folder, or hf:USER/REPO"
            ) from None
        wanted = [name for name in names if _wanted(name, model)][:_FILES_MAX]
        yield [Path(os.path.expanduser(source)) / name for name in wanted]
        return
    if is_offline():
        raise BadInput(f"HF_HUB_OFFLINE allows no downloads from {source}; name a folder")
    repository = Repository.ask(source.removeprefix(HUB))
    with tempfile.TemporaryDirectory(prefix="edgekv-") as folder:
        paths: list[Path] = []
        for name, file in sorted(repository.files.items()):
            path = Path(folder) / name.rpartition("/")[2]
            if _wanted(path.name, model) and not path.exists() and len(paths) < _FILES_MAX:
                if file.n_bytes > MAX_BYTES:
                    raise BadInput(f"{name} of {source} is larger than any profile")
                fetch(repository, file, path)
                paths.append(path)
        yield paths
