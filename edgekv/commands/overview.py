"""The models of this computer, and what running each would take here: for `edgekv models`."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from edgekv.commands.fit import CTX_DEFAULT, LOADED_BYTES, Place
from edgekv.commands.judge import Judge
from edgekv.errors import EdgeKVError
from edgekv.model.header import DAMAGE, Header, files_of, opened
from edgekv.model.outline import VOCABULARY
from edgekv.models_found.found import Found
from edgekv.models_found.judged import Judged, Memory, key

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Room:
    """Where models would run. n_bytes: what they may take there, without this process."""

    name: str
    is_gpu: bool
    n_bytes: int

    @classmethod
    def here(cls, margin: int) -> Room:
        """The device that `fit` takes, with so many bytes left alone."""
        from edgekv.commands.load import build_info
        from edgekv.memory.machine import rss_now

        place = Place.of(None, build_info()["devices"])
        process = 0 if place.is_gpu else rss_now() + LOADED_BYTES
        return cls(place.name, place.is_gpu, max(place.free - margin - process, 0))


@dataclass(frozen=True)
class Entry:
    """One model. size: bytes of its files; ratio, cache_type: how n_ctx tokens fit, None if they
    do not; profile: its file, empty if none was made; why_not: why it cannot be run, empty if it
    can, else much is unknown.
    """

    name: str
    source: str
    path: str
    also: tuple[str, ...]
    size: int
    why_not: str = ""
    arch: str = ""
    kv_bytes_per_token: int = 0
    compressible: bool | None = None
    uncompressed_because: str = ""
    n_ctx: int = 0
    fits: bool | None = None
    ratio: float | None = None
    cache_type: str | None = None
    profile: str = ""

    def record(self) -> dict[str, object]:
        """For programs."""
        return asdict(self)


def entries(room: Room, n_ctx: int | None, tell: Callable[[str], object]) -> list[Entry]:
    """All models that are found, each file once. n_ctx: tokens that shall fit, None for `fit`'s
    number; tell: called with the name of each that has to be looked at.
    """
    from edgekv.models_found.stores import everything

    there: dict[str, Found] = {}
    for one in everything():
        there.setdefault(os.path.realpath(one.path), one)
    with Looking(room, n_ctx or CTX_DEFAULT, tell) as looking:
        return [_entry(one, room, looking) for one in there.values()]


def _entry(found: Found, room: Room, looking: Looking) -> Entry:
    parts = files_of(found.path)
    there = [path for path in parts if os.path.isfile(path)]
    size = sum(os.path.getsize(path) for path in there)
    name = found.name, found.source, found.path, found.also, size
    if found.why_not or len(there) < len(parts):
        lacks = f"{len(parts) - len(there)} of its {len(parts)} files are missing"
        return Entry(*name, found.why_not or lacks)
    try:
        judged, profile = looking.at(found, parts)
    except (EdgeKVError, OSError) as error:
        why = str(error).removeprefix(found.path).lstrip(": ").removeprefix("is ")
        return Entry(*name, why)
    if judged.no_model:
        return Entry(*name, judged.no_model, judged.arch)
    best = judged.best(room.n_bytes)
    return Entry(
        *name,
        arch=judged.arch,
        kv_bytes_per_token=judged.kv_bytes,
        compressible=not judged.why,
        uncompressed_because=judged.why,
        n_ctx=judged.n_ctx,
        fits=best is not None,
        ratio=best and best[0],
        cache_type=best and best[1],
        profile=profile,
    )


class Looking:
    """What is known of models' files, and another process that finds out the rest. Use as a context
    manager.
    """

    def __init__(self, room: Room, n_ctx: int, tell: Callable[[str], object]) -> None:
        from edgekv.profiles import places

        self._room, self._n_ctx, self._tell = room, n_ctx, tell
        self._memory, self._judge = Memory(), Judge()
        self._shapes = places.shapes()

    def __enter__(self) -> Looking:
        return self

    def __exit__(self, *_: object) -> None:
        self._judge.close()
        self._memory.save()

    def at(self, found: Found, parts: list[str]) -> tuple[Judged, str]:
        """What is known of a model, and its profile's file. Raises EdgeKVError or OSError."""
        from edgekv.library import lib_dir
        from edgekv.version import __version__

        info = lib_dir() / "build-info.json"
        build = (info.stat().st_mtime_ns, info.stat().st_size) if info.exists() else ()
        profile = self._profile(found.path)
        stamp = os.stat(profile).st_mtime_ns if profile else ""
        settings = self._n_ctx, self._room.is_gpu
        name = key(parts, *settings, __version__, build, profile or None, stamp)
        known = self._memory.get(name)
        if known is None:
            self._tell(found.name)
            known = self._judge.ask(found.path, *settings, bool(profile))
            self._memory.put(name, known)
        return known, profile

    def _profile(self, path: str) -> str:
        """The file of the model's profile, empty if there is none. Weights are read only where one
        may be there.
        """
        from edgekv.model import identity
        from edgekv.profiles import find, places

        if not any(map(os.path.isfile, places.together(places.beside(path)))):
            with suppress(OSError, *DAMAGE), opened(path) as data:
                header = Header(data, until=VOCABULARY)
                if identity.shape(header.meta) not in self._shapes:
                    return ""
        profile = find(path, predicts=True)
        return profile.path if profile else ""
