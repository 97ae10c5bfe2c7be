"""Docs that cannot drift: the README's map names every file, and every file it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAPPED = ("edgekv/**/*.py", "native/*.*", "native/include/*.h", "native/src/**/*.*", "native/tests/*.cpp", "patches/*.*", "tests/**/*.py",
          "benchmarks/*.*", "docs/**/*.md", "cli.py", "pyproject.toml", "CMakeLists.txt")


def mapped() -> dict[str, str]:
    """path -> phrase, from the README's map."""
    block = (ROOT / "README.md").read_text(encoding="utf-8").split("## Map", 1)[1].split("```")[1]
    lines = [line.split(None, 1) for line in block.strip().splitlines()[0:] if line.strip()]
    return {line[0]: line[1].strip() if len(line) > 1 else "" for line in lines}


def present() -> set[str]:
    """The files that a map has to name. Empty __init__.py files say nothing and need no phrase."""
    found = {path for pattern in MAPPED for path in ROOT.glob(pattern) if path.is_file()}
    found = {path for path in found if path.stat().st_size and "__pycache__" not in path.parts and "lib" not in path.relative_to(ROOT).parts}
    return {path.relative_to(ROOT).as_posix() for path in found}


def test_the_map_names_every_file_and_only_files_that_exist():
    assert set(mapped()) == present()


def test_every_file_has_a_phrase_of_its_own():
    phrases = list(mapped().values())
    assert all(phrases) and len(set(phrases)) == len(phrases)


@pytest.mark.parametrize("page", ["README.md", "docs/architecture.md", "patches/README.md"])
def test_paths_in_prose_exist(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for path in re.findall(r"`((?:edgekv|native|patches|tests|docs|benchmarks)/[\w./-]+\.\w+)`", text):
        assert (ROOT / path).exists() or path.startswith("edgekv/lib/"), f"{page} names {path}"


def test_the_patches_are_described():
    text = (ROOT / "patches" / "README.md").read_text(encoding="utf-8")
    series = [line for line in (ROOT / "patches" / "series").read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    assert series and all(f"`{name}`" in text for name in series)
    for name in series:
        header = (ROOT / "patches" / name).read_text(encoding="utf-8").split("---", 1)[0]
        assert all(field in header for field in ("Reason:", "Remove-When:", "Test:"))
