#!/usr/bin/env python3
"""Try the patches on another release of llama-cpp-python: what a move of the pin would cost.

    upstream.py --try VERSION [--out DIR]

DIR (build/try/VERSION) becomes a copy of this project whose patches/UPSTREAM names that release.
Each patch is applied hunk by hunk, so that one which breaks hides none of the others. Where all
apply, the libraries are built there, patched and unpatched, and the tests of TESTS run against
them, if this Python has pytest. The tree itself stays as it is.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from upstream import (
    PATCHES,
    ROOT,
    Patch,
    Pin,
    UpstreamError,
    apply_environment,
    fetch_sdist,
    file_digest,
    read_archive,
    read_member,
    read_pin,
    read_series,
    say,
    write,
)

COPIED = ("CMakeLists.txt", "pyproject.toml", "edgekv", "native", "patches", "tests")
TESTS = ("tests/test_engine.py", "tests/test_store.py")
"""At ratio 1 the logits are the unpatched library's, bit for bit; rows are those of the reference;
and the store in a conversation."""
NOT_REACHED = "not reached"


@dataclass(frozen=True)
class Outcome:
    """One line of the report. `good` is None where the step was not reached."""

    what: str
    good: bool | None
    said: str


def try_release(version: str, out: Path) -> int:
    """Print what applies, builds and passes on this release. Returns 0 if all of it does, else 1.

    Raises UpstreamError if the release cannot be had.
    """
    pin = copy_project(version, out)
    outcomes = list(steps(pin, out))
    print(f"llama-cpp-python {version} with llama.cpp {pin.commit}, in {out}")
    width = max(len(outcome.what) for outcome in outcomes)
    for outcome in outcomes:
        print(f"  {outcome.what:{width}}  {outcome.said}")
    print(f"as patches/UPSTREAM names it:\n{pin_lines(pin)}")
    return 0 if all(outcome.good for outcome in outcomes) else 1


def steps(pin: Pin, out: Path) -> Iterator[Outcome]:
    """All steps, in order; from the libraries on, each needs those before it."""
    tried = list(try_patches(pin, out))
    bindings = try_bindings(out)
    yield from tried
    yield bindings
    broken = sum(not outcome.good for outcome in (*tried, bindings))
    why = f"{broken} of the above break" if broken else ""
    for what, step in (
        ("libraries", build),
        ("unpatched libraries", build_stock),
        ("tests", run_tests),
    ):
        outcome = Outcome(what, None, f"{NOT_REACHED}: {why}") if why else step(what, out)
        why = why or ("" if outcome.good else f"there are no {what}")
        yield outcome


# ---- the copy


def copy_project(version: str, out: Path) -> Pin:
    """Make `out` a copy of this project with another pin, which is returned; builds in it stay."""
    if not re.fullmatch(r"\d[0-9A-Za-z.+-]*", version):
        raise UpstreamError(f"{version!r} is no version of llama-cpp-python, like 0.3.36")
    old = read_pin()
    name = old.archive.replace(old.version, version)
    sdist = out / "build" / "sdist" / name
    pin = replace(old, version=version, archive=name, sha256="", n_bytes=0, commit="")
    if not sdist.is_file():
        fetch_sdist(pin, sdist, f"put a copy of {name} into {sdist.parent}")
    pin = replace(
        pin,
        sha256=file_digest(sdist),
        n_bytes=sdist.stat().st_size,
        commit=named_commit(sdist, pin),
    )
    for part in COPIED:
        copy(ROOT / part, out / part)
    write(out / "patches" / "UPSTREAM", f"{pin_lines(pin)}\n".encode())
    return pin


def copy(source: Path, to: Path) -> None:
    """Copy a file or folder with its times, so that a second trial compiles only what changed."""
    if source.is_file():
        shutil.copy2(source, to)
    elif source.is_dir():
        shutil.rmtree(to, ignore_errors=True)
        # Of the package: the libraries and bindings of the pin, which a build puts there.
        left_out = shutil.ignore_patterns("__pycache__", "lib", "llama_cpp")
        shutil.copytree(source, to, ignore=left_out)


def named_commit(sdist: Path, pin: Pin) -> str:
    """The commit of llama.cpp that the release's list of changes names, or "unknown"."""
    text = (read_member(sdist, pin, "CHANGELOG.md") or b"").decode("utf-8", "replace")
    _, _, section = text.partition(f"\n## [{pin.version}]")
    found = re.search(r"llama\.cpp@([0-9a-f]{7,40})", section.partition("\n## [")[0])
    return found[1] if found else "unknown"


def pin_lines(pin: Pin) -> str:
    return "\n".join(f"{key} = {value}" for key, value in vars(pin).items())


# ---- the patches


def try_patches(pin: Pin, out: Path) -> Iterator[Outcome]:
    """Apply the series to the release's files in `out`/build/patched; hunks that fail are left
    out.
    """
    if not shutil.which("git"):
        raise UpstreamError("git is not installed; it says which hunks of a patch apply")
    folder = out / "build" / "patched"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    patches = read_series()
    touched = {path for patch in patches for path in patch.paths}
    for path, data in read_archive(out / "build" / "sdist" / pin.archive, pin).items():
        if path in touched:
            write(folder / path, data)
    for patch in patches:
        yield try_patch(patch, folder)


def try_patch(patch: Patch, folder: Path) -> Outcome:
    sections = split_files((PATCHES / patch.name).read_text(encoding="utf-8"))
    if len(sections) < len(patch.paths):
        raise UpstreamError(f"patches/{patch.name} has no `diff --git` line for each of its files")
    faults, n_hunks, n_rejected, n_moved = [], 0, 0, 0
    for path, section in sections:
        hunks = re.findall(r"^@@ -(\d+)", section, re.M)
        n_hunks += len(hunks)
        if section.find("\n--- /dev/null\n") < 0 and not (folder / path).is_file():
            faults.append(f"there is no {path}")
            n_rejected += len(hunks)
            continue
        said = apply_section(section, folder)
        n_moved += said.count("(offset ")
        rejected = [int(number) for number in re.findall(r"^Rejected hunk #(\d+)", said, re.M)]
        n_rejected += len(rejected)
        if rejected:
            which = ", ".join(f"{n} (line {hunks[n - 1]})" for n in rejected)
            faults.append(f"{path} hunk{'s' * (len(rejected) > 1)} {which}")
    if faults:
        return Outcome(
            patch.name, False, f"BREAKS: {n_rejected} of {n_hunks} hunks, {'; '.join(faults)}"
        )
    moved = f", {n_moved} at other lines" if n_moved else ""
    return Outcome(patch.name, True, f"applies: {n_hunks} of {n_hunks} hunks{moved}")


def split_files(text: str) -> list[tuple[str, str]]:
    """(path, part) of each file that a patch changes."""
    parts = re.split(r"^(?=diff --git )", text, flags=re.M)[1:]
    return [(re.match(r"diff --git a/\S+ b/(\S+)", part)[1], part) for part in parts]


def apply_section(section: str, folder: Path) -> str:
    """Apply the hunks of one file that can be; return git's words."""
    done = subprocess.run(
        [
            *("git", "-c", "core.autocrlf=false", "apply", "-p1"),
            *("--whitespace=nowarn", "--reject", "--verbose", "-"),
        ],
        input=section,
        cwd=folder,
        env={**apply_environment(folder), "LC_ALL": "C"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.stdout


# ---- what is built from them


def try_bindings(out: Path) -> Outcome:
    command = [out / "native" / "upstream.py", "bindings", "--out", out / "build" / "bindings"]
    done = run([sys.executable, *command], out)
    said = "adapt" if not done.code else f"BREAK: {done.last}"
    return Outcome("bindings", not done.code, said)


def build(what: str, out: Path) -> Outcome:
    cmake = program("cmake")
    if not cmake:
        return Outcome(what, None, f"{NOT_REACHED}: cmake is missing (pip install cmake ninja)")
    ninja = program("ninja")
    folder, begun = out / "build" / "dev", time.monotonic()
    for command in (
        [
            *(cmake, "-S", out, "-B", folder, "-DCMAKE_BUILD_TYPE=Release"),
            *(["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []),
            f"-DPython3_EXECUTABLE={sys.executable}",
        ],
        [cmake, "--build", folder, "--config", "Release", "--parallel", str(os.cpu_count() or 1)],
        [cmake, "--install", folder, "--prefix", out, "--component", "edgekv"],
    ):
        done = run(command, out, "libraries.log")
        if done.code:
            return Outcome(what, False, f"BREAK: {done.error} (all of it: {done.log})")
    return Outcome(what, True, f"built in {minutes(begun)}")


def build_stock(what: str, out: Path) -> Outcome:
    begun = time.monotonic()
    command = [out / "native" / "upstream.py", "build-stock", "--out", out / "build" / "stock"]
    done = run([sys.executable, *command], out, "stock.log")
    if done.code:
        return Outcome(what, False, f"BREAK: {done.error} (all of it: {done.log})")
    return Outcome(what, True, f"built in {minutes(begun)}")


def run_tests(what: str, out: Path) -> Outcome:
    if not importlib.util.find_spec("pytest"):
        return Outcome(what, None, f"{NOT_REACHED}: {sys.executable} has no pytest")
    options = ("-q", "-rfE", "--tb=short", "-m", "not slow", "-p", "no:cacheprovider")
    done = run([sys.executable, "-m", "pytest", *options, *TESTS], out, "tests.log")
    failed = re.findall(r"^(?:FAILED|ERROR) \S+::(\S+)", done.output, re.M)
    if done.code:
        names = f": {', '.join(failed[:5])}{' ...' * (len(failed) > 5)}" if failed else ""
        return Outcome(what, False, f"BREAK: {done.last}{names} (all of it: {done.log})")
    return Outcome(what, True, f"pass: {done.last}")


@dataclass(frozen=True)
class Done:
    """A program's exit code, its output, and the file that holds it."""

    code: int
    output: str
    log: Path | None

    @property
    def last(self) -> str:
        return next(reversed(self.output.strip().splitlines()), "no message")

    @property
    def error(self) -> str:
        """The first error of a compiler or of CMake, else the last line."""
        lines = self.output.splitlines()
        return next((line.strip() for line in lines if re.search(r"\b[Ee]rror\b", line)), self.last)


def run(command: list[str | Path], out: Path, log: str = "") -> Done:
    """Run a program in the copy, none of whose settings point to another build."""
    unset = ("EDGEKV_SDIST", "EDGEKV_LIB", "EDGEKV_NATIVE_TESTS", "EDGEKV_STOCK_LIB", "CMAKE_ARGS")
    env = {key: value for key, value in os.environ.items() if key not in unset}
    beside = str(Path(sys.executable).parent)
    env["PATH"] = os.pathsep.join([env.get("PATH", ""), beside])
    env |= {"PYTHONPATH": str(out), "EDGEKV_STOCK_LIB": str(out / "build" / "stock" / "bin")}
    if log:
        say(f"{Path(command[0]).name} {' '.join(map(str, command[1:3]))} ... (build/{log})")
    done = subprocess.run(
        list(map(str, command)),
        cwd=out,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    path = out / "build" / log if log else None
    if path:
        write(path, done.stdout.encode())
    return Done(done.returncode, done.stdout, path)


def program(name: str) -> str | None:
    """A program of the machine, or one that pip installed beside this Python."""
    return shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))


def minutes(begun: float) -> str:
    return f"{(time.monotonic() - begun) / 60:.1f} minutes"
