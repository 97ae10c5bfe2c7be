"""Attention over a prompt in pairs of bf16 or int16, where weights are quantised. On processors
without such instructions both sides are f32.
"""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from edgekv_lab.bench import synthetic
from tests.engine import load, logits
from tests.lib import nmse
from tests.test_products import SMALL, TOKENS

SHAPE = replace(synthetic.SHAPES["llama-1b"], **SMALL)
CPUINFO = Path("/proc/cpuinfo")
FLAGS = set(CPUINFO.read_text().split()) if sys.platform == "linux" else set()
ROUNDS = "avx512_bf16" in FLAGS or ("avx2" in FLAGS and "avx512f" not in FLAGS)


@pytest.fixture
def read_twice(tmp_path, monkeypatch):
    """Logits by pairs, and by f32, of a model whose weights have a type."""

    def read(weights, **options):
        path = tmp_path / "m.gguf"
        synthetic.write(path, SHAPE, weights)
        both = []
        for switch in ("", "f32"):
            monkeypatch.setenv("EDGEKV_ATTEND", switch)
            llm = load(path, **options)
            llm.eval(TOKENS)
            both.append(logits(llm))
        return both

    return read


@pytest.mark.parametrize("method", ["snapkv", "h2o"])
@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_quantised_weights_bring_pairs(read_twice, kind, method):
    pairs, f32 = read_twice("q8_0", kind=kind, kv_budget=50, kv_method=method)
    assert nmse(pairs, f32) < 1e-3
    assert (pairs != f32).any() == ROUNDS


@pytest.mark.parametrize(
    ("weights", "options"), [("f16", dict(kv_budget=50)), ("q8_0", dict(kv_ratio=1.0))]
)
def test_exact_weights_and_ratio_1_stay_f32(read_twice, weights, options):
    pairs, f32 = read_twice(weights, **options)
    assert (pairs == f32).all()
