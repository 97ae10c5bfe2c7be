"""Docs that cannot drift: paths named in prose, the list of patches."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import edgekv
from edgekv.commands import docs_python
from tests import support_table

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.skipif(sys.platform != "linux", reason="the stand-ins for CUDA and Metal need Linux")
def test_the_table_of_kernels_is_up_to_date():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert support_table.readme(text) == text and support_table.make() in text, "python -m tests.support_table writes it anew"


def test_the_python_page_is_the_docstrings():
    text = (ROOT / "docs" / "python-api.md").read_text(encoding="utf-8")
    assert text == docs_python.page(), "run: python -m edgekv.commands.docs"


def test_every_public_name_is_on_the_python_page():
    text = docs_python.page()
    names = [name for name in edgekv.__all__ if not name.startswith("_")]
    methods = [name for name in dir(edgekv.Llama) if name.startswith("kv_")]
    assert {"kv_cancel", "kv_load", "kv_save", "kv_set", "kv_stats"} <= set(methods)
    assert [n for n in names if f"edgekv.{n}" not in text] == []
    assert [n for n in methods if f"### Llama.{n}\n" not in text] == []


@pytest.mark.parametrize("page", ["README.md", "docs/architecture.md", "docs/eval.md", "patches/README.md"])
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
