"""What the distribution edgekv-lab brings, and edgekv without it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from edgekv.commands import lab
from edgekv.commands.measured import known
from edgekv.version import __version__
from tests.cli import refused, typed
from tests.lib import ROOT

WITHOUT = """
import sys

class NoLab:
    def find_spec(self, name, *_):
        if name == "edgekv_lab":
            raise ModuleNotFoundError(name=name)

sys.argv[0] = "edgekv"
sys.meta_path.insert(0, NoLab())
from edgekv.commands import main
main(prog_name="edgekv")
"""


def without(*words: str) -> subprocess.CompletedProcess[str]:
    """What the command does where the lab is not installed."""
    command = [sys.executable, "-c", WITHOUT, *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("words", ["bench", "eval needle -m demo", "profile lukv --help"])
def test_without_the_lab_one_line_says_what_to_install(words):
    done = without(*words.split())
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert f"pip install edgekv-lab=={__version__}" in line and "pip install ./lab" in line


@pytest.mark.parametrize("words", ["--help", "profile --help"])
def test_help_is_the_same_without_the_lab(words):
    with_lab = [sys.executable, "-m", "edgekv", *words.split()]
    done = subprocess.run(with_lab, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout and without(*words.split()).stdout == done.stdout


def test_only_a_lab_that_is_not_there_is_missing(monkeypatch):
    with pytest.raises(ModuleNotFoundError, match="no_such"):
        lab.part("no_such")
    assert "no such command" in refused(typed("lukv")).lower()
    assert without("fit", "nothing").stderr == typed("fit nothing").stderr
    assert known(__file__, "snapkv", 0.5, "f16", "f16").startswith("not measured")
