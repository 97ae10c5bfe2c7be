"""`edgekv models`: what lies on this computer, from made-up stores."""

from __future__ import annotations

import json
import os

import pytest

from edgekv.commands import judging, overview
from edgekv.commands import models as listing
from edgekv.commands.judging import Judge
from edgekv.commands.overview import Room
from edgekv.models_found.stores import STORES
from tests import gguf_files, models, stores
from tests.cli import typed
from tests.stores import put


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """llama.cpp's folder in an empty home."""
    home = stores.empty_home(monkeypatch, tmp_path)
    others = tuple(store for store in STORES if store[0] != "demo")
    monkeypatch.setattr("edgekv.models_found.stores.STORES", others)
    (home / ".cache/llama.cpp").mkdir(parents=True)
    return home / ".cache/llama.cpp"


def listed(line=""):
    result = typed(f"models --json --margin 0 {line}")
    assert result.exit_code == 0, result.output
    return {one["name"]: one for one in json.loads(result.stdout)["models"]}


def test_a_model_is_told_with_what_it_takes(folder):
    file = models.write("llama-gqa", folder)
    one = listed("-c 1024")["llama.cpp:llama-gqa"]
    shape = models.SHAPES["llama-gqa"]
    assert one["kv_bytes_per_token"] == shape.n_layer * shape.n_head_kv * 2 * shape.d_head * 2
    assert one["path"] == str(file) and one["size"] == file.stat().st_size
    assert (one["source"], one["arch"]) == ("llama.cpp", "llama")
    assert one["compressible"] and one["fits"] and one["ratio"] == 1 and one["n_ctx"] == 1024
    assert one["profile"] == "" and one["why_not"] == ""
    row = typed("list").stdout.splitlines()[1]
    assert row.split()[0] == "llama.cpp:llama-gqa" and "yes" in row and row.endswith("none")


def test_a_ratio_is_the_planners(folder):
    path = str(models.write("llama-32k", folder))
    judged = judging.judge(path, 32768, False)
    peaks = {ratio: peak for ratio, kind, peak in judged.ways if ratio < 1 or kind == "f16"}
    assert sorted(peaks, reverse=True) == [1, 0.5, 0.3, 0.2, 0.1]
    assert judged.best(peaks[1]) == (1, "f16")
    assert judged.best(peaks[1] - 1)[0] < 1
    assert judged.best(1000) is None


def test_what_does_not_fit_says_so(folder, monkeypatch):
    models.write("llama-gqa", folder)
    monkeypatch.setattr(Room, "here", lambda margin: Room("CPU", False, 1000))
    assert listed()["llama.cpp:llama-gqa"]["fits"] is False
    assert "4,096 do not" in typed("models").stdout


def test_broken_files_and_other_files_have_their_reason(folder):
    whole = models.write("llama-gqa", folder).read_bytes()
    put(folder / "cut.gguf", whole[: len(whole) // 2])
    put(folder / "empty.gguf", b"")
    put(folder / "zip.gguf", b"PK" * 500)
    first = models.write_in_parts("llama-mha", folder)
    first.with_name(first.name.replace("00001-of", "00002-of")).unlink()
    gguf_files.others(folder / "others")
    gguf_files.write(folder / "bert.gguf", "bert", ("a",))
    os.symlink("/nowhere", folder / "link.gguf")
    found = listed()
    assert found.pop("llama.cpp:llama-gqa")["fits"]
    assert all(one["why_not"] for one in found.values())
    reasons = {name.partition(":")[2]: one["why_not"] for name, one in found.items()}
    assert "no GGUF" in reasons["zip"] and "--lora" in reasons["others/lora"]
    assert "1 of its" in reasons["llama-mha"] and "embeddings" in reasons["bert"]
    assert all(str(folder) not in why for why in reasons.values())


def test_a_file_that_breaks_llama_cpp_does_not_end_the_list(folder, monkeypatch):
    data = models.write("llama-gqa", folder).read_bytes()
    put(folder / "a.gguf", data.replace(b"<0x41>", b"<0x42>", 1))  # a word that comes twice
    found = listed()
    assert "breaks down" in found["llama.cpp:a"]["why_not"]
    assert found["llama.cpp:llama-gqa"]["fits"]
    monkeypatch.setattr(Judge, "ask", lambda *_: pytest.fail("looked at again"))
    assert listed() == found


@pytest.mark.slow
def test_a_hundred_files_are_remembered(folder, monkeypatch):
    one = models.write("llama-gqa", folder)
    for i in range(100):
        os.link(one, folder / f"m{i}.gguf")
    first = listed()
    assert len(first) == 101
    monkeypatch.setattr(Judge, "ask", lambda *_: pytest.fail("looked at again"))
    assert listed() == first


def test_a_changed_file_is_looked_at_again(folder):
    path = models.write("llama-gqa", folder)
    assert listed()["llama.cpp:llama-gqa"]["arch"] == "llama"
    path.write_bytes(models.write("qwen2", folder / "..").read_bytes())
    assert listed()["llama.cpp:llama-gqa"]["arch"] == "qwen2"


def test_a_damaged_memory_is_found_out_anew(folder):
    models.write("llama-gqa", folder)
    first = listed()
    memory = folder.parent / "edgekv/models.json"
    assert memory.is_file()
    for text in ("{", '{"a": {"arch": 7}}', "[" * 100000):
        memory.write_text(text)
        assert listed() == first


def test_a_file_that_two_stores_have_is_told_once(folder):
    file = models.write("llama-gqa", folder)
    other = folder.parent.parent / ".lmstudio/models/who/repo"
    other.mkdir(parents=True)
    file.rename(other / "llama-gqa.gguf")
    assert list(listed()) == ["lmstudio:who/repo/llama-gqa"]


def test_a_terminals_width_is_respected(folder):
    models.write("llama-gqa", folder).rename(folder / f"{'long-' * 6}\x1b[31mname.gguf")
    put(folder / "broken.gguf", b"GGUFxxxx")
    room = Room("CPU", False, 2**40)
    found = overview.entries(room, None, len)
    name = f"llama.cpp:{'long-' * 6}?[31mname"
    for width in (20, 40, 80, 200):
        shown = listing.text(found, width)
        assert name in shown and "\x1b" not in shown
        for line in shown.splitlines():
            assert len(line) <= max(width, 24) or line.strip() == name


def test_nothing_found_says_what_to_do():
    result = typed("models")
    assert result.exit_code == 0 and "edgekv pull" in result.stdout
