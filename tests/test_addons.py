"""Backends that are installed apart: an add-on package is found and taken, and `edgekv info` says
what is passed over and why.

native/tests/cuda/fake-device.cpp stands for CUDA's library.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from edgekv.library import lib_dir
from edgekv.version import __version__
from tests.lib import ROOT
from tests.test_native import program

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the stand-in is Linux's")
DRIVER = "int cuDriverGetVersion(int * version) { *version = 12080; return 0; }"


def info(*, path: Path | None = None, **env: str) -> dict:
    """What `edgekv info` says with a folder of packages beside the installed ones."""
    paths = [*([str(path)] if path else []), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-m", "edgekv", "info"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **env}
    done = [
        subprocess.run([*command, *more], cwd=ROOT, env=env, capture_output=True, text=True)
        for more in ([], ["--json"])
    ]
    assert not done[0].returncode, done[0].stderr
    build = json.loads(done[1].stdout)["build"]
    for line in build["passed_over"]:
        assert line in done[0].stdout
    return build


def add_on(folder: Path, name: str = "edgekv_cuda12", **changed: str) -> Path:
    """An add-on package of this very build, with what is `changed`."""
    package = folder / name
    package.mkdir()
    built = json.loads((lib_dir() / "build-info.json").read_text())
    (package / "build-info.json").write_text(json.dumps({**built, **changed}))
    shutil.copy(program("fake-device.so"), package / "libedgekv-ggml-cuda.so")
    return package / "libedgekv-ggml-cuda.so"


def cc(out: Path, *words: object) -> None:
    """Make a shared library."""
    if not shutil.which("cc"):
        pytest.skip("needs a C compiler")
    subprocess.run(["cc", "-shared", "-o", out, *words], check=True)


def names(build: dict) -> list[str]:
    return [device["name"] for device in build["devices"]]


def test_an_add_on_of_this_build_is_taken(tmp_path):
    add_on(tmp_path)
    build = info(path=tmp_path)
    assert "Fake0" in names(build) and build["passed_over"] == []


def test_the_wheel_of_an_add_on_installs_what_is_found(tmp_path):
    pytest.importorskip("hatchling")
    pytest.importorskip("wheel")
    if not shutil.which("patchelf"):
        pytest.skip("needs patchelf")
    made = runpy.run_path(str(ROOT / "native" / "cuda_wheel.py"))
    wheel = made["pack"](
        program("fake-device.so"), lib_dir() / "build-info.json", 13, tmp_path / "made"
    )
    assert wheel.name.startswith(f"edgekv_cuda13-{__version__}-py3-none-linux_")
    with zipfile.ZipFile(wheel) as files:
        (metadata,) = (name for name in files.namelist() if name.endswith("/METADATA"))
        needs = re.findall(r"Requires-Dist: (.*)", files.read(metadata).decode())
    assert f"edgekv=={__version__}" in needs and "nvidia-cublas<14,>=13" in needs
    there = tmp_path / "there"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", there, wheel], check=True)
    assert "Fake0" in names(info(path=there))


def test_one_add_on_is_enough(tmp_path):
    for name in ("edgekv_cuda12", "edgekv_cuda13"):
        add_on(tmp_path, name)
    assert names(info(path=tmp_path)).count("Fake0") == 1


def test_an_add_on_of_another_build_is_passed_over(tmp_path):
    add_on(tmp_path, sha256="another")
    build = info(path=tmp_path)
    assert "Fake0" not in names(build)
    (line,) = build["passed_over"]
    assert line.startswith("edgekv-cuda12: it was built for another version of edgekv")


@pytest.mark.parametrize("content", [b"", b"no library"])
def test_an_add_on_that_cannot_be_loaded_is_passed_over(tmp_path, content):
    add_on(tmp_path).write_bytes(content)
    build = info(path=tmp_path)
    assert names(build) == names(info())
    (line,) = build["passed_over"]
    assert line.startswith("edgekv-cuda12: ") and "libedgekv-ggml-cuda.so" in line


def test_a_backend_without_its_driver_is_passed_over_with_the_reason(tmp_path):
    """A library beside ours that needs one which this machine does not have, as Vulkan's does."""
    installed = lib_dir().absolute().parent
    folder = tmp_path / "edgekv" / "lib"
    shutil.copytree(lib_dir(), folder)
    (folder.parent / "bindings").symlink_to(installed)
    (tmp_path / "edgekv.libs").symlink_to(installed.parent / "edgekv.libs")  # a wheel's OpenMP
    none = tmp_path / "libno-such-driver.so.1"
    cc(none, f"-Wl,-soname,{none.name}")
    cc(folder / "libedgekv-ggml-vulkan.so", "-Wl,--no-as-needed", none)
    none.unlink()
    (line,) = info(EDGEKV_LIB=str(folder))["passed_over"]
    assert line.startswith("vulkan: libno-such-driver.so.1: cannot open shared object file")


def test_a_driver_without_a_backend_is_said_with_what_to_install(tmp_path):
    (tmp_path / "driver.c").write_text(DRIVER)
    cc(tmp_path / "libcuda.so.1", tmp_path / "driver.c")
    (line,) = info(LD_LIBRARY_PATH=str(tmp_path))["passed_over"]
    assert "NVIDIA driver" in line and "pip install edgekv-cuda12" in line
    add_on(tmp_path)
    assert info(path=tmp_path, LD_LIBRARY_PATH=str(tmp_path))["passed_over"] == []
