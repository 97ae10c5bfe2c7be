"""choose: auto takes the model's profile where there is one, and says what is missing where one is needed."""

from __future__ import annotations

import pytest

from edgekv.choose import WITH_PROFILE, WITHOUT_PROFILE, choose
from edgekv.errors import BadInput


def test_auto_uses_the_shipped_profile_of_the_demo_model(demo_model):
    assert choose("auto", str(demo_model)).name == WITH_PROFILE
    assert choose("auto", str(demo_model), "none").name == WITHOUT_PROFILE
    assert choose("score=random,budget=profile", str(demo_model)).budget.name == "profile"


def test_without_a_profile_auto_takes_the_best_method_that_needs_none(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert choose("auto", str(tiny("llama-gqa"))).name == WITHOUT_PROFILE


def test_a_mix_that_needs_a_profile_says_so(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(BadInput, match="edgekv profile probe"):
        choose("score=random,budget=profile", str(tiny("llama-gqa")))


def test_heads_keep_different_numbers_of_rows_and_the_sum_is_that_of_the_ratio(demo_model):
    from edgekv import Llama

    llm = Llama(str(demo_model), n_ctx=1024, kv_ratio=0.3, kv_method="auto", verbose=False)
    llm.eval(llm.tokenize(b"A line of text that is read again and again. " * 70)[:700])
    kept = llm.kv_stats().kept
    assert kept.max() > 4 * kept.min() and kept.sum() <= 0.3 * 700 * kept.size
