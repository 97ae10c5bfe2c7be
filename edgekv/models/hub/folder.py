"""Some files of a repository of Hugging Face's, downloaded into its cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from edgekv.errors import BadInput
from edgekv.models.found import hugging_face
from edgekv.models.hub.remote import Repository
from edgekv.models.hub.transfer import Tell, into_cache
from edgekv.models.hub.wanted import is_offline, wanted


def fetch(
    name: str, chosen: Callable[[Sequence[str]], list[str]], size_max: int, tell: Tell
) -> list[Path]:
    """The paths of the files of a repository that `chosen` picks from their names.

    size_max: bytes of a file, more are refused. Raises BadInput, one line.
    """
    want = wanted(name)
    if want.quant or want.file:
        raise BadInput(f"'{name}' is no repository's name; write hf:USER/REPO")
    if is_offline():
        raise BadInput(f"downloads are off (HF_HUB_OFFLINE), so {want} is not fetched")
    there = Repository(want.repo)
    names = chosen(there.files)
    paths = into_cache(there, names, hugging_face.root(), tell, size_max) if names else []
    return [Path(path) for path in paths]
