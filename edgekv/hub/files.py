"""One file of a repository, fetched so that it can be gone on with, and checked before it is named.

huggingface_hub drops what it has when it is stopped, and does not look at checksums.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from edgekv.errors import BadInput
from edgekv.hub.repository import Remote, Repository, one_line
from edgekv.memory.sizes import size_text

PARTIAL = ".edgekv.incomplete"
LARGEST = 50 * 10**9
"""Bytes of a file that Hugging Face serves over plain HTTP."""
_PIECE = 1 << 20
_SHA1_DIGITS = 40


def fetch(repository: Repository, file: Remote, target: Path) -> None:
    """Put a file's bytes at `target`, whose folder exists.

    What an earlier try has of them stays in a file beside it, and is not fetched again. Raises
    BadInput where they cannot be had, or are not those that the repository names.
    """
    partial = target.with_name(target.name + PARTIAL)
    with one_line(f"{repository.name}/{file.name}"):
        from filelock import FileLock, Timeout

        try:
            with FileLock(f"{partial}.lock", timeout=0):
                if not target.exists():
                    _fetch(repository, file, partial)
                    os.replace(partial, target)
                with suppress(OSError):  # some systems keep what is open
                    os.unlink(f"{partial}.lock")
        except Timeout:
            raise BadInput(
                f"{file.name} is being downloaded by another process; wait for it"
            ) from None


def _fetch(repository: Repository, file: Remote, partial: Path) -> None:
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    with open(partial, "ab") as f:
        if f.tell() > file.n_bytes:
            f.truncate(0)
        n_there = f.seek(0, os.SEEK_END)
        if file.n_bytes > LARGEST:
            raise BadInput(
                f"{file.name} is larger than {LARGEST // 10**9} GB, and edgekv downloads no such"
                f" file; 'hf download {repository.name} {file.name}' puts it where edgekv finds it"
            )
        n_free = shutil.disk_usage(partial.parent).free
        if file.n_bytes - n_there > n_free:
            raise BadInput(
                f"{file.name} takes {size_text(file.n_bytes - n_there)} more, and"
                f" {size_text(n_free)} are free at {partial.parent}; make room, or set HF_HOME"
            )
        while True:
            try:
                http_get(
                    repository.url(file),
                    f,
                    resume_size=n_there,
                    headers=build_hf_headers(library_name="edgekv"),
                    expected_size=file.n_bytes,
                    displayed_filename=file.name,
                )
                break
            except Exception:  # a connection that broke, and whatever the HTTP library calls that
                n_before, n_there = n_there, f.seek(0, os.SEEK_END)
                if n_there <= n_before:
                    raise
        f.flush()
        os.fsync(f.fileno())
    if digest(partial, file) != file.digest:
        partial.unlink()
        raise BadInput(
            f"{file.name} came with a wrong checksum and was thrown away; the same command fetches"
            " it again"
        )


def digest(path: Path, file: Remote) -> str:
    """The file's digest, of the kind that the repository gives for it."""
    with open(path, "rb") as f:
        if len(file.digest) == _SHA1_DIGITS:
            begin = hashlib.sha1(b"blob %d\0" % file.n_bytes)
            return _hexdigest(f, begin.update, begin.hexdigest)
        sha256 = hashlib.sha256()
        return _hexdigest(f, sha256.update, sha256.hexdigest)


def _hexdigest(f: BinaryIO, update: Callable[[bytes], None], hexdigest: Callable[[], str]) -> str:
    while piece := f.read(_PIECE):
        update(piece)
    return hexdigest()
