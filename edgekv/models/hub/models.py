"""A model of Hugging Face's, or some files of a repository, downloaded into its cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from edgekv.errors import BadInput
from edgekv.models.found import hugging_face
from edgekv.models.hub.remote import Repository
from edgekv.models.hub.transfer import Tell, into_cache
from edgekv.models.hub.wanted import Wanted, is_offline, wanted


def download(name: str, tell: Tell) -> str:
    """The file of the model that a name means, of the first part if there are several; fetched
    where it is not in the cache.

    tell: called with a line before each download. Raises BadInput, one line.
    """
    want = wanted(name)
    there = _repository(want)
    return into_cache(there, want.files(there.files), hugging_face.root(), tell)[0]


def fetch(
    name: str, chosen: Callable[[Sequence[str]], list[str]], size_max: int, tell: Tell
) -> list[Path]:
    """The paths of the files of a repository that `chosen` picks from their names.

    size_max: bytes of a file, more are refused. Raises BadInput, one line.
    """
    want = wanted(name)
    if want.quant or want.file:
        raise BadInput(f"'{name}' is no repository's name; write hf:USER/REPO")
    there = _repository(want)
    names = chosen(there.files)
    paths = into_cache(there, names, hugging_face.root(), tell, size_max) if names else []
    return [Path(path) for path in paths]


def _repository(want: Wanted) -> Repository:
    if is_offline():
        raise BadInput(f"downloads are off (HF_HUB_OFFLINE), so {want} is not fetched")
    return Repository(want.repo)
