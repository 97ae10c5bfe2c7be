"""edgekv models: what lies on this computer, from made-up stores."""

from __future__ import annotations

import json
import os
import shutil
import time

import pytest

from edgekv.commands import models as listing
from edgekv.commands import overview_worker as overview
from edgekv.model.blueprint import Blueprint
from edgekv.model.header import Header, opened
from edgekv.model.outline import outline
from edgekv.models_found.found import Found
from edgekv.models_found.stores import everything
from tests import models
from tests.cli import typed
from tests.recurrent import write as write_recurrent


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """An empty home folder, and a machine on which everything fits."""
    for name in list(os.environ):
        if name.startswith(("HF_H", "HF_T", "HUGGINGFACE_", "XDG_", "OLLAMA_", "LLAMA_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("edgekv.models_found.stores.STORES", without_demo())
    return tmp_path


def without_demo():
    from edgekv.models_found import stores

    return tuple(pair for pair in stores.STORES if pair[0] != "demo")


def put(home, path, name="Tiny-Q8_0.gguf"):
    file = home / ".lmstudio/models/who/Repo-GGUF" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(path, file)
    return file


def listed(line="models --json"):
    result = typed(line)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["models"]


@pytest.mark.parametrize("command", ["models", "list", "ls"])
def test_a_model_is_listed_with_what_its_header_says(home, tiny, command):
    file = put(home, tiny("llama-gqa"))
    (one,) = listed(f"{command} --json")
    assert (one["name"], one["source"], one["path"]) == (
        "lmstudio:who/Repo-GGUF/Tiny-Q8_0",
        "lmstudio",
        str(file),
    )
    assert (one["size_bytes"], one["architecture"]) == (file.stat().st_size, "llama")
    assert one["kv_bytes_per_token"] == 3 * 2 * 2 * 64 * 2  # layers, K and V, heads, values, f16
    assert one["compressible"] and not one["profile"] and not one["why_not"]
    assert (one["fits"]["ratio"], one["fits"]["n_ctx"]) == (1, 4096)


def test_the_ratio_is_what_memory_allows(tiny, monkeypatch):
    model = Found("x:y", str(tiny("llama-32k")))
    with Blueprint(model.path) as blueprint:
        context = blueprint.context(False, 32768, 1, 1)
        standing = blueprint.weights + context.compute
    monkeypatch.setattr(overview, "rss_now", lambda: 0)
    machine = overview.Machine(32768)

    def fits(n_bytes):
        machine.n_bytes = overview.LOADED_BYTES + n_bytes
        machine._seen.clear()
        return machine.look(model).fits

    assert fits(standing + context.cache).ratio == 1
    assert fits(standing + context.cache - 1).ratio < 1
    assert fits(0) is None


def test_a_prepared_model_says_so(home, tiny):
    from edgekv import profiles
    from tests.test_profiles import make

    file = put(home, tiny("llama-gqa"))
    identity = profiles.identify(file)
    cached = profiles.places.cached(identity)
    cached.parent.mkdir(parents=True)
    profiles.write(make(identity), cached)
    assert listed()[0]["profile"]
    cached.unlink()
    assert not listed()[0]["profile"]
    profiles.write(make(identity), profiles.places.beside(str(file)))
    assert listed()[0]["profile"]


def test_a_model_that_is_not_compressed_says_why(home, tmp_path):
    put(home, write_recurrent(tmp_path / "hybrid.gguf"))
    (one,) = listed()
    assert not one["compressible"] and one["uncompressed_because"]


def test_broken_files_are_listed_with_their_reason(home, tiny):
    good = tiny("llama-gqa").read_bytes()
    for name, data in {"empty": b"", "half": good[: len(good) // 2], "text": b"hello"}.items():
        put(home, tiny("llama-gqa"), f"{name}.gguf").write_bytes(data)
    models.write_adapter(put(home, tiny("llama-gqa"), "lora.gguf"), "llama-gqa")
    put(home, tiny("llama-gqa"), "part-00001-of-00002.gguf")
    put(home, tiny("llama-gqa"), "evil\x1b[2J.gguf").write_bytes(b"")
    put(home, tiny("llama-gqa"), "good.gguf")
    why = {one["name"].rpartition("/")[2]: one["why_not"] for one in listed()}
    assert why.pop("good") == ""
    assert all(why.values()) and len(why) == 6
    assert "LoRA" in why["lora"] and "00002-of-00002.gguf is missing" in why["part"]
    text = typed("models").stdout
    assert "\x1b" not in text and all(reason in text for reason in why.values())


def test_a_file_that_llama_cpp_ends_the_process_over_is_damaged(home, tiny):
    """It has more layers than llama.cpp has room for; the next file is looked at all the same."""
    data = bytearray(tiny("llama-gqa").read_bytes())
    key = b"llama.block_count"
    data[data.index(key) + len(key) + 4 + 2] = 1  # behind the type: 65,536 more
    put(home, tiny("llama-gqa"), "a-bad.gguf").write_bytes(data)
    put(home, tiny("llama-gqa"), "b-good.gguf")
    bad, good = listed()
    assert "llama.cpp stops" in bad["why_not"] and good["architecture"] == "llama"


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_the_terminals_width_is_respected(home, tiny, width):
    put(home, tiny("llama-gqa"), "A-name-of-medium-length-Q8_0.gguf")
    put(home, tiny("llama-gqa"), "broken.gguf").write_bytes(b"hello")
    machine = overview.Machine(4096)
    found = [machine.look(one) for one in everything()]
    lines = listing.text(found, width).splitlines()
    assert all(len(line) <= width for line in lines if line not in {one.name for one in found})
    words = " ".join(lines).split()
    assert found[0].name in words and {"llama", "llama;"} & set(words)


def test_a_hundred_files_are_quick(home, tiny):
    for i in range(100):
        put(home, tiny("llama-gqa"), f"tiny-{i}.gguf")
    machine = overview.Machine(4096)
    begin = time.process_time()
    names = [machine.look(one).architecture for one in everything()]
    assert names == ["llama"] * 100 and time.process_time() - begin < 5


def test_nothing_found_says_where_models_come_from(home):
    assert "pull" in typed("models").stdout


def test_a_number_of_words_that_a_file_claims_takes_no_memory(home, tmp_path):
    import resource

    import gguf

    path = tmp_path / "many.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    shape = models.SHAPES["llama-gqa"]
    models._fill(writer, shape, "llama-gqa")
    writer.kv_data[0]["llama.vocab_size"].value = 2**24
    models.finish(writer)
    machine = overview.Machine(4096)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert not machine.look(Found("x:y", str(path))).why_not
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18  # KiB


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
