"""Hugging Face's cache: models--USER--REPO/snapshots/COMMIT/FILE, links to ../../blobs/DIGEST."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress

from edgekv.model.header import open_regular
from edgekv.models.found import places, quants
from edgekv.models.found.files import File, gguf_files, why_not
from edgekv.models.found.found import Found

NAME = "hf"
PREFIX = "models--"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_REF_BYTES = 40


def root() -> str:
    """The folder of the cache, as huggingface_hub finds it; it need not exist."""
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if named:
        return os.path.expanduser(named)
    # huggingface_hub takes XDG_CACHE_HOME on every system
    usual = os.environ.get("XDG_CACHE_HOME") or places.home(".cache")
    hub = os.environ.get("HF_HOME") or os.path.join(usual, "huggingface")
    return os.path.join(os.path.expanduser(hub), "hub")


def find() -> Iterator[Found]:
    """The models of all repositories."""
    return repositories(root())


def repositories(cache: str) -> Iterator[Found]:
    """The models of all repositories of a cache: 'hf:USER/REPO:QUANT', or 'hf:USER/REPO/FILE' where
    the quantisation does not tell files apart.
    """
    try:
        folders = sorted(os.listdir(cache))
    except OSError:
        return
    for folder in folders:
        repo = folder.removeprefix(PREFIX).replace("--", "/")
        if folder.startswith(PREFIX) and repo.count("/") == 1:
            yield from _models(repo, files(cache, repo))


def _models(repo: str, there: dict[str, File]) -> Iterator[Found]:
    names = [name for name in there if quants.is_model(name)]
    for name in names:
        tag = quants.tag(name)
        is_told = bool(tag) and quants.best(names, tag) == name
        also = [quants.stem(name).rpartition("/")[2], f"{NAME}:{repo}/{name}"]
        if quants.best(names, "") == name:
            also += [repo, repo.rpartition("/")[2], f"{NAME}:{repo}"]
        full = f"{repo}:{tag}" if is_told else f"{repo}/{name}"
        yield Found(f"{NAME}:{full}", there[name].path, tuple(also), there[name].why_not)


def files(cache: str, repo: str) -> dict[str, File]:
    """The GGUF files of a repository by their names in it; the main branch's go before others."""
    folder = os.path.join(cache, PREFIX + repo.replace("/", "--"))
    found: dict[str, File] = {}
    for commit in _commits(folder):
        for file in gguf_files(os.path.join(folder, "snapshots", commit)):
            why = why_not(file.path, folder)
            if file.name not in found or found[file.name].why_not and not why:
                found[file.name] = File(file.name, file.path, why)
    return found


def _commits(folder: str) -> list[str]:
    """The snapshots there are, the main branch's first."""
    main = ""
    try:
        inner = os.listdir(os.path.join(folder, "snapshots"))
    except OSError:
        return []
    with suppress(OSError), open_regular(os.path.join(folder, "refs", "main")) as file:
        main = file.read(_REF_BYTES).decode(errors="replace")
    there = sorted(filter(_COMMIT.fullmatch, inner))
    return sorted(there, key=lambda commit: commit != main)
