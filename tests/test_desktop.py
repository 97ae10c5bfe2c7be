"""The window of examples/desktop, on a display without a screen."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
APP = ROOT / "examples" / "desktop" / "app.py"
LINES = 250
"""What the example says can be done in few lines."""

needs_display = pytest.mark.skipif(
    not shutil.which("Xvfb") or importlib.util.find_spec("_tkinter") is None,
    reason="needs Xvfb and Tk",
)


@pytest.fixture
def display() -> Iterator[str]:
    """The name of a display of its own."""
    read, write = os.pipe()
    command = ["Xvfb", "-displayfd", str(write), "-screen", "0", "1024x768x24"]
    process = subprocess.Popen(command, pass_fds=[write], stderr=subprocess.DEVNULL)
    os.close(write)
    try:
        with os.fdopen(read) as file:
            number = file.readline().strip()  # empty: it ended
        if not number:
            pytest.skip("Xvfb does not start here")
        yield f":{number}"
    finally:
        process.terminate()
        process.wait(60)


def used(models: list[Path], documents: list[Path], display: str) -> dict[str, Any]:
    """What the window showed, see tests/desktop.py."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.desktop", *map(str, [*models, *documents])],
        cwd=ROOT,
        env={**os.environ, "DISPLAY": display},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@needs_display
def test_documents_are_asked_about_in_one_window(tiny, tmp_path, display):
    documents = [tmp_path / f"{name}.txt" for name in ("one", "two", "three")]
    for path in documents:
        lines = " ".join(f"{path.stem} has {n} costs." for n in range(100))
        path.write_text(lines, encoding="utf-8")
    model, other = tiny("llama-gqa"), tmp_path / "other.gguf"
    shutil.copy(model, other)
    shown = used([model, other], documents, display)
    assert shown["tabs"] == ["one.txt", "two.txt", "three.txt"]

    said = "> to be stopped\n(cancelled)"
    assert shown["cancelled"] == {"text": said, "kept": "nothing read yet"}
    first, second = shown["answered"]
    assert re.match(r"> first\n\S", first)
    assert re.search(r"\(cancelled\)\n\n> second\n\S", second)
    for kept, (value, most), n_read in zip(shown["kept"], shown["bars"], shown["read"]):
        assert re.fullmatch(r"\d\.\d of \d\.\d MiB kept for [\d,]+ tokens", kept)
        assert 0 < value < 0.5 * most
        assert n_read > 1000
    assert shown["read again"] < 200, "the document was read again"
    assert shown["cancelled while it waits"].endswith("> fourth\n(cancelled)")

    assert shown["answered while it reads"], "a question about another document waited"
    assert re.match(r"> long\n\S", shown["read on"]) and "(" not in shown["read on"]
    (error, text) = shown["without a model"]
    assert "nothing.gguf" in error and text.endswith(f"> nobody\n({error})")
    status, text, n_read = shown["switched"]
    assert status == "other.gguf: ready" and n_read > 1000
    assert re.search(r"> another model\n[^(]", text)
    assert shown["closed"]


def test_the_window_is_a_short_program():
    assert len(APP.read_text(encoding="utf-8").splitlines()) <= LINES
