#!/usr/bin/env python3
"""Fetch, check, unpack and patch the pinned llama.cpp.

    upstream.py sdist                             path of the checked source archive
    upstream.py prepare --out DIR [--stock]       its llama.cpp, patched (or as it came), in DIR
    upstream.py bindings --out DIR [--stock]      its Python bindings as the package
                                                  edgekv.llama_cpp, in DIR
    upstream.py build-stock --out DIR             unpatched libraries, in DIR/bin
    upstream.py --try VERSION [--out DIR]         what breaks on another release (trial.py)

Run by CMake when it configures, and by the tests. Only the standard library is used.
The archive comes from the file that EDGEKV_SDIST names, or from pip, once. A file of the
tree is written only when its content changes, so that a build tool recompiles no more
than what a new patch or a new pin really touches. Results go to stdout, progress and
errors (one line, exit code 2) to stderr.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
PATCHES = ROOT / "patches"
SDIST_DIR = ROOT / "build" / "sdist"
STAMP = "edgekv-stamp.json"
# What a build of the libraries and of upstream's operator tests needs.
FOLDERS = ("cmake", "common", "ggml", "include", "licenses", "src", "tests", "vendor")
FILES = ("CMakeLists.txt", "LICENSE")
TEMPLATES = "models/templates/"  # for tests of chats
# The bindings' modules that need other libraries (vision), and their server, stay out.
LEFT_OUT = ("_ggml.py", "llava_cpp.py", "mtmd_cpp.py")
# Modules of the bindings that are ours: see the docstring of each.
OVERLAY = ROOT / "native" / "bindings"
MAX_FILE_BYTES = 64 << 20


class UpstreamError(Exception):
    """A failure that the user can mend; str() is one line that says what to do."""


@dataclass(frozen=True)
class Pin:
    """The upstream release, as patches/UPSTREAM states it."""

    package: str
    version: str
    archive: str
    sha256: str
    n_bytes: int
    commit: str


@dataclass(frozen=True)
class Patch:
    """One file of patches/series and the paths in llama.cpp that it changes."""

    name: str
    path: Path
    sha256: str
    paths: tuple[str, ...]


def read_pin() -> Pin:
    """Read patches/UPSTREAM: `key = value` lines."""
    lines = (PATCHES / "UPSTREAM").read_text(encoding="utf-8").splitlines()
    fields = dict(
        re.split(r"\s*=\s*", line.strip(), maxsplit=1)
        for line in lines
        if line.strip() and not line.startswith("#")
    )
    return Pin(**{**fields, "n_bytes": int(fields["n_bytes"])})


def read_series() -> list[Patch]:
    """Read patches/series and the patches it lists, in order."""
    lines = (PATCHES / "series").read_text(encoding="utf-8").splitlines()
    return [
        read_patch(name)
        for name in (line.strip() for line in lines)
        if name and not name.startswith("#")
    ]


def read_patch(name: str) -> Patch:
    path = PATCHES / name
    if not path.is_file():
        raise UpstreamError(f"patches/series lists {name}, but there is no such file in patches/")
    data = path.read_bytes()
    pairs = re.findall(r"^--- (\S+)[^\n]*\n\+\+\+ (\S+)", data.decode("utf-8", "replace"), re.M)
    paths = {safe_path(side[2:]) for pair in pairs for side in pair if side != "/dev/null"}
    if not paths:
        raise UpstreamError(f"patches/{name} changes no file; take it out of patches/series")
    return Patch(name, path, hashlib.sha256(data).hexdigest(), tuple(sorted(paths)))


def safe_path(path: str) -> str:
    """Return `path` if it is relative and stays inside its folder; raise otherwise."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\\" in path or ":" in path:
        raise UpstreamError(f"refused: the path {path!r} leads out of the source tree")
    return path


def find_sdist(pin: Pin) -> Path:
    """Return the checked source archive: EDGEKV_SDIST, the copy in build/sdist, or a download."""
    named = os.environ.get("EDGEKV_SDIST")
    if named:
        path = Path(named)
        if not path.is_file():
            raise UpstreamError(f"EDGEKV_SDIST names {named}, which is no file")
        if fault := sdist_fault(path, pin):
            raise UpstreamError(f"EDGEKV_SDIST names {named}, which is not {pin.archive}: {fault}")
        return path
    path = SDIST_DIR / pin.archive
    if not path.is_file() or sdist_fault(path, pin):
        download_sdist(pin, path)
    return path


def sdist_fault(path: Path, pin: Pin) -> str:
    """Say what is wrong with the archive, or return an empty string."""
    n_bytes = path.stat().st_size
    if n_bytes != pin.n_bytes:
        return f"it has {n_bytes} bytes instead of {pin.n_bytes}"
    digest = file_digest(path)
    return "" if digest == pin.sha256 else f"its sha256 is {digest} instead of {pin.sha256}"


def file_digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def download_sdist(pin: Pin, path: Path) -> None:
    """Fetch the archive and check it."""
    offline = f"set EDGEKV_SDIST to a copy of {pin.archive}"
    fetch_sdist(pin, path, offline, lambda fetched: sdist_fault(fetched, pin))


def fetch_sdist(
    pin: Pin, path: Path, offline: str, fault_of: Callable[[Path], str] = lambda path: ""
) -> None:
    """Fetch the archive with pip, as pip is configured on this machine; `offline` says what helps
    where that fails.
    """
    size = f" ({pin.n_bytes >> 20} MiB)" if pin.n_bytes else ""
    say(f"fetching {pin.archive}{size} with pip")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--no-binary",
                pin.package,
                "--dest",
                folder,
                f"{pin.package}=={pin.version}",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        fetched = Path(folder) / pin.archive
        if done.returncode or not fetched.is_file():
            raise UpstreamError(
                f"pip could not fetch {pin.package} {pin.version} ({last_error(done.stdout)}); "
                f"without a network, {offline}"
            )
        if fault := fault_of(fetched):
            raise UpstreamError(
                f"refused: the fetched {pin.archive} is not the pinned one: {fault}"
            )
        os.replace(fetched, path)


def last_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith(("error", "fatal"))]
    return (errors or lines or ["no message"])[-1]


def read_archive(sdist: Path, pin: Pin) -> dict[str, bytes]:
    """Return the wanted files of the archive's llama.cpp: relative path -> content."""
    prefix = f"{pin.archive.removesuffix('.tar.gz')}/vendor/llama.cpp/"
    tree: dict[str, bytes] = {}
    with tarfile.open(sdist, "r:gz") as archive:
        for member in archive:
            path = member.name.removeprefix(prefix)
            if path == member.name or member.isdir():
                continue
            is_wanted = path in FILES or path.partition("/")[0] in FOLDERS
            if not is_wanted and not path.startswith(TEMPLATES):
                continue
            if not member.isfile() or member.size > MAX_FILE_BYTES:
                raise UpstreamError(
                    f"refused: {path} in {pin.archive} is no plain file of a sane size"
                )
            file = archive.extractfile(member)
            assert file is not None
            tree[safe_path(path)] = file.read()
    if "CMakeLists.txt" not in tree:
        raise UpstreamError(f"refused: there is no {prefix}CMakeLists.txt in {pin.archive}")
    return tree


def read_bindings(sdist: Path, pin: Pin) -> dict[str, bytes]:
    """Return the archive's Python bindings as they came: file name -> content."""
    prefix = pin.archive.removesuffix(".tar.gz")
    wanted = re.compile(rf"{re.escape(prefix)}/(?:llama_cpp/([a-z_]+\.py|py\.typed)|(LICENSE\.md))")
    files: dict[str, bytes] = {}
    with tarfile.open(sdist, "r:gz") as archive:
        for member in archive:
            match = wanted.fullmatch(member.name)
            if match and member.isfile() and member.size <= MAX_FILE_BYTES:
                file = archive.extractfile(member)
                assert file is not None
                files[match[1] or match[2]] = file.read()
    return files


def read_member(sdist: Path, pin: Pin, name: str) -> bytes | None:
    """Return one file of the archive's top folder, None if there is none."""
    with tarfile.open(sdist, "r:gz") as archive:
        for member in archive:
            if member.name == f"{pin.archive.removesuffix('.tar.gz')}/{name}":
                file = archive.extractfile(member) if member.size <= MAX_FILE_BYTES else None
                return file.read() if file else None
    return None


def as_submodule(source: str) -> str:
    """Rewrite the imports of one module of `llama_cpp` for the package `edgekv.llama_cpp`."""
    source = re.sub(
        r"^( *)import llama_cpp$", r"\1import edgekv.llama_cpp as llama_cpp", source, flags=re.M
    )
    source = re.sub(
        r"^( *)import llama_cpp\.(\w+)$",
        r"\1import edgekv.llama_cpp as llama_cpp, edgekv.llama_cpp.\2",
        source,
        flags=re.M,
    )
    source = re.sub(
        r"^( *)(import|from) llama_cpp\.", r"\1\2 edgekv.llama_cpp.", source, flags=re.M
    )
    # They send file descriptors 1 and 2 to /dev/null meanwhile, which silences other threads.
    source = re.sub(
        r"suppress_stdout_stderr\(disable=\w[\w.]*\)",
        "suppress_stdout_stderr(disable=True)",
        source,
    )
    return source.replace(
        "_lib = load_shared_library(_lib_base_name, _base_path)",
        "from edgekv.library import open_llama\n\n_lib = open_llama()",
    )


def prepare_bindings(out: Path, stock: bool) -> None:
    """Make `out` the package edgekv.llama_cpp (`stock`: llama_cpp, as it came); do nothing if it
    is.
    """
    pin = read_pin()
    rules = Path(__file__).read_bytes() + b"".join(
        path.read_bytes() for path in sorted(OVERLAY.glob("*.py"))
    )
    stamp = {"sha256": pin.sha256, "rules": sha256(rules), "stock": stock}
    if read_stamp(out) == stamp:
        return
    shutil.rmtree(out, ignore_errors=True)
    files = {
        name: data
        for name, data in read_bindings(find_sdist(pin), pin).items()
        if name not in LEFT_OUT
    }
    for name, data in files.items():
        if name.endswith(".py") and not stock:
            text = as_submodule(data.decode("utf-8"))
            if name == "llama_cpp.py" and "open_llama()" not in text:
                raise UpstreamError(
                    f"{name} of {pin.package} loads its library in another way; adapt as_submodule"
                )
            data = text.encode()
        write(out / name, data)
    for path in () if stock else OVERLAY.glob("*.py"):
        write(out / path.name, path.read_bytes())
    write(out / STAMP, json.dumps(stamp).encode())


def apply_patches(
    patches: list[Patch], tree: dict[str, bytes], pin: Pin
) -> dict[str, bytes | None]:
    """Return what the patches make of the files they touch; None for a file they delete."""
    touched = sorted({path for patch in patches for path in patch.paths})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        for path in touched:
            if path in tree:
                write(folder / path, tree[path])
        for patch in patches:
            before = [content(folder / path) for path in patch.paths]
            apply_patch(patch, folder, pin)
            for path, old in zip(patch.paths, before):
                if content(folder / path) == old:
                    raise UpstreamError(
                        f"patches/{patch.name} left {path} as it was; nothing was changed"
                    )
        return {path: content(folder / path) for path in touched}


def apply_patch(patch: Patch, folder: Path, pin: Pin) -> None:
    """Apply one patch without fuzz in `folder`, which is no git work tree."""
    if git := shutil.which("git"):
        command = [
            git,
            "-c",
            "core.autocrlf=false",
            "apply",
            "-p1",
            "--whitespace=nowarn",
            str(patch.path),
        ]
    elif tool := shutil.which("patch"):
        command = [tool, "-p1", "--fuzz=0", "--batch", "--silent", "-i", str(patch.path)]
    else:
        raise UpstreamError("neither git nor patch is installed; install one of them")
    done = subprocess.run(
        command,
        cwd=folder,
        env=apply_environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        reason = next(iter(done.stdout.strip().splitlines()), "no message")
        raise UpstreamError(
            f"patches/{patch.name} does not apply to llama.cpp {pin.commit}: {reason}"
        )


def apply_environment(folder: Path) -> dict[str, str]:
    """Inside another work tree `git apply` skips every file without a word."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    return {**env, "GIT_CEILING_DIRECTORIES": str(folder.parent)}


def prepare(out: Path, stock: bool) -> None:
    """Make `out` the pinned llama.cpp with the patches (without, if `stock`); do nothing if it
    is.
    """
    pin, patches = read_pin(), [] if stock else read_series()
    stamp = {
        "package": pin.package,
        "version": pin.version,
        "sha256": pin.sha256,
        "commit": pin.commit,
        "folders": [*FOLDERS, TEMPLATES],
        "patches": [{"name": patch.name, "sha256": patch.sha256} for patch in patches],
    }
    old = read_stamp(out)
    if {key: old.get(key) for key in stamp} == stamp:
        return
    pristine = read_archive(find_sdist(pin), pin)
    patched = apply_patches(patches, pristine, pin)
    digests = {path: sha256(data) for path, data in patched.items() if data is not None}
    same_pin = old.get("sha256") == pin.sha256
    if same_pin:
        refuse_hand_edits(out, pristine, patched, old["files"])
        known = set(old["files"])
    else:
        known = {str(path.relative_to(out).as_posix()) for path in out.rglob("*") if path.is_file()}
    # The stamp is absent while the tree is in between, so an interrupted run is taken up again.
    (out / STAMP).unlink(missing_ok=True)
    wanted = {path: data for path, data in {**pristine, **patched}.items() if data is not None}
    n_written = sum(write_changed(out / path, data) for path, data in wanted.items())
    for path in known - set(wanted):
        (out / path).unlink(missing_ok=True)
    write(out / STAMP, json.dumps({**stamp, "files": digests}, indent=1).encode())
    say(f"llama.cpp {pin.commit} with {len(patches)} patches: {n_written} files written")


def refuse_hand_edits(
    out: Path, pristine: dict[str, bytes], patched: dict[str, bytes | None], digests: dict[str, str]
) -> None:
    """Raise before a change is lost that somebody made in the tree and put into no patch."""
    for path in sorted({*pristine, *patched, *digests}):
        now = content(out / path)
        expected = {
            sha256(data) for data in (pristine.get(path), patched.get(path)) if data is not None
        }
        if now is not None and sha256(now) not in expected | {digests.get(path)}:
            raise UpstreamError(
                f"{out / path} was edited by hand; put the edit into a patch or delete the file"
            )


def read_stamp(folder: Path) -> dict:
    try:
        return json.loads((folder / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write_changed(path: Path, data: bytes) -> bool:
    """Write the file if its content differs, so that its time stays when nothing changed."""
    if path.is_file() and path.stat().st_size == len(data) and path.read_bytes() == data:
        return False
    write(path, data)
    return True


def write(path: Path, data: bytes) -> None:
    """Write beside and rename: a reader sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    beside.write_bytes(data)
    os.replace(beside, path)


def build_stock(out: Path) -> Path:
    """Build the unpatched libraries with the options of the patched ones; return their folder."""
    source, options = out / "llama.cpp", ROOT / "native" / "options.cmake"
    compiled = options.read_bytes() + options.with_name("amx.cmake").read_bytes()
    prepare(source, stock=True)
    prepare_bindings(out / "bindings" / "llama_cpp", stock=False)
    cmake_args = os.environ.get("CMAKE_ARGS", "")
    stamp = {
        "source": read_stamp(source)["sha256"],
        "options": sha256(compiled),
        "cmake_args": cmake_args,
    }
    if read_stamp(out) == stamp:
        return out / "bin"
    cmake, ninja = shutil.which("cmake"), shutil.which("ninja")
    if not cmake:
        raise UpstreamError("cmake is not installed; install it (pip install cmake ninja)")
    say("building the unpatched libraries: some minutes, once")
    (out / "CMakeCache.txt").unlink(missing_ok=True)
    run(
        [
            cmake,
            "-C",
            str(options),
            "-S",
            str(source),
            "-B",
            str(out),
            *(["-G", "Ninja"] if ninja else []),
            "-DCMAKE_BUILD_TYPE=Release",
            *shlex.split(cmake_args),
        ]
    )
    run(
        [
            cmake,
            "--build",
            str(out),
            "--config",
            "Release",
            "--parallel",
            str(os.cpu_count() or 1),
            "--target",
            "llama",
        ]
    )
    write(out / STAMP, json.dumps(stamp).encode())
    return out / "bin"


def run(command: list[str]) -> None:
    if code := subprocess.run(command, stdout=sys.stderr).returncode:
        raise UpstreamError(
            f"{' '.join(command[:2])} failed with exit code {code}; its messages are above"
        )


def say(text: str) -> None:
    print(f"upstream.py: {text}", file=sys.stderr, flush=True)


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Fetch, check, unpack and patch the pinned llama.cpp."
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("sdist", help="print the path of the checked source archive")
    tree = verbs.add_parser("prepare", help="make a folder the patched llama.cpp")
    bindings = verbs.add_parser("bindings", help="make a folder the package edgekv.llama_cpp")
    for verb in (tree, bindings):
        verb.add_argument("--stock", action="store_true", help="leave our changes out")
    libraries = verbs.add_parser(
        "build-stock", help="build the unpatched libraries and print their folder"
    )
    for verb in (tree, bindings, libraries):
        verb.add_argument("--out", type=Path, required=True, metavar="DIR")
    other = verbs.add_parser(
        "try", help="say what breaks on another release (also --try); the tree stays as it is"
    )
    other.add_argument("version", metavar="VERSION")
    other.add_argument("--out", type=Path, metavar="DIR", help="default: build/try/VERSION")
    return parser.parse_args(["try" if word == "--try" else word for word in argv])


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    try:
        if args.verb == "sdist":
            print(find_sdist(read_pin()))
        elif args.verb == "prepare":
            prepare(args.out.resolve(), args.stock)
        elif args.verb == "bindings":
            prepare_bindings(args.out.resolve(), args.stock)
        elif args.verb == "try":
            from trial import try_release

            out = args.out or ROOT / "build" / "try" / args.version
            return try_release(args.version, out.resolve())
        else:
            print(build_stock(args.out.resolve()))
    except (UpstreamError, OSError) as error:
        say(f"error: {error}")
        return 2
    return 0


if __name__ == "__main__":
    # trial.py imports this file by its name: one module, one UpstreamError.
    sys.modules["upstream"] = sys.modules["__main__"]
    sys.exit(main(sys.argv[1:]))
