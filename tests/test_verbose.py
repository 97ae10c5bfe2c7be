"""-v: llama.cpp's log on standard error, and no bar that it would tear."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress

import pytest

from tests.lib import ROOT

COMMANDS = {
    "eval": "eval needle -n 2 --lengths 200 --methods snapkv --ratios 0.5 --setting agnostic",
    "bench": "bench -p 64 -n 0 -r 2 --kv-method snapkv --full none",
    "profile": "profile probe --tokens 64 --ratios 0.5 -o profile.gguf",
}
LOADED = "llama_model_loader: loaded meta data"
N_LOADS = {"eval": 1, "bench": 2, "profile": 1}
"""A benchmark loads the model for each of its samples."""


@pytest.mark.skipif(os.name == "nt", reason="needs a pseudo terminal")
@pytest.mark.parametrize("name", COMMANDS)
def test_llama_cpps_log_is_printed_if_asked_for_and_tears_no_bar(tiny, tmp_path, name):
    command = [*COMMANDS[name].split(), "-m", str(tiny("llama-gqa"))]
    quiet, verbose = (on_a_terminal([*command, *more], tmp_path) for more in ([], ["-v"]))
    assert "llama_" not in quiet and "\x1b" in quiet, "there is a bar"
    assert "\x1b" not in verbose
    lines = verbose.splitlines()
    assert sum(LOADED in line for line in lines) == N_LOADS[name]
    assert all(line.startswith(LOADED) for line in lines if LOADED in line)


def on_a_terminal(args: list[str], folder: str | os.PathLike[str]) -> str:
    """What a command, in `folder`, writes to standard error, which is a terminal."""
    import pty

    screen, inner = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder), "TERM": "xterm"}
    with subprocess.Popen(
        [sys.executable, "-m", "edgekv", *args],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=inner,
        env=env,
    ) as process:
        os.close(inner)
        seen = b""
        with suppress(OSError):  # Linux's way to say that the other end is closed
            while piece := os.read(screen, 1 << 16):
                seen += piece
    os.close(screen)
    assert process.returncode == 0, seen[-500:]
    return seen.decode(errors="replace")
