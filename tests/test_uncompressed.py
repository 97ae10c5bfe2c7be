"""A model without a KV cache runs as in llama.cpp, and one line says so."""

from __future__ import annotations

import json

import numpy as np
import pytest

from edgekv import native
from tests import gemma4, recurrent
from tests.cli import typed as call
from tests.engine import load, logits


@pytest.fixture(scope="module")
def mamba(tmp_path_factory):
    return recurrent.write(tmp_path_factory.mktemp("mamba") / "mamba.gguf")


def run(mamba, *words: str):
    line = f"run -m {mamba} --raw -n 2 -c 1024 -t 1 --kv-ratio 0.2"
    return call(line, "-p", "a " * 300, *words)


def test_it_answers_as_without_compression(mamba, text):
    plain, asked = load(mamba), load(mamba, kv_ratio=0.2)
    for llm in (plain, asked):
        llm.eval(list(text(700)))
    assert np.array_equal(logits(plain), logits(asked))
    assert "uncompressed" in asked.kv_stats().note and asked.kv_stats().n_seen == 700


def test_auto_makes_no_profile_for_it(mamba, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = run(mamba, "--json")
    assert done.exit_code == 0
    assert "first use" not in done.stderr
    assert not list(tmp_path.rglob("*.gguf"))
    assert json.loads(done.stdout)["prompt_n"] > 300


def test_people_are_told_once(mamba):
    done = run(mamba)
    assert done.exit_code == 0 and done.stderr.count("recurrent layers hold no KV cache") == 1


def test_info_says_why(mamba):
    shape = json.loads(call(f"info -m {mamba} --json").stdout)["model"]
    assert shape["mode"] == "uncompressed" and "recurrent" in shape["note"]


def test_a_chat_says_what_it_holds(mamba):
    done = call(f"chat -m {mamba} -c 512 -n 2 -t 1", stdin="aa\n/stats\n")
    assert done.exit_code == 0 and "tokens kept" in done.stderr


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_heads_of_two_sizes_take_what_llama_cpp_allocates(tmp_path, kind):
    llm = load(gemma4.write(tmp_path / "gemma4.gguf"), kind, n_ctx=512)
    llm.eval(list(range(6, 70)))
    stats = llm.kv_stats()
    n_values = 2 * (4 * 2 * gemma4.D_WINDOW + 2 * gemma4.D_FULL)  # K and V of a token
    assert stats.n_bytes_full == 2 * n_values * 64
    assert stats.n_bytes == native.context_bytes(llm.ctx)[0] == 8 * stats.n_bytes_used
