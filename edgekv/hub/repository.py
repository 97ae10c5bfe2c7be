"""What a repository of Hugging Face's holds."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from edgekv.errors import BadInput, EdgeKVError

USUAL = "https://huggingface.co"
MISSING = "is not on this computer, and downloading needs more packages: pip install 'edgekv[hub]'"
_REPO = re.compile(r"[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95}", re.ASCII)
_SHA256, _SHA1 = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")
_MOST_BYTES = 1 << 44
_PART = re.compile(r"[^\\:*?\"<>|\0-\x1f]+")
_TRUE = ("1", "ON", "YES", "TRUE")


@dataclass(frozen=True)
class Remote:
    """A file of a repository. name: its path there; digest: hex, SHA-256, or Git's SHA-1 of a small
    file."""

    name: str
    n_bytes: int
    digest: str


@dataclass(frozen=True)
class Repository:
    """name: 'USER/REPO'; commit: which state of it; files: by name."""

    name: str
    commit: str
    files: dict[str, Remote]

    @classmethod
    def ask(cls, name: str, kind: str = "model") -> Repository:
        """What the main branch holds now. Raises BadInput for a name that is none, and where the
        repository cannot be asked.
        """
        if not is_name(name):
            raise BadInput(f"'{name}' is no repository of Hugging Face's; write USER/REPO")
        with one_line(name):
            from huggingface_hub import HfApi

            api = HfApi(endpoint=endpoint())
            found = api.repo_info(name, repo_type=kind, files_metadata=True, timeout=30)
        files = [_remote(one) for one in found.siblings or []]
        commit = str(found.sha)
        if not _SHA1.fullmatch(commit):
            raise BadInput(f"{endpoint()} answers no state of {name}; try again later")
        return cls(name, commit, {one.name: one for one in files if one})

    def url(self, file: Remote) -> str:
        """Where a file's bytes are."""
        from huggingface_hub import hf_hub_url

        return hf_hub_url(self.name, file.name, revision=self.commit, endpoint=endpoint())


def is_name(text: str) -> bool:
    """Whether a text is USER/REPO."""
    return bool(_REPO.fullmatch(text)) and ".." not in text and "--" not in text


def endpoint() -> str:
    """The server: HF_ENDPOINT, or Hugging Face."""
    return (os.environ.get("HF_ENDPOINT") or USUAL).rstrip("/")


def is_offline() -> bool:
    """Whether the user wants no downloads: HF_HUB_OFFLINE."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in _TRUE


@contextmanager
def one_line(name: str) -> Iterator[None]:
    """A `with` block in which whatever goes wrong with a repository becomes a BadInput."""
    try:
        yield
    except EdgeKVError:
        raise
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "huggingface_hub":
            raise
        raise BadInput(f"{name} {MISSING}") from None
    except Exception as error:  # which library asks over HTTP depends on huggingface_hub's version
        raise BadInput(_why(name, error)) from None


def _why(name: str, error: Exception) -> str:
    """What to tell about an error."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403, 404):
        return (
            f"{endpoint()} has no {name} for you; check the name, or if it needs your consent or is"
            " private, agree on its page and give HF_TOKEN or run 'hf auth login'"
        )
    if status is not None:
        return f"{endpoint()} answers {status} for {name}; the same command goes on later"
    if type(error).__name__ == "OfflineModeIsEnabled":
        return f"{name} is not on this computer, and HF_HUB_OFFLINE allows no downloads"
    if isinstance(error, OSError) and error.errno and error.filename:
        return f"{error.filename} cannot be written ({error.strerror}); make room, or set HF_HOME"
    what = " ".join(str(error).split())[:200] or type(error).__name__
    return f"{name} cannot be had from {endpoint()} ({what}); the same command goes on later"


def _remote(found: Any) -> Remote | None:
    """A file as the server describes it; None for a description that makes no sense."""
    name, lfs = str(found.rfilename), found.lfs
    digest = str(lfs.sha256 if lfs else found.blob_id)
    n_bytes = lfs.size if lfs else found.size
    form = _SHA256 if lfs else _SHA1
    parts = name.split("/")
    is_sane = all(_PART.fullmatch(part) and part not in (".", "..") for part in parts)
    if not is_sane or not form.fullmatch(digest) or type(n_bytes) is not int:
        return None
    return Remote(name, n_bytes, digest) if 0 <= n_bytes <= _MOST_BYTES else None
