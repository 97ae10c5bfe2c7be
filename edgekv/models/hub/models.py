"""A model of Hugging Face's, downloaded into its cache."""

from __future__ import annotations

from edgekv.errors import BadInput
from edgekv.models.found import hugging_face
from edgekv.models.hub.remote import Repository
from edgekv.models.hub.transfer import Tell, into_cache
from edgekv.models.hub.wanted import is_offline, wanted


def download(name: str, tell: Tell) -> str:
    """The file of the model that a name means, of the first part if there are several; fetched
    where it is not in the cache.

    tell: called with a line before each download. Raises BadInput, one line.
    """
    want = wanted(name)
    if is_offline():
        raise BadInput(f"downloads are off (HF_HUB_OFFLINE), so {want} is not fetched")
    there = Repository(want.repo)
    return into_cache(there, want.files(there.files), hugging_face.root(), tell)[0]
