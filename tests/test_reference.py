"""The torch reference computes what the unpatched library computes, and the tiny models are worth
testing with.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests import lib, models
from tests.reference.cache import hadamard
from tests.reference.model import Reference

GGML_TYPES = {"f16": 1, "q4_0": 2, "q8_0": 8}
MAX_NMSE = {"f16": 1e-5, "q8_0": 1e-3, "q4_0": 1e-3}
N_PROMPT, N_DECODE = 300, 16


@pytest.fixture(scope="module")
def stock_logits(stock_lib, tiny, text) -> dict[tuple[str, str], np.ndarray]:
    """Logits of the unpatched library for every architecture and cache type: one process for
    all.
    """
    pairs = [(name, kind) for name in models.ARCHITECTURES for kind in GGML_TYPES]
    jobs = [
        lib.Job(
            str(tiny(name)),
            text(N_PROMPT),
            text(N_DECODE, seed=1),
            all_logits=True,
            n_ctx=512,
            type_k=GGML_TYPES[kind],
            type_v=GGML_TYPES[kind],
        )
        for name, kind in pairs
    ]
    return dict(zip(pairs, lib.run(stock_lib, jobs), strict=True))


@pytest.mark.parametrize("kind", GGML_TYPES)
@pytest.mark.parametrize("name", models.ARCHITECTURES)
def test_logits_agree_with_the_unpatched_library(stock_logits, tiny, text, nmse, name, kind):
    reference = Reference(tiny(name), kind, kind, rounded_queries=True, whole_keys=True)
    prompt = reference.prefill(text(N_PROMPT)).logits.numpy()
    decoded = reference.decode(text(N_DECODE, seed=1)).numpy()
    stock = stock_logits[name, kind]
    assert nmse(prompt, stock[:N_PROMPT]) < MAX_NMSE[kind]
    assert nmse(decoded, stock[N_PROMPT:]) < MAX_NMSE[kind]


@pytest.mark.parametrize("name", models.ARCHITECTURES)
def test_tiny_models_are_not_degenerate(stock_logits, name):
    logits = stock_logits[name, "f16"]
    assert np.isfinite(logits).all()
    assert 1 < logits.std() < 10
    assert len(set(logits.argmax(1))) > 20  # the answer depends on the prompt


@pytest.mark.parametrize("name", models.ARCHITECTURES)
def test_attention_of_tiny_models_is_not_uniform(tiny, text, name):
    for layer in Reference(tiny(name)).prefill(text(N_PROMPT), observe=32).layers:
        assert layer.attention.amax(-1).mean() > 0.06  # uniform would be about 1/300


def test_one_wrong_row_of_one_head_shows_in_the_logits(tiny, text, nmse):
    """Else the engine's tests would assert nothing: the bound here is the one that they use."""
    full, evicted = (Reference(tiny("llama-gqa")) for _ in range(2))
    for reference in (full, evicted):
        reference.prefill(text(N_PROMPT))
    evicted.keep([[], [np.arange(N_PROMPT), np.arange(N_PROMPT - 1)], []])
    assert nmse(evicted.decode((7,)).numpy(), full.decode((7,)).numpy()) > 1e-5


def test_hadamard_is_its_own_inverse():
    for size in (64, 128):
        assert np.allclose(hadamard(size) @ hadamard(size), np.eye(size), atol=1e-6)
