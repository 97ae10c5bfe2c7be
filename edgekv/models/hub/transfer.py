"""A file from the server to Hugging Face's cache: it goes on where it stopped, and is checked.

huggingface_hub itself throws away what it has of a file when it is interrupted, and compares sizes
only. The cache's layout is huggingface_hub's, so other programs find what lies there.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from edgekv.base import files
from edgekv.base.sizes import size_text
from edgekv.errors import BadInput
from edgekv.models.hub.remote import RemoteFile, Repository

Tell = Callable[[str], object]
_SHA256, _GIT = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")
_PIECE = 1 << 20


def into_cache(
    there: Repository, names: Sequence[str], cache: str, tell: Tell, size_max: int | None = None
) -> list[str]:
    """The paths of files of a repository in the folder `cache`, fetched where they are not there.

    tell: called with a line before each download; size_max: bytes of a file. Raises BadInput, one
    line; what came of a file stays for the next time.
    """
    import huggingface_hub

    folder = Path(cache, f"models--{there.repo.replace('/', '--')}")
    remote = [there.file(name) for name in names]
    for one in remote:
        if size_max is not None and one.size > size_max:
            raise BadInput(f"{one.name} has {size_text(one.size)}, which is too much: not fetched")
    _check_room(folder, remote)
    for one in remote:
        _fetch(there, one, folder / "blobs", tell)
    paths = []
    with there.in_one_line():
        for one in reversed(remote):  # a model in parts is found by its first
            paths.append(
                huggingface_hub.hf_hub_download(
                    there.repo,
                    one.name,
                    revision=there.commit,
                    cache_dir=cache,
                    endpoint=there.endpoint,
                )
            )
    refs = folder / "refs"
    refs.mkdir(exist_ok=True)
    with files.replaced(refs / "main", files.anything, "name of a commit") as f:
        f.write(there.commit.encode())
    return paths[::-1]


def _check_room(folder: Path, remote: Sequence[RemoteFile]) -> None:
    """Raises BadInput if the disk has not the room for what has to be fetched."""
    blobs = folder / "blobs"
    try:
        blobs.mkdir(parents=True, exist_ok=True)
        wanted = [one for one in remote if not (blobs / one.etag).exists()]
        here = sum(_size(_partial(blobs, one)) for one in wanted)
        free = shutil.disk_usage(blobs).free
    except OSError as error:
        raise BadInput(f"'{folder}' cannot be written ({error.strerror}); set HF_HOME") from None
    needed = sum(one.size for one in wanted) - here
    if needed > free:
        raise BadInput(
            f"the download needs {size_text(needed)}, and {folder} has {size_text(free)} left: make"
            " room, set HF_HOME, or take a smaller quantisation"
        )


def _fetch(there: Repository, one: RemoteFile, blobs: Path, tell: Tell) -> None:
    """The file `blobs/ETAG`, complete and checked. Raises BadInput."""
    if not (_SHA256.fullmatch(one.etag) or _GIT.fullmatch(one.etag)):
        raise BadInput(f"the server gives no checksum of {one.name}: it is not taken")
    target, partial = blobs / one.etag, _partial(blobs, one)
    with _locked(blobs, one.etag):
        if target.exists():
            return
        begin = _size(partial)
        if begin > one.size:
            partial.unlink()
            begin = 0
        rest = f", {size_text(one.size - begin)} of it are left" if begin else ""
        tell(
            f"downloading {there.repo}/{one.name} from {there.endpoint}:"
            f" {size_text(one.size)}{rest}"
        )
        try:
            with there.in_one_line(), open(partial, "ab") as f:
                _receive(there, one, f, begin)
                f.flush()
                os.fsync(f.fileno())
        except KeyboardInterrupt:
            tell(f"stopped at {size_text(_size(partial))}; the same command goes on from there")
            raise
        if _digest(partial, one) != one.etag:
            partial.unlink()
            raise BadInput(
                f"what came as {one.name} has another checksum than {there.endpoint} says: it was"
                " deleted; try again"
            )
        os.replace(partial, target)


def _receive(there: Repository, one: RemoteFile, f: BinaryIO, begin: int) -> None:
    """Append what is missing from byte `begin` on, over broken lines while something comes."""
    import logging

    from huggingface_hub.file_download import http_get

    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)  # each broken line would be told in several lines
    try:
        while True:
            try:
                http_get(
                    one.url,
                    f,
                    resume_size=begin,
                    headers=there.headers(),
                    expected_size=one.size,
                    displayed_filename=one.name,
                )
                return
            except Exception:  # not every version goes on by itself after a line that broke
                before, begin = begin, f.seek(0, os.SEEK_END)
                if begin <= before:  # nothing came
                    raise
    except ValueError:  # beyond what it takes without hf_xet
        raise BadInput(
            f"{one.name} is too large for a plain download; fetch it with 'hf download"
            f" {there.repo} {one.name}'"
        ) from None
    finally:
        logger.setLevel(level)


def _digest(path: Path, one: RemoteFile) -> str:
    """SHA-256, or git's SHA-1 of the file with its size, by what the server named; in hex."""
    found = hashlib.sha256()
    if _GIT.fullmatch(one.etag):
        found = hashlib.sha1(f"blob {one.size}\0".encode(), usedforsecurity=False)
    with open(path, "rb") as f:
        while piece := f.read(_PIECE):
            found.update(piece)
    return found.hexdigest()


def _partial(blobs: Path, one: RemoteFile) -> Path:
    """What there is of a file; older versions of huggingface_hub have it at the same place."""
    return blobs / f"{one.etag}.incomplete"


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return 0


@contextmanager
def _locked(blobs: Path, etag: str) -> Iterator[None]:
    """One process at a time, as huggingface_hub locks a file."""
    from huggingface_hub.utils import WeakFileLock

    place = blobs.parent.parent / ".locks" / blobs.parent.name / f"{etag}.lock"
    place.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(place):
        yield
