"""`edgekv models`: what lies on this computer, from made-up stores."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from edgekv import profiles
from edgekv.commands import judging, overview
from edgekv.commands import models as listing
from edgekv.commands.judging import Judge
from edgekv.commands.overview import Machine
from edgekv.methods.kvzap import PAIRS, Surrogate, n_features
from edgekv.model import facts
from edgekv.model.blueprint import Blueprint
from edgekv.model.header import Header, opened
from edgekv.model.outline import outline
from edgekv.models.found import demo
from edgekv.models.found.stores import STORES
from edgekv.profiles import places
from tests import gguf_files, models, stores
from tests.cli import typed
from tests.stores import put
from tests.test_profiles import make


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """llama.cpp's folder in an empty home."""
    home = stores.empty_home(monkeypatch, tmp_path)
    others = tuple(store for store in STORES if store is not demo)
    monkeypatch.setattr("edgekv.models.found.stores.STORES", others)
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
    monkeypatch.setattr(Machine, "here", lambda margin: Machine("CPU", False, 1000))
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
    data = bytearray(models.write("llama-gqa", folder).read_bytes())
    key = b"llama.block_count"
    data[data.index(key) + len(key) + 4 + 2] = 1  # behind the type: 65,536 layers more
    put(folder / "a.gguf", data)
    found = listed()
    assert "breaks down" in found["llama.cpp:a"]["why_not"]
    assert found["llama.cpp:llama-gqa"]["fits"]
    monkeypatch.setattr(Judge, "ask", lambda *_: pytest.fail("looked at again"))
    assert listed() == found


@pytest.mark.parametrize("name", ["llama-gqa", "gemma3", "qwen3", "llama-moe", "phi3"])
def test_an_outline_is_the_model_without_its_words(tiny, name):
    path = str(tiny(name))
    with opened(path) as data, outline(Header(data)) as short:
        assert os.path.getsize(short) <= os.path.getsize(path)
        with Blueprint(short) as one, Blueprint(path) as other:
            assert (one.shape, one.weights, one.why) == (other.shape, other.weights, other.why)
            for compressed in (False, True):
                args = compressed, 2048, 1, 1
                assert one.context(*args) == other.context(*args)


def test_a_number_of_words_that_a_file_claims_takes_no_memory(tmp_path):
    import resource

    import gguf

    path = str(tmp_path / "many.gguf")
    writer = gguf.GGUFWriter(path, "llama")
    models._fill(writer, models.SHAPES["llama-gqa"], "llama-gqa")
    writer.kv_data[0]["llama.vocab_size"].value = 2**24
    models.finish(writer)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert judging.judge(path, 1024, False).arch == "llama"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18  # KiB


def test_no_weights_and_no_vocabulary_are_read_for_the_list(folder, monkeypatch):
    """Whole files, with all their words, are what takes a second each."""
    path = str(models.write("llama-gqa", folder))
    asked = []
    monkeypatch.setattr("edgekv.profiles.places.identify", asked.append)
    load = facts.load_without_weights

    def loaded(name, *more):
        asked.append(name)
        return load(name, *more)

    monkeypatch.setattr(facts, "load_without_weights", loaded)
    shapes = places.shapes()
    assert overview._profile(path, shapes) == ""
    assert judging.judge(path, 1024, False, has_profile=False).ways
    assert asked and path not in asked


def test_a_prepared_model_says_so(folder):
    path = str(models.write("llama-gqa", folder))
    identity = profiles.identify(path)
    maps = np.zeros((3, 2, n_features(64, 64) + 1), np.float32)
    profile = make(identity, surrogate=Surrogate(maps, PAIRS[0]))
    for place in (places.cached(identity), places.beside(path)):
        assert listed()["llama.cpp:llama-gqa"]["profile"] == ""
        place.parent.mkdir(parents=True, exist_ok=True)
        profiles.write(profile, place)
        assert listed()["llama.cpp:llama-gqa"]["profile"] == str(place)
        place.unlink()


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
    room = Machine("CPU", False, 2**40)
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
