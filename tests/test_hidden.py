"""Where a prompt's hidden states wait if nobody says it: the choice by numbers, the engine that
obeys it, and what it tells.
"""

from __future__ import annotations

import re

import gguf
import numpy as np
import pytest

from edgekv import methods, native
from edgekv.commands.report import stats_table
from edgekv.engine.observer import QueryObserver
from edgekv.memory.footprint import Surroundings, extent, f16_full_bytes, prompt_bytes, row_bytes
from edgekv.memory.hidden import AUTO, DEVICE, EXACT, SPARE, WAYS, choose, planned, where_offloaded
from edgekv.native import LayerInfo
from tests import models
from tests.engine import load, positions, read

N = 32768
Q8_0 = gguf.GGMLQuantizationType.Q8_0
KINDS = {"f16": gguf.GGMLQuantizationType.F16, "q8_0": Q8_0}


def layer(n_head: int, n_head_kv: int, d: int, kind: str, n_swa: int = 0) -> LayerInfo:
    number = int(KINDS[kind])
    return LayerInfo(n_head, n_head_kv, d, d, number, number, n_swa, 2 * row_bytes(number, d))


def recurrent() -> LayerInfo:
    return LayerInfo(0, 0, 0, 0, 1, 1, 0, 0)


def llama_8b(kind: str) -> list[LayerInfo]:
    return [layer(32, 8, 128, kind)] * 32


def qwen35_4b(kind: str) -> list[LayerInfo]:
    """One of four layers attends."""
    return ([recurrent()] * 3 + [layer(16, 4, 256, kind)]) * 8


def gemma4_12b(kind: str) -> list[LayerInfo]:
    """One of six layers sees everything, the others a window."""
    return ([layer(16, 8, 256, kind, n_swa=1024)] * 5 + [layer(16, 1, 512, kind)]) * 8


def falcon_7b(kind: str) -> list[LayerInfo]:
    """One KV head for all query heads."""
    return [layer(71, 1, 64, kind)] * 32


def ways(layers: list[LayerInfo], n_embd: int, ratio: float, kind: str, **more):
    """Peaks of all ways over the full f16 cache's bytes, and the choice."""
    what = extent(methods.get("snapkv"), N, 32, 512)
    stored = sum(x.bytes_row for x in layers if x.selects)
    n_rows = int(ratio * N * sum(2 * (x.d_k + x.d_v) for x in layers if x.selects) / stored)
    around = Surroundings(n_embd, 512, even=True, **more)
    full = f16_full_bytes(layers, N)
    peaks = {way: prompt_bytes(layers, what, n_rows, around, way).peak / full for way in WAYS}
    return peaks, planned(AUTO, layers, what, n_rows, around, N).way


@pytest.mark.parametrize(
    ("shape", "n_embd", "ratio", "kind", "way"),
    [
        (llama_8b, 4096, 0.2, "f16", "f32"),
        (llama_8b, 4096, 0.2, "q8_0", "f32"),
        (llama_8b, 4096, 0.5, "f16", "f32"),  # f16 saves 6 % of the full cache
        (qwen35_4b, 2560, 0.5, "q8_0", "whole"),
        (qwen35_4b, 2560, 0.2, "f16", "f16"),
        (qwen35_4b, 2560, 0.2, "q8_0", "f16"),
        (qwen35_4b, 2560, 0.1, "q8_0", "f32"),  # below half of the full cache
        (gemma4_12b, 3840, 0.2, "q8_0", "f16"),
        (falcon_7b, 4544, 0.2, "f16", "whole"),
        (falcon_7b, 4544, 0.2, "q8_0", "whole"),
    ],
)
def test_the_way_is_chosen_by_its_peak(shape, n_embd, ratio, kind, way):
    peaks, chosen = ways(shape(kind), n_embd, ratio, kind)
    assert chosen == way, peaks


def test_what_a_device_holds_is_not_lessened_by_states_in_main_memory():
    peaks, chosen = ways(qwen35_4b("f16"), 2560, 0.2, "f16", on_gpu=True)
    assert chosen == "f32" and peaks["f16"] == peaks["f32"] < peaks["whole"]


@pytest.mark.parametrize(
    ("peaks", "way"),
    [
        ((50, 30, 30), "f32"),  # small enough
        ((60, 51, 51), "f32"),  # not worth it
        ((60, 49, 30), "whole"),  # exact, and small enough
        ((80, 60, 49), "f16"),
        ((80, 60, 51), "whole"),
        ((80, 90, 60), "f16"),
        ((200, 120, 150), "whole"),
    ],
)
def test_what_is_exact_goes_first(peaks, way):
    assert choose(dict(zip(("f32", "whole", "f16"), peaks, strict=True)), 100) == way


def test_nothing_changes_where_everything_is_kept(tiny, text):
    llm = load(tiny("qwen2"), kv_budget=1500, kv_hidden="auto")
    got = read(llm, text(1300), text(8, seed=1))
    exact = load(tiny("qwen2"), kv_budget=1500, kv_hidden="f32")
    assert np.array_equal(got, read(exact, text(1300), text(8, seed=1)))
    assert llm.kv_stats().hidden == "f32"


# ---- the engine


@pytest.mark.parametrize(("name", "way"), [("llama-gqa", "f16"), ("qwen2", "whole")])
def test_a_prompt_is_read_as_chosen(tiny, text, nmse, name, way):
    found = {}
    for hidden in ("auto", way, "f32"):
        # whose rows no rounding changes
        llm = load(tiny(name), kv_ratio=0.3, kv_hidden=hidden, kv_method="streaming")
        found[hidden] = read(llm, text(1300), text(8, seed=1)), llm.kv_stats(), positions(llm)
    (auto, stats, rows), (named, _, named_rows), (exact, other, _) = found.values()
    assert np.array_equal(auto, named) and str(rows) == str(named_rows)
    assert stats.hidden == way and other.hidden == "f32"
    assert stats.mode == ("full then compress" if way == "whole" else "layers")
    assert stats.n_bytes_peak < other.n_bytes_peak - 0.1 * stats.n_bytes_full
    assert np.array_equal(auto, exact) if way == "whole" else nmse(auto, exact) < 1e-4


def test_a_model_of_many_layers_has_its_states_in_f32(tmp_path, text, monkeypatch):
    monkeypatch.setitem(
        models.SHAPES, "deep", models.replace(models.SHAPES["llama-gqa"], n_layer=16)
    )
    llm = load(models.write("deep", tmp_path), kv_ratio=0.2, kv_hidden="auto", after=text(1300))
    stats = llm.kv_stats()
    assert (stats.hidden, stats.mode, stats.note) == ("f32", "layers", "")


@pytest.mark.parametrize("hidden", ["f32", "f16", "disk", "whole"])
def test_what_the_user_names_is_used(tiny, text, hidden):
    llm = load(tiny("qwen2"), kv_ratio=0.3, kv_hidden=hidden)
    assert llm.kv_stats().hidden == ""
    llm.eval(list(text(1300)))
    assert llm.kv_stats().hidden == hidden


def test_stats_for_people_say_how_the_prompt_was_read(tiny, text):
    for hidden, says in (
        ("f32", "(layer by layer)"),
        ("f16", "(layer by layer, hidden states: f16)"),
        ("whole", "(in full, then compressed)"),
    ):
        llm = load(tiny("qwen2"), kv_ratio=0.3, kv_hidden=hidden, after=text(1300))
        assert says in stats_table(llm.kv_stats())


def test_a_device_that_is_not_there_is_not_reported(tiny, text):
    llm = load(tiny("qwen2"), kv_ratio=0.3, kv_hidden="device", after=text(300))
    assert llm.kv_stats().hidden == "f32"


def test_the_prediction_is_that_of_the_way_that_is_taken(tiny, text):
    for name in ("llama-gqa", "qwen2", "gemma3"):
        llm, tokens = load(tiny(name), kv_ratio=0.3, kv_hidden="auto"), list(text(1300))
        need = llm.engine.prompt_bytes(
            QueryObserver(llm.settings, tokens, None), llm.engine.plan(len(tokens))
        )
        llm.eval(tokens)
        stats = llm.kv_stats()
        assert need.way == stats.hidden
        assert stats.n_bytes_peak <= need.peak <= 1.05 * stats.n_bytes_peak


def test_a_peak_above_the_full_cache_is_told_in_one_line(tiny, text):
    llm = load(tiny("qwen2"), kv_ratio=0.3, kv_hidden="f32", after=text(1300))
    stats = llm.kv_stats()
    assert stats.n_bytes_peak > stats.n_bytes_full
    assert "full f16 cache" in stats.peak_note and "--kv-hidden disk" in stats.peak_note
    assert "\n" not in stats.peak_note and stats.mode == "layers" and stats.note == ""
    told = rf"at its peak +\d[\d.]+ MiB; {re.escape(stats.peak_note)}\n"
    assert re.search(told, stats_table(stats))
    llm.reset()
    assert llm.kv_stats().peak_note == ""
    small = load(tiny("llama-gqa"), kv_ratio=0.3, kv_hidden="auto", after=text(1300))
    assert small.kv_stats().n_bytes_peak < small.kv_stats().n_bytes_full
    assert small.kv_stats().peak_note == ""


def test_a_short_prompt_is_no_matter(tiny, text):
    llm = load(tiny("qwen2"), kv_ratio=0.3, kv_hidden="f32", kv_min_tokens=128, after=text(100))
    assert llm.kv_stats().peak_note == ""


def test_a_tail_that_is_compressed_says_nothing_of_the_prompt(tiny, text):
    llm = load(tiny("qwen2"), kv_ratio=0.3, kv_hidden="auto", kv_tail=48, after=text(1300))
    for token in text(64, seed=1):
        llm.eval([token])
    assert llm.engine.store.memory().boundary > 1300, "the tail was compressed"
    assert llm.kv_stats().hidden == "whole" and llm.kv_stats().mode == "full then compress"


def test_a_graph_that_cannot_be_cut_is_planned_as_it_is_read(tiny, text, monkeypatch):
    """EDGEKV_WHOLE=1: as a graph without cuts."""
    monkeypatch.setenv("EDGEKV_WHOLE", "1")
    llm = load(tiny("llama-gqa"), kv_ratio=0.3, kv_hidden="f32", after=text(300))
    stats = llm.kv_stats()
    assert stats.hidden == "whole" and "cannot be cut" in stats.note
    tokens = list(text(1300))
    need = llm.engine.prompt_bytes(
        QueryObserver(llm.settings, tokens, None), llm.engine.plan(len(tokens))
    )
    assert need.way == "whole"


def test_on_a_gpu_they_wait_where_there_is_room():
    what = extent(methods.get("snapkv"), N, 32, 512)
    need = planned(
        DEVICE,
        llama_8b("f16"),
        what,
        N // 5,
        Surroundings(4096, 512, on_gpu=True, old_bytes=1000),
        N,
    )
    assert need.waits_there and need.hidden == 4 * 4096 * N
    enough = need.peak - 1000 + SPARE  # what old entries take is taken already
    assert (where_offloaded(need, enough), where_offloaded(need, enough - 1)) == (DEVICE, EXACT)


@pytest.mark.parametrize("free", [2**40, 0])
def test_the_engine_asks_the_device_before_each_prompt(tiny, text, free, monkeypatch):
    llm = load(tiny("llama-gqa"), kv_ratio=0.3, kv_hidden="auto")
    llm.engine.offloaded = True
    monkeypatch.setattr(native, "device_free", lambda ctx: free)
    llm.eval(list(text(600)))
    assert llm.kv_stats().hidden == (DEVICE if free else EXACT)
