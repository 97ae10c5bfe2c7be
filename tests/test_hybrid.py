"""Conversations of a hybrid model: what a later turn reads, and that going back and failing leave
what a fresh reading would.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgekv import native
from edgekv.errors import EdgeKVError
from tests import archs
from tests.engine import feed, load, logits
from tests.lib import nmse

N_PROMPT, N_ANSWER, N_TURN = 130, 6, 20
ALL = 100_000


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return archs.write(tmp_path_factory.mktemp("archs"), "^qwen35$") / "qwen35-dense.gguf"


def opened(model: Path, **options: Any) -> Any:
    return load(model, **{"kv_budget": ALL, "n_ctx": 1024, "n_ubatch": 64, **options})


def some(n: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(6, 128, n).tolist()


def answer(llm: Any, prompt: list[int], n: int = N_ANSWER) -> list[int]:
    return list(islice(llm.generate(prompt, temp=0), n))


def fresh(model: Path, tokens: list[int]) -> np.ndarray:
    llm = opened(model)
    llm.eval(tokens)
    found = logits(llm)
    llm.close()
    return found


WAYS = pytest.mark.parametrize("way", [{}, {"kv_budget": None, "kv_fast_prefill": True}])


@WAYS
def test_a_later_turn_reads_what_is_new(model, way):
    llm, prompt = opened(model, **way), some(N_PROMPT, 1)
    said = answer(llm, prompt)
    n_before = llm.n_evaluated
    turn = [*prompt, *said, *some(N_TURN, 2)]
    answer(llm, turn, 1)
    assert llm.n_evaluated - n_before <= N_TURN + 1  # the answer's last token was not evaluated
    assert nmse(logits(llm), fresh(model, turn)) < 1e-6


@WAYS
def test_an_answer_is_written_again_without_reading_the_prompt_again(model, way):
    llm, prompt = opened(model, **way), some(N_PROMPT, 1)
    turn = [*prompt, *answer(llm, prompt), *some(N_TURN, 2)]
    first = answer(llm, turn)
    n_before = llm.n_evaluated
    assert answer(llm, turn) == first
    assert llm.n_evaluated - n_before <= N_TURN + N_ANSWER + 1


def test_a_turn_that_was_edited_is_read_from_its_beginning(model):
    llm, prompt = opened(model), some(N_PROMPT, 1)
    said = answer(llm, prompt)
    answer(llm, [*prompt, *said, *some(N_TURN, 2)])
    edited = [*prompt, *said, *some(N_TURN, 3)]
    n_before = llm.n_evaluated
    answer(llm, edited, 1)
    assert llm.n_evaluated - n_before <= N_TURN + N_ANSWER + 1
    assert nmse(logits(llm), fresh(model, edited)) < 1e-6


def test_a_history_that_was_rewritten_is_read_anew(model):
    llm, prompt = opened(model), some(N_PROMPT, 1)
    answer(llm, [*prompt, *answer(llm, prompt), *some(N_TURN, 2)])
    other = [*prompt[:50], *some(80, 4)]
    answer(llm, other, 1)
    assert nmse(logits(llm), fresh(model, other)) < 1e-6


def test_a_step_that_fails_leaves_a_conversation_or_none(model):
    llm, prompt = opened(model, n_ctx=256), some(200, 1)
    llm.eval(prompt)
    llm.eval(some(50, 2))
    with pytest.raises(EdgeKVError, match="256"):  # it does not fit: nothing was computed
        llm.eval(some(30, 3))
    more = some(2, 5)
    expected = opened(model, n_ctx=256)
    expected.eval(prompt)
    expected.eval(some(50, 2))
    assert nmse(feed(llm, more), feed(expected, more)) < 1e-9


@pytest.mark.slow
def test_a_models_heads_are_those_of_its_store(tmp_path):
    for path in sorted(archs.write(tmp_path, "h1|nemotron_h|jamba|lfm2|granitehybrid").glob("*")):
        llm = load(path, kv_budget=ALL, n_ctx=256)
        heads = [layer.n_head_kv for layer in llm.engine.store.layers]
        assert native.model_heads(llm._model.model) == heads, path.stem
        llm.close()


@pytest.mark.parametrize(("n", "outcome"), [(3, "as before"), (1, "lost")])
def test_a_step_that_stops_half_way_says_what_it_left(model, n, outcome):
    """A turn begins with a mark, which is put back; a token of an answer has none."""
    from edgekv.native import llama_cpp

    llm, prompt = opened(model), some(N_PROMPT, 1)
    llm.eval(prompt)
    stop = llama_cpp.ggml_abort_callback(lambda data: True)
    llama_cpp.llama_set_abort_callback(llm.ctx, stop, None)
    with pytest.raises(EdgeKVError, match=f"stopped; the conversation is {outcome}"):
        llm.eval(some(n, 2))
    llama_cpp.llama_set_abort_callback(llm.ctx, llama_cpp.ggml_abort_callback(), None)
    assert llm.n_tokens == (N_PROMPT if outcome == "as before" else 0)
    llm.eval([*prompt[llm.n_tokens :], *some(5, 3)])
    assert nmse(logits(llm), fresh(model, [*prompt, *some(5, 3)])) < 1e-6


def test_what_the_state_takes_is_said(model):
    llm = opened(model)
    llm.eval(some(N_PROMPT, 1))
    stats = llm.kv_stats()
    assert stats.n_bytes_recurrent > 0 and stats.mode == "layers"
    assert any(layer.n_head_kv == 0 for layer in llm.engine.store.layers)
    assert (stats.kept.sum(axis=1) == 0).any(), "a layer without attention keeps nothing"
