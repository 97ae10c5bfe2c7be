"""Programs that PyInstaller makes of edgekv."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from edgekv.bundling import hook_dirs
from tests.lib import ROOT

APP = """
import sys
import edgekv

if __name__ == "__main__":
    with edgekv.Llama(sys.argv[1], n_ctx=512, kv_ratio=0.5, verbose=False) as llm:
        llm.create_completion("the rain " * 50, max_tokens=2)
        print(llm.kv_stats().mode)
"""
HEAVY = "torch scipy matplotlib hypothesis mypy PIL IPython openai anthropic langchain_core".split()
"""What the tests' environment has and a program would not."""


def test_pyinstaller_finds_the_hook():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'entry-points.pyinstaller40\]\nhook-dirs = "([\w.]+):(\w+)"', text)
    assert found
    folders = getattr(importlib.import_module(found[1]), found[2])()
    assert [path.name for path in Path(*folders).glob("hook-*")] == ["hook-edgekv.py"]


def packed(app: Path, folder: Path) -> Path:
    """The program that PyInstaller makes of a script."""
    pytest.importorskip("PyInstaller")
    words = ["--log-level", "WARN", "--additional-hooks-dir", *hook_dirs(), str(app)]
    words += [word for name in HEAVY for word in ("--exclude-module", name)]
    made = subprocess.run(
        [sys.executable, "-m", "PyInstaller", *words], cwd=folder, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr[-3000:]
    return folder / "dist" / app.stem / app.stem


def run(program: Path, *words: Path | str) -> subprocess.CompletedProcess[str]:
    """Without what the tests' environment has for it, and without a display."""
    env = {name: os.environ[name] for name in ("HOME", "PATH") if name in os.environ}
    return subprocess.run(
        [program, *words], cwd=program.parent, capture_output=True, text=True, env=env
    )


@pytest.mark.slow
def test_a_bundle_answers(tiny, tmp_path):
    (tmp_path / "app.py").write_text(APP)
    said = run(packed(tmp_path / "app.py", tmp_path), tiny("llama-gqa"))
    assert said.stdout == "layers\n", said.stderr


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("_tkinter") is None, reason="needs Tk")
def test_the_window_of_the_examples_is_bundled(tmp_path):
    program = packed(ROOT / "examples" / "desktop" / "app.py", tmp_path)
    assert "--kv-ratio" in run(program, "--help").stdout
    said = run(program, "model.gguf").stderr
    assert "no display name" in said, said  # Tcl and its own files are there
