"""Files of ours: whole or not at all, and nothing of anybody else's is overwritten."""

from __future__ import annotations

import os
import resource
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

import pytest

from edgekv.base.files import begins_with, opened, replaced
from edgekv.errors import BadInput

MAGIC = b"ours\n"


def write(path: object, data: bytes = MAGIC + b"new") -> None:
    with replaced(path, begins_with(MAGIC), "file of ours") as f:
        f.write(data)


@pytest.fixture(params=["without a name", "beside"])
def way(request, monkeypatch):
    """Both ways to write a file that is not complete."""
    if request.param == "beside":
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def inodes(folder: Path) -> list[tuple[str, int]]:
    return sorted((p.name, p.lstat().st_ino) for p in folder.iterdir())


def test_a_new_file_has_the_permissions_of_new_files(tmp_path, way):
    (tmp_path / "usual").touch()
    write(tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == MAGIC + b"new"
    assert (tmp_path / "x").stat().st_mode == (tmp_path / "usual").stat().st_mode


@pytest.mark.parametrize("before", [b"", MAGIC, MAGIC + b"a longer one than the new one"])
def test_ours_is_replaced_and_keeps_its_permissions(tmp_path, way, before):
    (tmp_path / "x").write_bytes(before)
    (tmp_path / "x").chmod(0o640)
    write(tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == MAGIC + b"new" and names(tmp_path) == ["x"]
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o640


def test_what_goes_while_it_is_looked_at_is_written_anew(tmp_path, way):
    """Another process may be done with the file, and remove it."""

    def gone(f: BinaryIO) -> bool:
        (tmp_path / "x").unlink()
        return True

    (tmp_path / "x").write_bytes(MAGIC)
    with replaced(tmp_path / "x", gone, "file of ours") as f:
        f.write(b"new")
    assert (tmp_path / "x").read_bytes() == b"new" and names(tmp_path) == ["x"]


def test_a_link_stays_one(tmp_path, way):
    (tmp_path / "far").mkdir()
    (tmp_path / "x").symlink_to(tmp_path / "far" / "y")
    for _ in range(2):
        write(tmp_path / "x")
    assert (tmp_path / "x").is_symlink() and (tmp_path / "far" / "y").read_bytes() == MAGIC + b"new"


def test_names_that_are_as_long_as_they_may_be(tmp_path, way):
    for _ in range(2):
        write(tmp_path / ("x" * 255))
    assert names(tmp_path) == ["x" * 255]


def stranger(folder: Path, kind: str) -> object:
    """Something that must not be written to."""
    path = folder / kind
    if kind == "report":
        path.write_text("the only copy")
    elif kind == "pipe":
        os.mkfifo(path)
    elif "device" in kind:
        device = folder / "null"
        try:
            # no test may endanger /dev/null
            os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("only root makes devices")
        if kind == "device":
            return device
        path.symlink_to(device)
    elif kind == "circle":
        path.symlink_to(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "in a file":
        (folder / "file").write_text("a file")
        return folder / "file" / "x"
    elif kind == "short":
        path.write_bytes(MAGIC[:-1])
    return {
        "no folder": folder / "no" / "x",
        "dot": ".",
        "root": "/",
        "empty": "",
        "NUL": f"{folder}/a\0b",
        "nobody's": "~no-such-user-here/x",
        "long": folder / ("x" * 256),
        "longer": "x/" * 5000,
    }.get(kind, path)


STRANGERS = (
    "report",
    "pipe",
    "link to a device",
    "circle",
    "folder",
    "in a file",
    "short",
    "device",
    "no folder",
    "dot",
    "root",
    "empty",
    "NUL",
    "nobody's",
    "long",
    "longer",
)


@pytest.mark.parametrize("kind", STRANGERS)
def test_what_is_not_ours_is_refused_and_stays(tmp_path, way, kind):
    path = stranger(tmp_path, kind)
    before = inodes(tmp_path)
    with pytest.raises(BadInput) as error:
        write(path)
    assert str(error.value) and "\n" not in str(error.value) and "\0" not in str(error.value)
    assert inodes(tmp_path) == before
    if kind == "report":
        assert Path(path).read_text() == "the only copy"


@pytest.mark.parametrize("kind", [x for x in STRANGERS if x not in ("report", "short")])
def test_what_is_no_file_is_not_read(tmp_path, kind):
    with pytest.raises(BadInput) as error, opened(stranger(tmp_path, kind)) as f:
        f.read(1)
    assert str(error.value) and "\n" not in str(error.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to everything")
def test_a_protected_file_stays(tmp_path):
    (tmp_path / "x").write_bytes(MAGIC)
    (tmp_path / "x").chmod(0o444)
    with pytest.raises(BadInput):
        write(tmp_path / "x")


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt, BadInput, OSError(28, "No space left on device"), MemoryError]
)
def test_an_error_leaves_what_was_there(tmp_path, way, error):
    (tmp_path / "x").write_bytes(MAGIC + b"old")
    with pytest.raises(BadInput if isinstance(error, OSError) else error):
        with replaced(tmp_path / "x", begins_with(MAGIC), "file of ours") as f:
            f.write(MAGIC + bytes(100_000))
            raise error
    assert (tmp_path / "x").read_bytes() == MAGIC + b"old" and names(tmp_path) == ["x"]


@pytest.mark.parametrize("n_bytes", [3000, 100_000])
def test_a_disk_that_is_full_is_one_line_and_nothing_is_left(tmp_path, way, n_bytes):
    """A limit for the size of files stands for the full disk."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    then = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, old[1]))
    try:
        with pytest.raises(BadInput) as error:
            write(tmp_path / "x", MAGIC + bytes(n_bytes))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, then)
    assert "large" in str(error.value) and names(tmp_path) == []


KILLED = """
import sys, time
from edgekv.base.files import begins_with, replaced
with replaced(sys.argv[1], begins_with(b"x"), "file") as f:
    f.write(bytes(1 << 20))
    f.flush()
    print("now", flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="files without a name are Linux's")
def test_a_process_that_is_killed_leaves_nothing(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / "x")],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parent.parent,
    ) as child:
        assert child.stdout and child.stdout.readline() == b"now\n"
        child.kill()
    assert names(tmp_path) == []
