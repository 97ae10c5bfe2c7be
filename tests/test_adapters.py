"""LoRA adapters: what they change, with a compressed cache too, and which files are refused."""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import numpy as np
import pytest

from edgekv.errors import BadInput
from tests import models
from tests.cli import refused, typed
from tests.engine import MAX_NMSE, load, logits

ALL_KEPT = {"kv_budget": 4000}
"""An engine's cache from which nothing is evicted: it answers as the full one does."""
LIMIT = 50 * MAX_NMSE["f16"]
"""Of logits, where flash attention sums in another order."""


@pytest.fixture
def lora(tmp_path) -> Path:
    return models.write_adapter(tmp_path / "a.gguf", "llama-gqa")


@pytest.fixture
def say(tiny, text):
    """say(**options): logits of a model behind a prompt."""

    def call(name: str = "llama-gqa", **options) -> np.ndarray:
        with load(tiny(name), **options) as llm:
            llm.eval(list(text(300)))
            return logits(llm)

    return call


def test_an_adapter_changes_what_the_model_says(say, lora, nmse):
    """With a scale of 0 nothing, and parts of it add up to the whole."""
    plain, whole = say(), say(lora_path=str(lora))
    assert nmse(whole, plain) > 0.1
    assert np.array_equal(say(lora_path=str(lora), lora_scale=0.0), plain)
    parts = say(lora_path=[str(lora), lora], lora_scale=[0.25, 0.75])
    assert nmse(parts, whole) < LIMIT


@pytest.mark.parametrize("options", [{}, {"kv_ratio": 0.3}])
def test_two_adapters_add_up(say, tmp_path, lora, nmse, options):
    """Half of one and half of its copy are the one."""
    again = models.write_adapter(tmp_path / "b.gguf", "llama-gqa")
    both = say(lora_path=[str(lora), str(again)], lora_scale=0.5, **options)
    assert nmse(both, say(lora_path=str(lora), **options)) < LIMIT


def test_a_compressed_cache_computes_with_it(say, lora, nmse):
    """Layer by layer as well as in full."""
    assert nmse(say(lora_path=str(lora), **ALL_KEPT), say(lora_path=str(lora))) < LIMIT


def test_it_stays_where_a_conversation_begins_to_be_compressed(tiny, text, lora, nmse):
    expected = load(tiny("llama-gqa"), lora_path=str(lora), **ALL_KEPT)
    llm = load(tiny("llama-gqa"), lora_path=str(lora))
    llm.kv_set(budget=4000)
    for one in (expected, llm):
        one.eval(list(text(300)))
    assert nmse(logits(llm), logits(expected)) == 0


def test_a_saved_conversation_names_its_adapters(tiny, text, tmp_path, lora):
    llm = load(tiny("llama-gqa"), lora_path=[str(lora)], lora_scale=[0.5], kv_ratio=0.5)
    llm.eval(list(text(100)))
    llm.kv_save(str(tmp_path / "chat"))
    load(tiny("llama-gqa"), lora_path=str(lora), lora_scale=0.5, kv_ratio=0.5).kv_load(
        str(tmp_path / "chat")
    )
    for other in ({}, {"lora_path": str(lora)}, {"lora_path": [str(lora)] * 2, "lora_scale": 0.5}):
        with pytest.raises(BadInput, match="another LoRA adapter"):
            load(tiny("llama-gqa"), kv_ratio=0.5, **other).kv_load(str(tmp_path / "chat"))


def test_it_is_pickled_with_the_model_whose_file_stays_mapped(tiny, lora):
    state = load(tiny("llama-gqa"), lora_path=str(lora), lora_scale=0.5).__getstate__()
    assert (state["lora_path"], state["lora_scale"]) == (str(lora), 0.5)
    assert state["use_mmap"] is True


# ---- what is refused


def damaged(path: Path, what: str) -> Path:
    """An adapter file of some wrong kind."""
    good = models.write_adapter(path.with_name("good.gguf"), "llama-gqa")
    data = good.read_bytes()
    if what == "cut":
        path.write_bytes(data[:300])
    elif what == "data cut":
        path.write_bytes(data[:-9])
    elif what == "text":
        path.write_text("no model at all")
    elif what == "empty":
        path.write_bytes(b"")
    elif what == "folder":
        path.mkdir()
    elif what in ("f64", "i32"):
        models.write_adapter(path, "llama-gqa", kind={"f64": np.float64, "i32": np.int32}[what])
    elif what == "model":
        models.write_adapter(path, "llama-d128")
    elif what == "architecture":
        models.write_adapter(path, "qwen2")
    else:
        writer = gguf.GGUFWriter(str(path), "llama")
        _odd(writer, what)
        models.finish(writer)
    return path


def _odd(writer: gguf.GGUFWriter, what: str) -> None:
    if what == "type":
        writer.add_uint32("general.type", 7)
    else:
        writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string("adapter.type", "lora")
    if what == "alpha":
        writer.add_string("adapter.lora.alpha", "much")
    if what == "taught":
        writer.add_array("adapter.alora.invocation_tokens", [1, 2])
    rows = np.ones((2, 4, 128), np.float32) if what == "stacked" else np.ones((4, 128), np.float32)
    writer.add_tensor("blk.0.attn_q.weight.lora_a", rows)
    if what != "half":
        writer.add_tensor("blk.0.attn_q.weight.lora_b", np.ones((256, 4), np.float32))


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("missing", "No such file"),
        ("folder", "cannot be read"),
        ("empty", "damaged or no GGUF"),
        ("text", "damaged or no GGUF"),
        ("cut", "damaged or no GGUF"),
        ("data cut", "cannot be used"),
        ("f64", "cannot be computed with"),
        ("i32", "cannot be computed with"),
        ("model", "wrong base model"),
        ("architecture", "arch mismatch"),
        ("type", "no LoRA adapter"),
        ("alpha", "damaged"),
        ("taught", "aLoRA"),
        ("stacked", "another shape"),
        ("half", "missing one component"),
    ],
)
def test_a_file_that_is_no_adapter_is_one_line(tiny, tmp_path, what, says):
    path = tmp_path / "odd.gguf"
    if what != "missing":
        damaged(path, what)
    with pytest.raises(BadInput, match=re.escape(says)) as caught:
        load(tiny("llama-gqa"), lora_path=str(path), kv_ratio=0.5)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_the_model_itself_is_no_adapter(tiny):
    with pytest.raises(BadInput, match="no LoRA adapter"):
        load(tiny("llama-gqa"), lora_path=str(tiny("llama-gqa")))


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), "much", [1.0, 2.0], []])
def test_scales_that_are_none(tiny, lora, scale):
    with pytest.raises(BadInput, match="lora_scale"):
        load(tiny("llama-gqa"), lora_path=str(lora), lora_scale=scale)


# ---- the command line


def run(*words: str, path: Path) -> tuple[int, str, str]:
    """Exit code, answer and messages of a greedy answer."""
    result = typed(f"run -m {path} -c 512 -n 12 --temp 0 --ignore-eos -p hello", *words)
    return result.exit_code, result.stdout, result.stderr


def test_adapters_on_the_command_line(tiny, tmp_path, lora):
    comma = models.write_adapter(tmp_path / "b,c.gguf", "llama-gqa")
    path = tiny("llama-gqa")
    plain, one = run(path=path), run("--lora", str(lora), path=path)
    assert plain[0] == one[0] == 0 and plain[1] != one[1]
    assert run("--lora-scaled", f"{lora}:0", path=path)[1] == plain[1]
    halves = f'{lora}:0.5,"{comma}:0.5"'
    assert run("--lora-scaled", halves, path=path)[1] == one[1]
    twice = run("--lora", str(lora), "--lora-scaled", f"{lora}:0", path=path)
    assert twice[1] == one[1]


def test_bench_measures_with_an_adapter(tiny, lora):
    line = (
        f"bench -m {tiny('llama-gqa')} -p 16 -n 0 -r 1 --no-warmup --kv-method snapkv --full none"
    )
    done = typed(line, "--full", "none", "-o", "json", "--lora-scaled", f"{lora}:0.5")
    assert done.exit_code == 0, done.output
    assert "no LoRA adapter" in refused(typed(line, "--lora", str(tiny("llama-gqa"))))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--lora", "missing.gguf"], "No such file"),
        (["--lora-scaled", "a.gguf"], "FILE:SCALE"),
        (["--lora-scaled", "a.gguf:much"], "FILE:SCALE"),
        (["--lora-scaled", "a.gguf:nan"], "FILE:SCALE"),
    ],
)
def test_what_the_command_line_refuses(tiny, words, says):
    code, _, error = run(*words, path=tiny("llama-gqa"))
    assert code == 2 and says in error and len(error.splitlines()) == 1


def test_a_pack_is_opened_with_the_adapters_and_overrides_it_was_made_with(tiny, tmp_path, lora):
    model, pack = str(tiny("llama-gqa")), str(tmp_path / "pack")
    (tmp_path / "doc.txt").write_text("the rain in the air is an art " * 20)
    usual = ["-m", model, "-c", "1024", "--lora-scaled", f"{lora}:1"]
    usual += ["--override-kv", "llama.context_length=int:512"]
    made = typed("pack", *usual, str(tmp_path / "doc.txt"), "-o", pack)
    assert made.exit_code == 0, made.stderr
    assert typed("run -n 1", *usual, "--pack", pack, "who?").exit_code == 0
    assert "another LoRA" in refused(typed("run", *usual, "--lora", str(lora), "--pack", pack, "x"))
