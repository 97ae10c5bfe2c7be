"""The machine: memory that is free, and what this process took of it."""

from __future__ import annotations

import os
import sys
from pathlib import Path, PurePosixPath
from typing import Any

from edgekv.errors import EdgeKVError

_CGROUP = (
    ("", "/sys/fs/cgroup", ("memory.max", "memory.current", "memory.stat")),
    (
        "memory",
        "/sys/fs/cgroup/memory",
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat"),
    ),
)
"""Control groups, version 2 and 1: the controller's name, the root's folder, and files of the
limit, the use and details. A process in a group or a container sees the whole machine in /proc.
"""
_OWN_GROUPS = Path("/proc/self/cgroup")


def memory_total() -> int:
    """Bytes of main memory."""
    return int(_read("virtual_memory").total)


def memory_free(swap: bool = False) -> int:
    """Bytes that a process can get without pushing another one out; swap: what lies there, too."""
    free = _read("virtual_memory").available + (_read("swap_memory").free if swap else 0)
    return int(
        min([free, *(max(limit - used, 0) for limit, used in map(_limit, _groups()) if limit)])
    )


def _read(what: str) -> Any:
    """A function of psutil's, which reads /proc on Linux."""
    import psutil

    try:
        return getattr(psutil, what)()
    except OSError as error:
        raise EdgeKVError(
            f"the memory of this machine cannot be read ({error}); in a chroot, mount /proc"
        ) from None


def _groups() -> list[tuple[Path, ...]]:
    """Files of this process's group and of those that it is in, up to the root; of a container
    that sees no more than its own group, the root's.
    """
    own = {
        name: path
        for _, names, path in (x.split(":", 2) for x in _lines(_OWN_GROUPS))
        for name in names.split(",")
    }
    found = []
    for name, root, files in _CGROUP:
        path = PurePosixPath(own.get(name, "/"))
        for group in (path, *path.parents):
            folder = Path(root) / group.relative_to("/")
            found.append(tuple(folder / file for file in files))
    return found


def _limit(files: tuple[Path, ...]) -> tuple[int, int]:
    """Bytes a group may use and uses, (0, 0) without a limit. Cached files do not count."""
    try:
        limit, used = (int(file.read_text()) for file in files[:2])
        details = dict(line.split() for line in files[2].read_text().splitlines())
        return limit, used - sum(
            int(details.get(key, 0)) for key in ("inactive_file", "active_file")
        )
    except (OSError, ValueError):  # no such file, or 'max'
        return 0, 0


def rss_peak() -> int | None:
    """The largest resident size that this process ever had, None where the system does not say."""
    peak = _status("VmHWM")
    if peak:
        return peak
    if sys.platform == "win32":
        return None
    import resource

    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024  # macOS counts bytes, others KiB


def rss_now() -> int:
    """The resident size of this process."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def _status(name: str) -> int:
    """A line of /proc/self/status in bytes, 0 where there is none."""
    lines = _lines(Path("/proc/self/status"))
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), 0)


def _lines(path: Path) -> list[str]:
    """Of a file of the system's; none where it has no such file."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def lies_in_memory(folder: str | os.PathLike[str]) -> bool:
    """Whether files in a folder take memory (tmpfs). False where the system does not say."""
    real = os.path.realpath(folder)
    found, kind = "", ""
    for _, point, its, *_ in map(str.split, _lines(Path("/proc/self/mounts"))):
        place = point.encode().decode("unicode_escape")  # a space is \\040 there
        is_in = os.path.commonpath([real, place]) == place
        if is_in and len(place) >= len(found):  # of several on one place the last one counts
            found, kind = place, its
    return kind in ("tmpfs", "ramfs")
