"""A model of a repository, fetched into Hugging Face's cache as huggingface_hub lays it out."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edgekv.errors import BadInput
from edgekv.files import anything, replaced
from edgekv.hub.files import fetch
from edgekv.hub.repository import Remote, Repository, is_name, is_offline
from edgekv.memory.sizes import size_text
from edgekv.models_found import hugging_face, quants

SITES = ("hf.co/", "huggingface.co/", "https://hf.co/", "https://huggingface.co/")
"""What Ollama's users and browsers write in front of USER/REPO."""
SHOWN_MAX = 8
Say = Callable[[str], None]


@dataclass(frozen=True)
class Wanted:
    """A model by its name: repo, and a file of it or a quantisation, or neither."""

    repo: str
    file: str = ""
    quant: str = ""

    @classmethod
    def of(cls, text: str) -> Wanted | None:
        """From [hf:]USER/REPO, USER/REPO:QUANT or USER/REPO/FILE; None for anything else."""
        name = text
        for prefix in (f"{hugging_face.NAME}:", *SITES):
            name = name.removeprefix(prefix)
        repo, _, quant = name.partition(":")
        user, _, rest = repo.partition("/")
        repo, _, file = rest.partition("/")
        repo = f"{user}/{repo}"
        if not is_name(repo) or (file and quant) or (":" in name and not quant):
            return None
        return cls(repo, file, quant)

    def __str__(self) -> str:
        return f"{hugging_face.NAME}:{self.repo}" + (
            f"/{self.file}" if self.file else f":{self.quant}" if self.quant else ""
        )


def download(wanted: Wanted, say: Say) -> str:
    """Fetch a model, of several files all; returns the path of the first. What is there already is
    not fetched again.

    say: is told in a line what is fetched. Raises BadInput, one line, for a model that there is
    not, or that cannot be had.
    """
    if is_offline():
        raise BadInput(f"{wanted} is not on this computer, and HF_HUB_OFFLINE allows no downloads")
    repository = Repository.ask(wanted.repo)
    files = _files(repository, wanted)
    cache = Path(hugging_face.root()) / (hugging_face.PREFIX + wanted.repo.replace("/", "--"))
    snapshot = cache / "snapshots" / repository.commit
    missing = [
        one
        for one in files
        if not (cache / "blobs" / one.digest).exists() and not (snapshot / one.name).exists()
    ]
    if missing:
        size = size_text(sum(one.n_bytes for one in missing))
        say(f"downloading {size} of {wanted} to {cache}")
    try:
        (cache / "blobs").mkdir(parents=True, exist_ok=True)
        for one in files:
            _put(repository, one, cache / "blobs" / one.digest, snapshot / one.name)
        (cache / "refs").mkdir(exist_ok=True)
    except OSError as error:
        raise BadInput(
            f"{cache} cannot be written ({error.strerror}); set HF_HOME to another folder"
        ) from None
    except KeyboardInterrupt:
        say("stopped; the same command goes on where it was")
        raise
    with replaced(cache / "refs" / "main", anything, "reference") as f:
        f.write(repository.commit.encode())
    return str(snapshot / files[0].name)


def _put(repository: Repository, file: Remote, blob: Path, place: Path) -> None:
    """Fetch a file unless it is there, and give it its name in the snapshot."""
    if place.exists():
        return
    if not blob.exists():
        fetch(repository, file, blob)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)  # a link to what is gone
    try:
        os.symlink(os.path.relpath(blob, place.parent), place)
    except OSError:  # a system without links, as huggingface_hub does it there
        shutil.move(blob, place)


def _files(repository: Repository, wanted: Wanted) -> list[Remote]:
    """The files that a name means, of a model in several all. Raises BadInput if there are none."""
    names = sorted(name for name in repository.files if quants.is_model(name))
    if wanted.file:
        name = wanted.file if wanted.file in repository.files else None
    else:
        name = quants.best(names, wanted.quant)
    if name is None:
        raise BadInput(f"{wanted.repo} has no such model: {_there(wanted, names)}")
    part = quants.split_of(name)
    parts = part.names if part else [name]
    gone = [one for one in parts if one not in repository.files]
    if gone:
        raise BadInput(f"{wanted.repo} is incomplete: it has no {gone[0]}; name another file")
    return [repository.files[one] for one in parts]


def _there(wanted: Wanted, names: list[str]) -> str:
    """What there is instead."""
    if not names:
        return "it has no GGUF file; most models have a repository whose name ends with -GGUF"
    tags = [quants.tag(name) for name in names]
    shown = list(dict.fromkeys(tags if wanted.quant and all(tags) else names))
    more = f" and {len(shown) - SHOWN_MAX} more" if len(shown) > SHOWN_MAX else ""
    return f"it has {', '.join(shown[:SHOWN_MAX])}{more}"
