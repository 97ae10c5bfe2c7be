"""Programs that PyInstaller makes of edgekv."""

from __future__ import annotations

import importlib
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


@pytest.mark.slow
def test_a_bundle_answers(tiny, tmp_path):
    pytest.importorskip("PyInstaller")
    (tmp_path / "app.py").write_text(APP)
    words = ["--log-level", "WARN", "--additional-hooks-dir", *hook_dirs(), "app.py"]
    words += [word for name in HEAVY for word in ("--exclude-module", name)]
    made = subprocess.run(
        [sys.executable, "-m", "PyInstaller", *words], cwd=tmp_path, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr[-3000:]
    env = {name: os.environ[name] for name in ("HOME", "PATH") if name in os.environ}
    program = tmp_path / "dist" / "app" / "app"
    said = subprocess.run(
        [program, tiny("llama-gqa")], cwd=tmp_path, capture_output=True, text=True, env=env
    )
    assert said.stdout == "layers\n", said.stderr
