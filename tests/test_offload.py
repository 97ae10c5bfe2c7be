"""Layers on a device, by any backend the library was built with: the same rows and logits as on the
CPU.

Skipped where the library has no such backend. docs/architecture.md says how to run it on a software
device.
"""

from __future__ import annotations

import os

import numpy as np
import pytest

from tests.engine import MAX_NMSE, load, logits, positions, share

pytestmark = pytest.mark.gpu

KINDS = ("f16", "q8_0", "q4_0")
ALL, SOME = 99, 1
"""Layers that are offloaded: all of them, or the last one and the output."""


def limit(kind: str) -> float:
    """Of the logits' NMSE. CUDA multiplies f32 weights in TF32, of 10 bits: a guess."""
    return max(10 * MAX_NMSE[kind], 1e-3 if os.environ.get("EDGEKV_GPU") == "1" else 0)


@pytest.fixture(autouse=True)
def device(monkeypatch):
    """Skips where llama.cpp finds no device. Rows on a device are rounded at once, so those in main
    memory are too.
    """
    monkeypatch.setenv("EDGEKV_RECENT", "rounded")
    from edgekv import native

    if not native.llama_cpp.llama_supports_gpu_offload():
        pytest.skip("the library was built without a GPU backend")


def talk(path, text, kind, n_gpu_layers, **options):
    """Logits after every turn of a conversation in which prompts are compressed, the tail grows,
    and is compressed in turn.
    """
    llm = load(
        path,
        kind,
        n_batch=64,
        n_ubatch=64,
        kv_ratio=share(0.3, kind),
        kv_tail=128,
        n_gpu_layers=n_gpu_layers,
        **options,
    )
    rows = []
    for seed, n_tokens in enumerate((150, *[1] * 10, 40, 7, *[1] * 5, 100, 1, 12, 63, *[1] * 3)):
        llm.eval(list(text(n_tokens, seed=seed)))
        rows.append(logits(llm))
    return np.stack(rows), positions(llm)


@pytest.mark.parametrize("n_gpu_layers", [ALL, SOME])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama-gqa", "gemma3", "refact"])
def test_a_conversation_on_the_device_is_the_one_on_the_cpu(
    tiny, text, nmse, name, kind, n_gpu_layers
):
    expected, where = talk(tiny(name), text, kind, 0, kv_method="streaming")
    got, there = talk(tiny(name), text, kind, n_gpu_layers, kv_method="streaming")
    assert all(
        np.array_equal(a, b)
        for x, y in zip(where, there, strict=True)
        for a, b in zip(x, y, strict=True)
    )
    assert nmse(got, expected) < limit(kind)


@pytest.mark.parametrize("n_gpu_layers", [ALL, SOME])
@pytest.mark.parametrize("name", ["llama-gqa", "gemma3"])
def test_hidden_states_may_wait_on_the_device(tiny, text, nmse, name, n_gpu_layers):
    """With some of the layers there they wait in main memory all the same."""
    expected, _ = talk(tiny(name), text, "f16", 0, kv_method="streaming")
    got, _ = talk(tiny(name), text, "f16", n_gpu_layers, kv_method="streaming", kv_hidden="device")
    assert nmse(got, expected) < limit("f16")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama-mha", "qwen2", "phi3", "llama-d128", "refact"])
def test_heads_of_different_length(tiny, text, nmse, name, kind):
    """Rows are drawn at random, and pooled budgets leave every head another number of them, at
    another offset.
    """
    method = "score=random,budget=adakv"
    expected, where = talk(tiny(name), text, kind, 0, kv_method=method)
    got, there = talk(tiny(name), text, kind, ALL, kv_method=method)
    assert len({len(head) for layer in where for head in layer}) > 1
    assert all(
        np.array_equal(a, b)
        for x, y in zip(where, there, strict=True)
        for a, b in zip(x, y, strict=True)
    )
    assert nmse(got, expected) < limit(kind)


@pytest.mark.parametrize("method", ["snapkv", "h2o", "cake", "expected", "d2o"])
def test_scores_are_the_cpus(tiny, text, method):
    """Kept rows may differ where scores are nearly equal."""
    kept = []
    for n_gpu_layers in (0, ALL):
        llm = load(tiny("llama-gqa"), kv_ratio=0.3, kv_method=method, n_gpu_layers=n_gpu_layers)
        llm.eval(list(text(400)))
        kept.append([set(head.tolist()) for layer in positions(llm) for head in layer])
    differing = sum(len(a ^ b) for a, b in zip(*kept, strict=True))
    assert differing <= 0.02 * sum(map(len, kept[0]))
