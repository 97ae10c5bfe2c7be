"""`edgekv-lab NAME`, the experiments behind docs/results."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from edgekv_lab import experiments, record
from edgekv_lab.experiments import archive_edits

SHARED = {"__init__", "checkout", "experiment", "peer", "prompts", "server"}


def typed(*words: str) -> Result:
    return CliRunner().invoke(experiments.main, words, prog_name="edgekv-lab")


def test_every_module_is_an_experiment_or_shared():
    stems = {path.stem for path in Path(experiments.__file__).parent.glob("*.py")}
    assert stems - SHARED == {name.replace("-", "_") for name in experiments.NAMES}


def test_help_lists_all_and_loads_none():
    code = (
        "import sys; from edgekv_lab.experiments import main; main(['--help'], standalone_mode=0);"
        "print([x for x in sys.modules if x.startswith('edgekv_lab.experiments.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert all(f"\n  {name} " in done.stdout for name in experiments.NAMES)


@pytest.mark.parametrize("name", experiments.NAMES)
def test_each_says_what_it_does_and_takes_shared_options(name):
    done = typed(name, "--help")
    assert done.exit_code == 0, done.output
    said = " ".join(done.stdout.split())
    assert experiments.about(name) in said and "--record FILE" in said
    assert "benchmarks/" not in said


def test_a_mistake_is_one_line():
    for words in (["busy", "-m", "nothing"], ["fit", "--points", "a:b"], ["share", "-t", "0"]):
        done = typed(*words)
        assert done.exit_code == 2 and len(done.stderr.splitlines()) == 1, done.output


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "httpx", None)
    monkeypatch.delitem(sys.modules, "edgekv_lab.experiments.soak", raising=False)
    monkeypatch.delitem(sys.modules, "edgekv_lab.experiments.server", raising=False)
    done = typed("soak")
    assert done.exit_code == 2 and done.stderr.endswith("pip install httpx\n")


def test_a_table_is_printed_and_kept(tiny, tmp_path):
    path, model = tmp_path / "found.json", tiny("llama-gqa")
    words = f"archive-edits -m {model} --tokens 300 -t 1 --record {path}"
    done = typed(*words.split())
    assert done.exit_code == 0, done.output
    found = record.read(path)["archive-edits"]
    assert found.table() in done.stdout and len(found.rows) == 5
    assert found.models.keys() == {model.name} and found.settings["tokens"] == 300
    assert str(tmp_path) not in path.read_text(encoding="utf-8")


def test_sides_are_the_unpatched_library_and_edgekv(tiny):
    done = typed(*f"engine -m {tiny('llama-gqa')} --tokens 200 --types f16 --rounds 1".split())
    assert done.exit_code == 0, done.output
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")][2:]
    assert [row[0] for row in rows[:2]] == ["| stock, 200 tokens", "| stock, 40 tokens"]
    assert [row[0] for row in rows[2:]] == [f"| edgekv, hidden {x}" for x in ("f32", "f16", "disk")]


@pytest.mark.parametrize(
    ("words", "heads"),
    [("--turns -n 6", {"KL, first 5", "last 5"}), ("--needles 2", {"score"})],
)
def test_recall_is_measured_in_turns_and_by_what_is_found(tiny, tmp_path, words, heads):
    path, book = tmp_path / "found.json", tmp_path / "book.txt"
    book.write_text("The rain in the air is an art and a tin can. " * 60)
    files = f"-f {book} " * ("--turns" in words)
    line = f"recall -m {tiny('llama-gqa')} {files}--lengths 300 -t 1 --record {path} {words}"
    done = typed(*line.split(), "--caches", "f16,0.3+0.05", "--method", "snapkv")
    assert done.exit_code == 0, done.output
    found = record.read(path)["recall"]
    names = [head for head, _ in found.columns]
    assert heads <= set(names)
    full, again, recalled = ({n: x for n, x in zip(names, row)} for row in found.rows)
    assert full["KL"] == again["KL"] == 0 < recalled["KL"]
    assert len(found.samples[2]["kl"]) == full["same answer"][1]


def test_rows_of_an_experiment_that_is_stopped_are_kept(tiny, tmp_path, monkeypatch):
    path, rows = tmp_path / "found.json", []

    def row(*args):
        if rows:
            raise KeyboardInterrupt
        return rows.append(archive_edits_row(*args)) or rows[0]

    archive_edits_row = archive_edits.row
    monkeypatch.setattr(archive_edits, "row", row)
    typed(*f"archive-edits -m {tiny('llama-gqa')} --tokens 300 -t 1 --record {path}".split())
    assert record.read(path)["archive-edits"].rows == rows
