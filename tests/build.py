"""Native builds beside the installed one, and programs that must succeed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lib import ROOT, building


def run(*command: object, timeout: float = 600, **env: str) -> str:
    """Standard output of a program that succeeds; its last lines are the failure's message
    otherwise.
    """
    done = subprocess.run(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=timeout,
        env={**os.environ, **env},
    )
    assert done.returncode == 0, (
        f"{Path(str(command[0])).name} ended with {done.returncode}:\n{done.stdout[-6000:]}"
    )
    return done.stdout


def build(folder: Path, *options: str, targets: tuple[str, ...]) -> None:
    """Build targets of the project into `folder`, which stays, so that only the first time takes
    minutes. Needs cmake.
    """
    cmake, *same = installed_by() or ["cmake"]
    command = [cmake, "-S", ROOT, "-B", folder, *same, *options]
    command += [f"-DPython3_EXECUTABLE={sys.executable}"]
    if shutil.which("ninja"):
        command += ["-G", "Ninja"]
    if shutil.which("ccache"):
        command += [f"-DCMAKE_{language}_COMPILER_LAUNCHER=ccache" for language in ("C", "CXX")]
    with building():
        run(*command)
        run(
            cmake,
            "--build",
            folder,
            "--parallel",
            os.cpu_count() or 1,
            "--target",
            *targets,
            timeout=3000,
        )


def installed_by() -> list[str]:
    """The cmake that configured the installed build, and options that name its compilers; empty if
    it is gone. With another order of flags, or the same compiler by another name, ccache finds
    nothing of that build.
    """
    for cache in (ROOT / "build").glob("py3-*/CMakeCache.txt"):
        found = dict(re.findall(r"^(CMAKE_\w+):\w+=(.+)$", cache.read_text(), re.MULTILINE))
        if Path(found["CMAKE_COMMAND"]).exists():
            names = ("CMAKE_C_COMPILER", "CMAKE_CXX_COMPILER")
            return [found["CMAKE_COMMAND"], *(f"-D{name}={found[name]}" for name in names)]
    return []


def absent(why: str) -> None:
    """A missing program: a failure in CI, else a reason to skip."""
    (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(why)
