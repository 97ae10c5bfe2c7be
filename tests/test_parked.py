"""A conversation out of its context: its rows stay where they are, and it goes on as it was."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from edgekv import BadInput, native
from edgekv.conversation import parked
from tests import archs, mla
from tests.engine import feed, load, logits, positions

N_PROMPT = 300
MODELS = ("llama-gqa", "gemma3", "refact")


@pytest.fixture(params=[*MODELS, "latent"])
def make(request, tiny, tmp_path):
    if request.param == "latent":
        path = mla.write(tmp_path / "latent.gguf", "deepseek2", 4, 64, 32)
    else:
        path = tiny(request.param)
    return lambda: load(path, kv_ratio=0.3, kv_tail=64)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    path = archs.write(tmp_path_factory.mktemp("archs"), "^qwen35$") / "qwen35-dense.gguf"
    return lambda: load(path, kv_ratio=0.5, n_ctx=1024, n_ubatch=64)


def some(n: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(6, 128, n).tolist()


def rows(llm: Any) -> list[Any]:
    """Positions and bytes of each row of each head, and what the store knows besides."""
    store = llm.engine.store
    bytes_ = [
        [store.row_bytes(il, k) for k in range(info.n_head_kv)]
        for il, info in enumerate(store.layers)
    ]
    places = [[head.tolist() for head in heads] for heads in positions(llm)]
    info = store.memory()
    return [places, bytes_, info.n_past, info.boundary, info.n_mark]


def alternate(make: Any, tokens: Any, n_turns: int = 4) -> None:
    """Two conversations on one model in turns, and each on a model of its own."""
    llm, alone, waiting = make(), [make(), make()], [None, None]
    for turn in range(n_turns):
        for i in range(2):
            if waiting[i] is not None:
                assert waiting[i].put(llm)
            for model in (llm, alone[i]):
                model.eval(tokens(N_PROMPT if turn == 0 else 20, 10 * i + turn))
                feed(model, tokens(20, 5))
            assert np.array_equal(logits(llm), logits(alone[i]))
            assert rows(llm) == rows(alone[i])
            waiting[i] = parked.park(llm)
            assert llm.n_tokens == 0 and llm.kv_stats().n_seen == 0


def test_conversations_that_change_places_go_on_bit_for_bit(make):
    alternate(make, some)


def test_so_do_those_of_a_hybrid(hybrid):
    alternate(hybrid, some)


def test_a_hybrid_can_still_go_back_to_where_its_turn_began(hybrid):
    llm, other = hybrid(), hybrid()
    for model in (llm, other):
        model.eval(some(130, 1))
        model.eval(some(20, 2))
    n_mark = llm.engine.store.memory().n_mark
    assert n_mark == 130
    waits = parked.park(llm)
    llm.eval(some(100, 3))
    llm.reset()
    assert waits.put(llm)
    for model in (llm, other):
        assert model._ctx.kv_cache_seq_rm(-1, n_mark, -1)
        model.n_tokens = n_mark
    assert np.array_equal(feed(llm, some(9, 4)), feed(other, some(9, 4)))


def test_what_waits_takes_what_its_rows_take(make):
    llm = make()
    llm.eval(some(N_PROMPT, 0))
    stats = llm.kv_stats()
    waits = parked.park(llm)
    extra = 4 * int(stats.kept.sum()) + waits.past.n_bytes
    assert stats.n_bytes <= waits.n_bytes <= stats.n_bytes + extra
    assert llm.kv_stats().n_bytes < stats.n_bytes / 2


def test_a_copy_for_a_file_leaves_both_conversations_as_they_are(make):
    llm, other = make(), make()
    for model in (llm, other):
        model.eval(some(N_PROMPT, 0))
    waits = parked.park(llm)
    llm.eval(some(100, 5))
    before = rows(llm)
    state = waits.state(llm)
    assert rows(llm) == before and llm.n_tokens == 100
    llm.eval(some(5, 6))
    assert parked.state.put(other, state)
    llm.reset()
    assert waits.put(llm) and rows(llm)[:2] == rows(other)[:2]


def test_a_place_of_another_context_is_refused(make):
    llm, other = make(), make()
    llm.eval(some(N_PROMPT, 0))
    before = rows(llm)
    place = native.Place(other._ctx.ctx)
    with pytest.raises(BadInput, match="another context"):
        place.swap(llm._ctx.ctx)
    assert rows(llm) == before
    other.close()
    assert place.n_bytes > 0
    del place
    gc.collect()


def test_nothing_changes_places_while_a_prompt_is_read(make):
    llm = make()
    llm.eval(some(N_PROMPT, 0))
    before, place = rows(llm), native.Place(llm._ctx.ctx)
    with llm.engine.layers(some(100, 1), [], stays=False) as layers:
        with pytest.raises(BadInput, match="being read"):
            place.swap(llm._ctx.ctx)
        with pytest.raises(BadInput, match="being read"):
            native.Place(llm._ctx.ctx)
        for p in layers:
            p.keep([np.arange(5, dtype=np.int32)] * llm.engine.store.layers[p.il].n_head_kv)
    assert rows(llm) == before


def test_a_context_without_a_store_has_no_places(tiny):
    with pytest.raises(Exception, match="llama.cpp's own cache"):
        native.Place(load(tiny("llama-gqa"))._ctx.ctx)
