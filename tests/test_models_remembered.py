"""Models that were opened, and folders that were named: `edgekv models` knows them afterwards."""

from __future__ import annotations

import json
import os

import pytest

from edgekv.errors import BadInput
from edgekv.models.names import path_of
from tests import models, stores
from tests.cli import refused, typed


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """An empty home folder, without the demo model's package."""
    from edgekv.models.found.stores import STORES

    others = tuple(store for store in STORES if store.NAME != "demo")
    monkeypatch.setattr("edgekv.models.found.stores.STORES", others)
    return stores.empty_home(monkeypatch, tmp_path / "home")


@pytest.fixture
def place(tmp_path):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    models.write("llama-gqa", folder)
    return folder


def listed(line=""):
    result = typed(f"models --json --margin 0 {line}")
    assert result.exit_code == 0, result.output
    return {one["name"]: one["path"] for one in json.loads(result.stdout)["models"]}


def test_a_model_that_was_opened_has_a_name_from_then_on(place, monkeypatch):
    monkeypatch.chdir(place)
    file = str(place / "llama-gqa.gguf")
    assert listed() == {}
    assert typed("info -m llama-gqa.gguf").exit_code == 0
    assert listed() == {"used:llama-gqa": file}
    assert path_of("llama-gqa") == path_of("used:llama-gqa") == file
    os.rename(file, place / "gone")
    assert listed() == {}


def test_two_of_one_name_are_told_apart(place, tmp_path):
    (tmp_path / "more").mkdir()
    files = [str(place / "llama-gqa.gguf"), str(models.write("llama-gqa", tmp_path / "more"))]
    for file in files:
        typed(f"info -m {file}")
    names = {f"used:{file.removesuffix('.gguf')}": file for file in files}
    assert listed() == names
    with pytest.raises(BadInput, match="several models"):
        path_of("llama-gqa")
    assert [path_of(name) for name in names] == files


def test_what_is_no_model_is_not_remembered(place):
    (place / "text.gguf").write_text("hello")
    for name in ("text.gguf", "nowhere.gguf"):
        assert typed(f"info -m {place / name}").exit_code == 2
    assert listed() == {}


def test_a_folder_that_was_named_is_looked_into_from_then_on(place):
    file = str(place / "llama-gqa.gguf")
    assert listed(str(place)) == listed() == {"folder:elsewhere/llama-gqa": file}
    assert path_of("llama-gqa") == path_of("elsewhere/llama-gqa") == file
    typed(f"info -m {file}")
    assert list(listed()) == ["folder:elsewhere/llama-gqa"], "each file once"
    assert listed(f"--forget {place}") == {"used:llama-gqa": file}
    assert listed(f"--forget {file}") == {}


def test_mistakes_with_folders_are_one_line(place):
    assert "no folder" in refused(typed(f"models {place / 'nowhere'}"))
    assert "not remembered" in refused(typed(f"models --forget {place}"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"files": [], "folders": ["relative"]}',
        '{"files": [{"path": "/x", "size": "1", "time": 2}], "folders": []}',
        '{"files": [{"path": "/x\\u001b", "size": 1, "time": 2}], "folders": []}',
        '{"files": 1, "folders": []}',
    ],
)
def test_a_damaged_list_counts_for_nothing(home, place, text):
    kept = home / ".local/share/edgekv/remembered.json"
    kept.parent.mkdir(parents=True)
    kept.write_text(text)
    assert listed() == {}
    assert typed(f"info -m {place / 'llama-gqa.gguf'}").exit_code == 0
    assert list(listed()) == ["used:llama-gqa"]
