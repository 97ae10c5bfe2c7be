"""What the process really takes while a prompt is read, against what is reported."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import pytest

from edgekv import native
from edgekv.engine.observer import QueryObserver
from edgekv.methods import get
from edgekv_lab.bench import synthetic
from edgekv_lab.process import call
from tests import mla
from tests.engine import load

MIB = 2**20
STARTED = 6 * MIB
"""Graphs, numbers of tokens and what the interpreter takes."""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("score", ["late", "keydiff"])
def test_a_summary_of_wide_heads_takes_what_is_reported(tmp_path, score):
    """Heads of 512 values: what a summary works with is as large as the cache."""
    shape = replace(
        synthetic.SHAPES["gemma4-1b"], n_layer=4, every=2, n_embd=512, n_ff=512, n_vocab=2000
    )
    synthetic.write(tmp_path / "model.gguf", shape, "q4_0")
    request = {
        "model": str(tmp_path / "model.gguf"),
        "method": f"score={score},budget=uniform,merge=summary,rows=64",
        "tokens": 3000,
        "threads": 2,
    }
    environment = {k: v for k, v in os.environ.items() if k != "MALLOC_MMAP_THRESHOLD_"}
    environment["XDG_CACHE_HOME"] = str(tmp_path)
    got = call("edgekv_lab.sides.hybrids:memory", request, environment=environment)
    assert got["measured"] <= 1.1 * got["reported"] + STARTED
    assert got["reported"] <= 1.1 * got["measured"] + STARTED


@pytest.mark.parametrize("name", ["gemma3", "llama-gqa"])
def test_what_a_summary_works_with_is_planned_and_reported(tiny, text, name):
    llm = load(tiny(name), kv_ratio=0.2, kv_method="score=keydiff,merge=summary")
    kv, tokens = llm.engine, list(text(1300))
    need = kv.prompt_bytes(QueryObserver(llm.settings, tokens, kv.tokenize), kv.plan(len(tokens)))
    assert need.merge > 0
    llm.eval(tokens)
    counted = kv.store.memory().bytes_peak + need.merge
    assert llm.kv_stats().n_bytes_peak == counted <= need.peak <= 1.02 * counted + 64 * 1024
    llm.reset()
    llm.eval(tokens[:20])
    assert llm.kv_stats().n_bytes_peak < need.merge, "a new conversation"


def test_queries_that_nobody_looks_at_take_no_memory(tmp_path, text):
    """Those of a latent model before RoPE: it has no summary."""
    peaks = []
    for method in ("score=snapkv,budget=uniform", "score=snapkv,budget=uniform,merge=summary"):
        llm = load(mla.write(tmp_path / "m.gguf"), kv_ratio=0.2, kv_method=method)
        llm.eval(list(text(600)))
        peaks.append(llm.kv_stats().n_bytes_peak)
    assert peaks[1] == pytest.approx(peaks[0], rel=0.01)


def test_late_reads_values_alone(tiny, text, monkeypatch):
    asked = []
    rows, some = native.Prefill.rows, native.Prefill.some_rows
    monkeypatch.setattr(native.Prefill, "rows", lambda *a: asked.append("kv") or rows(*a))
    monkeypatch.setattr(native.Prefill, "some_rows", lambda *a: asked.append(a[3]) or some(*a))
    llm = load(tiny("llama-gqa"), kv_ratio=0.2, kv_method="score=late,budget=uniform")
    llm.eval(list(text(1300)))
    assert get("score=late").score.name == "late" and set(asked) == {"v"}
