"""Files of ours: written as a whole or not at all, and read with distrust.

What is written has no name until it is complete, so that nothing is left of it when the process is
killed; where the system has no such files, it stands beside the target under a name of its own.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from edgekv.errors import BadInput

IsOurs = Callable[[BinaryIO], bool]
"""Whether a file, open at its beginning, is of the kind that is about to be written."""


def begins_with(magic: bytes) -> IsOurs:
    """Return the test for files that begin with `magic`."""
    return lambda f: f.read(len(magic)) == magic


def contains(mark: bytes, n_bytes: int = 128) -> IsOurs:
    """Return the test for files that have `mark` in their first n_bytes bytes."""
    return lambda f: mark in f.read(n_bytes)


def anything(f: BinaryIO) -> bool:
    """The test for a place of edgekv's own: whatever is there may go."""
    return True


def check(path: str | os.PathLike[str], is_ours: IsOurs, kind: str) -> None:
    """Raises BadInput if `replaced` would: before minutes of work, not after."""
    with _in_one_line(path, "written"):
        target = Path(os.path.realpath(expanded(path)))
        _replaceable(target, str(path), is_ours, kind)
        os.stat(target.parent)


@contextmanager
def replaced(
    path: str | os.PathLike[str],
    is_ours: IsOurs,
    kind: str,
    new: int = 0o666,
    is_synced: bool = True,
) -> Iterator[BinaryIO]:
    """A `with` block that writes the file `path`, which is as before unless the block ends well.

    Yields a file object to write to. After the block the file is on the disk under its name. A file
    that is replaced keeps its permissions, a link stays a link.
    kind: a noun for errors, such as "saved conversation"; new: permissions of a new file, of which
    the user's umask takes some; is_synced: False does not wait for the disk: a power cut may then
    leave a damaged file.
    Raises BadInput, one line, if `path` is no name for a file, if something stands there that is
    neither empty nor `is_ours`, or if it cannot be written (a full disk, for instance).
    """
    with _in_one_line(path, "written"):
        target = Path(os.path.realpath(expanded(path)))
        mode = _replaceable(target, str(path), is_ours, kind)
        fd, name = _fresh(target.parent, new)
        try:
            f = os.fdopen(fd, "wb")
            try:
                yield f
                f.flush()
                if mode is not None:
                    os.chmod(name or fd, mode)
                if is_synced:
                    os.fsync(fd)
                name = name or _give_name(fd, target.parent)
            finally:
                with suppress(OSError):  # after an error it tries, and fails, to write what is left
                    f.close()
            os.replace(name, target)
            name = None
        finally:
            if name is not None:
                with suppress(OSError):
                    os.unlink(name)
        if is_synced:
            _sync_folder(target.parent)


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[BufferedReader]:
    """A `with` block that reads the file `path`.

    Raises BadInput, one line, if it cannot be read, be it within the block, and if it is no
    ordinary file: reading a pipe or a device may have no end.
    """
    with _in_one_line(path, "read"), _ordinary(expanded(path), str(path)) as f:
        yield f


def made_folder(path: Path, to_do: str, mode: int = 0o777) -> None:
    """Have a folder. Raises BadInput, one line that ends with `to_do`, if there can be none."""
    try:
        path.mkdir(mode, parents=True, exist_ok=True)
    except OSError as error:
        why = error.strerror or error
        raise BadInput(f"'{path}' cannot be made a folder ({why}); {to_do}") from None


def expanded(path: str | os.PathLike[str]) -> Path:
    """`path` with the user's folder for ~. Raises BadInput, one line, for what can be no name."""
    name = os.fspath(path)
    if not name or "\0" in name:
        shown = name.replace("\0", "?")
        raise BadInput(f"'{shown}' is empty or has a NUL character in it; give another name")
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise BadInput(
            f"'{name}': there is no such user; write ./{name} for a file of this name"
        ) from None


@contextmanager
def _in_one_line(path: str | os.PathLike[str], what: str) -> Iterator[None]:
    """Turns whatever the system says about `path` into a BadInput."""
    try:
        yield
    except IsADirectoryError:
        raise BadInput(f"'{path}' is a folder; name a file in it") from None
    except FileNotFoundError:
        gone = "there is no such file" if what == "read" else "there is no such folder"
        raise BadInput(f"'{path}' cannot be {what} ({gone}); check the name") from None
    except OSError as error:
        why = error.strerror or error
        raise BadInput(f"'{path}' cannot be {what} ({why}); choose another name or place") from None


def _ordinary(path: Path, name: str) -> BufferedReader:
    """The open file `path`, which the user calls `name`."""
    # a pipe must not wait for its other end
    f = open(path, "rb", opener=lambda p, flags: os.open(p, flags | getattr(os, "O_NONBLOCK", 0)))
    if not stat.S_ISREG(os.fstat(f.fileno()).st_mode):
        f.close()
        raise BadInput(f"'{name}' is no ordinary file; choose another name")
    return f


def _replaceable(target: Path, name: str, is_ours: IsOurs, kind: str) -> int | None:
    """Permissions of the file that is going to be replaced, None if there is none."""
    try:
        with _ordinary(target, name) as f:
            now = os.fstat(f.fileno())
            if now.st_size and not is_ours(f):
                raise BadInput(f"'{name}' exists and is no {kind}; choose another name")
        os.close(os.open(target, os.O_WRONLY))  # replacing it would need no permission
    except FileNotFoundError:  # or no more: whoever else writes it may be done with it
        return None
    return stat.S_IMODE(now.st_mode)


def _fresh(folder: Path, mode: int) -> tuple[int, str | None]:
    """A new file in a folder: its descriptor, and its name if it has one."""
    if hasattr(os, "O_TMPFILE") and os.path.isdir("/proc/self/fd"):
        with suppress(OSError):  # not every file system has them
            return os.open(folder, os.O_TMPFILE | os.O_WRONLY, mode), None
    name = _beside(folder)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    return os.open(name, flags, mode), name


def _give_name(fd: int, folder: Path) -> str:
    name = _beside(folder)
    # the source's folder counts for nothing, but with it Python follows the link to the file itself
    os.link(f"/proc/self/fd/{fd}", name, src_dir_fd=fd)
    return name


def _beside(folder: Path) -> str:
    return str(folder / f".edgekv-{secrets.token_hex(8)}.tmp")


def _sync_folder(folder: Path) -> None:
    """The new name too is on the disk, where the system can do that."""
    with suppress(OSError):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
