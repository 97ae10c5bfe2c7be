"""The models of this computer, and what running each would take here: for `edgekv models`."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass

from edgekv.commands.fit import CTX_DEFAULT, LOADED_BYTES, Device
from edgekv.commands.judging import Judge
from edgekv.errors import EdgeKVError
from edgekv.model.header import DAMAGE, Header, files_of, opened
from edgekv.model.outline import VOCABULARY
from edgekv.models.found.found import Found
from edgekv.models.found.judged import Judged, Judgements, key


@dataclass(frozen=True)
class Machine:
    """Where models would run. n_bytes: what they may take there, without this process."""

    name: str
    is_gpu: bool
    n_bytes: int

    @classmethod
    def here(cls, margin: int) -> Machine:
        """The device that `fit` takes, with so many bytes left alone."""
        from edgekv.base.machine import rss_now
        from edgekv.commands.load import build_info

        device = Device.of(None, build_info()["devices"])
        process = 0 if device.is_gpu else rss_now() + LOADED_BYTES
        return cls(device.name, device.is_gpu, max(device.free - margin - process, 0))


@dataclass(frozen=True)
class ListedModel:
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


def entries(room: Machine, n_ctx: int | None, tell: Callable[[str], object]) -> list[ListedModel]:
    """All models that are found, each file once. n_ctx: tokens that shall fit, None for `fit`'s
    number; tell: called with the name of each that has to be looked at.
    """
    from edgekv.models.found.stores import everything
    from edgekv.profiles import places

    there: dict[str, Found] = {}
    for one in everything():
        there.setdefault(os.path.realpath(one.path), one)
    judgements = Judgements()
    with Judge() as judge:
        look = Survey(room, n_ctx or CTX_DEFAULT, judgements, judge, tell, places.shapes())
        try:
            return [_entry(one, look) for one in there.values()]
        finally:
            judgements.save()


@dataclass(frozen=True)
class Survey:
    """How models are looked at."""

    room: Machine
    n_ctx: int
    judgements: Judgements
    judge: Judge
    tell: Callable[[str], object]
    shapes: set[tuple[object, ...]]
    """Of the models that may have a profile in the cache or a shipped one."""


def _entry(found: Found, look: Survey) -> ListedModel:
    parts = files_of(found.path)
    there = [path for path in parts if os.path.isfile(path)]
    size = sum(os.path.getsize(path) for path in there)
    name = found.name, found.source, found.path, found.also, size
    if found.why_not or len(there) < len(parts):
        lacks = f"{len(parts) - len(there)} of its {len(parts)} files are missing"
        return ListedModel(*name, found.why_not or lacks)
    try:
        judged, profile = _judged(found, parts, look)
    except (EdgeKVError, OSError) as error:
        why = str(error).removeprefix(found.path).lstrip(": ").removeprefix("is ")
        return ListedModel(*name, why)
    if judged.no_model:
        return ListedModel(*name, judged.no_model, judged.arch)
    best = judged.best(look.room.n_bytes)
    return ListedModel(
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


def _judged(found: Found, parts: list[str], look: Survey) -> tuple[Judged, str]:
    """What is known of a model, and its profile's file. Raises EdgeKVError or OSError."""
    from edgekv.library import lib_dir
    from edgekv.version import __version__

    info = lib_dir() / "build-info.json"
    build = (info.stat().st_mtime_ns, info.stat().st_size) if info.exists() else ()
    profile = _profile(found.path, look.shapes)
    stamp = os.stat(profile).st_mtime_ns if profile else ""
    here = look.n_ctx, look.room.is_gpu, __version__, build
    name = key(parts, *here, profile or None, stamp)
    known = look.judgements.get(name)
    if known is None:
        look.tell(found.name)
        known = look.judge.ask(found.path, look.n_ctx, look.room.is_gpu, bool(profile))
        look.judgements.put(name, known)
    return known, profile


def _profile(path: str, shapes: set[tuple[object, ...]]) -> str:
    """The file of a model's profile, empty if there is none. Weights are read only where one may
    be there. shapes: see `edgekv.profiles.places.shapes`.
    """
    from edgekv.model import identity
    from edgekv.profiles import find, places

    if not any(map(os.path.isfile, places.together(places.beside(path)))):
        with suppress(OSError, *DAMAGE), opened(path) as data:
            if identity.shape(Header(data, until=VOCABULARY).meta) not in shapes:
                return ""
    profile = find(path, predicts=True)
    return profile.path if profile else ""
