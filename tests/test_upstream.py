"""native/upstream.py --try: what a move of the pin would cost, on a tiny project."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.build import absent
from tests.lib import ROOT

SOURCE = "".join(f"line {n}\n" for n in range(40))
PATCH = """Subject: [PATCH] two places

---
diff --git a/src/a.cpp b/src/a.cpp
--- a/src/a.cpp
+++ b/src/a.cpp
@@ -3,3 +3,4 @@
 line 2
 line 3
+ours
 line 4
@@ -31,3 +32,4 @@
 line 30
 line 31
+ours
 line 32
"""
NEW_FILE = """---
diff --git a/src/new.h b/src/new.h
--- /dev/null
+++ b/src/new.h
@@ -0,0 +1,1 @@
+ours
"""
# pip asks an sdist for its metadata, even where it only fetches it.
BACKEND = """
def get_requires_for_build_wheel(config_settings=None):
    return []
def prepare_metadata_for_build_wheel(folder, config_settings=None):
    from pathlib import Path
    name = "llama_cpp_python-2.0.0.dist-info"
    (Path(folder) / name).mkdir()
    (Path(folder) / name / "METADATA").write_text(Path("PKG-INFO").read_text())
    return name
"""
BUILD = """cmake_minimum_required(VERSION 3.21)
project(tiny LANGUAGES NONE)
file(WRITE ${CMAKE_BINARY_DIR}/built "")
install(FILES ${CMAKE_BINARY_DIR}/built DESTINATION edgekv/lib COMPONENT edgekv)
"""
LLAMA = "cmake_minimum_required(VERSION 3.21)\nproject(l LANGUAGES NONE)\nadd_custom_target(llama)"
TEST = """
from pathlib import Path
import edgekv
def test_it_is_the_library_that_was_built():
    assert (Path(edgekv.__file__).parent / "lib" / "built").exists()
"""


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


@pytest.fixture
def project(tmp_path) -> Path:
    """A project with our upstream.py and two patches."""
    folder = tmp_path / "project"
    for name in ("upstream.py", "trial.py"):
        (folder / "native").mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "native" / name, folder / "native" / name)
    for name, text in {
        "CMakeLists.txt": BUILD,
        "native/options.cmake": "",
        "native/amx.cmake": "",
        "patches/UPSTREAM": "package = llama-cpp-python\nversion = 1.0.0\n"
        "archive = llama_cpp_python-1.0.0.tar.gz\nsha256 = 00\nn_bytes = 1\ncommit = abc",
        "patches/series": "places.patch\nnew.patch\n",
        "patches/places.patch": PATCH,
        "patches/new.patch": NEW_FILE,
        "edgekv/__init__.py": "",
        "tests/test_engine.py": TEST,
        "tests/test_store.py": TEST,
    }.items():
        write(folder / name, text)
    return folder


def release(folder: Path, source: str) -> None:
    """Write the source archive of a release 2.0.0 that has `source` in src/a.cpp."""
    files = {
        "PKG-INFO": "Metadata-Version: 2.1\nName: llama-cpp-python\nVersion: 2.0.0\n",
        "pyproject.toml": '[build-system]\nrequires=[]\nbuild-backend="b"\nbackend-path=["."]\n',
        "b.py": BACKEND,
        "CHANGELOG.md": "\n## [2.0.0]\n\n- llama.cpp is ggml-org/llama.cpp@1234abcde\n",
        "llama_cpp/llama_cpp.py": "_lib = load_shared_library(_lib_base_name, _base_path)\n",
        "vendor/llama.cpp/CMakeLists.txt": LLAMA,
        "vendor/llama.cpp/src/a.cpp": source,
    }
    with tarfile.open(folder / "llama_cpp_python-2.0.0.tar.gz", "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"llama_cpp_python-2.0.0/{name}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))


def try_release(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, project / "native" / "upstream.py", *words],
        capture_output=True,
        text=True,
        timeout=120,
        env={
            **os.environ,
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(project.parent),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # they take seconds to start
        },
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not {"build", "__pycache__"} & set(path.relative_to(folder).parts)
    }


def test_a_patch_that_breaks_is_named_with_file_and_hunk_and_hides_no_other(project):
    release(project.parent, SOURCE.replace("line 31\n", "changed\n"))
    before = contents(project)
    done = try_release(project, "--try", "2.0.0")
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert done.returncode == 1, done.stderr
    assert lines[0].startswith("llama-cpp-python 2.0.0 with llama.cpp 1234abcde")
    assert "places.patch         BREAKS: 1 of 2 hunks, src/a.cpp hunk 2 (line 31)" in lines
    assert "new.patch            applies: 1 of 1 hunks" in lines
    assert "libraries            not reached: 1 of the above break" in lines
    assert "tests                not reached: 1 of the above break" in lines
    assert contents(project) == before, "the tree itself changed"


def test_a_file_that_is_gone_is_named(project):
    release(project.parent, SOURCE)
    write(project / "patches" / "places.patch", PATCH.replace("a.cpp", "gone.cpp"))
    done = try_release(project, "try", "2.0.0")
    assert "BREAKS: 2 of 2 hunks, there is no src/gone.cpp" in done.stdout and done.returncode == 1


def test_lines_that_moved_are_counted_and_the_rest_is_built_and_tested(project):
    if not shutil.which("cmake"):
        absent("cmake is missing: pip install cmake")
    release(project.parent, "new line\n" + SOURCE)
    done = try_release(project, "--try", "2.0.0")
    assert "places.patch         applies: 2 of 2 hunks, 2 at other lines" in done.stdout
    assert "  libraries            built in " in done.stdout
    assert "  unpatched libraries  built in " in done.stdout
    assert "  tests                pass: 2 passed" in done.stdout, done.stdout
    assert done.returncode == 0
    pin = dict(line.split(" = ") for line in done.stdout.splitlines() if " = " in line)
    assert pin["commit"] == "1234abcde" and len(pin["sha256"]) == 64

    write(project / "tests" / "test_store.py", "def test_rows():\n    assert False\n")
    done = try_release(project, "--try", "2.0.0")
    assert done.returncode == 1
    assert "tests                BREAK: 1 failed, 1 passed" in done.stdout
    assert "test_rows (all of it: " in done.stdout


def test_what_does_not_compile_is_said_with_the_first_error(project):
    if not shutil.which("cmake"):
        absent("cmake is missing: pip install cmake")
    release(project.parent, SOURCE)
    write(project / "CMakeLists.txt", BUILD + 'message(FATAL_ERROR "no such header")\n')
    done = try_release(project, "--try", "2.0.0")
    assert done.returncode == 1
    assert "  libraries            BREAK: CMake Error at CMakeLists.txt" in done.stdout
    assert "  tests                not reached: there are no libraries" in done.stdout


@pytest.mark.parametrize("version", ["9.9.9", "../x"])
def test_a_release_that_cannot_be_had_is_one_line(project, version):
    done = try_release(project, "--try", version)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.splitlines()[-1].startswith("upstream.py: error: ")
    assert version in done.stderr.splitlines()[-1]
    assert not list(project.parent.glob("x*"))
