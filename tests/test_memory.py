"""Bytes: what is reported is what is allocated, a ratio is never exceeded, and nothing grows in a
long conversation.
"""

from __future__ import annotations

import ctypes
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from tests import models
from tests.engine import load, n_kept, positions

N_PROMPT = 1200
APPEND_MAX = 64  # tokens that one call may append
SMALLEST_STEP = 256
"""Rows by which a tail may be allocated ahead of its use."""


def row_bytes(llm) -> list[int]:
    return [info.bytes_row for info in llm.engine.store.layers]


def used_bytes(llm) -> int:
    """Bytes of the rows that attention reads."""
    return int((llm.kv_stats().kept.sum(1) * row_bytes(llm)).sum())


def resident_bytes() -> int:
    """Resident size of this process once the heap has given back what it holds free (0 where there
    is no /proc).
    """
    if not Path("/proc/self/status").exists():
        return 0
    getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmRSS")
    )
    return int(line.split()[1]) * 1024


@pytest.mark.parametrize("method", ["random", "streaming", "snapkv", "pyramidkv"])
@pytest.mark.parametrize("ratio", [0.5, 0.2, 0.1])
@pytest.mark.parametrize("name", models.ARCHITECTURES)
def test_a_ratio_is_never_exceeded(tiny, text, name, ratio, method):
    llm = load(tiny(name), kv_method=method, kv_ratio=ratio, after=text(N_PROMPT))
    full = llm.engine.full_layers
    kept = llm.kv_stats().kept[full]
    assert kept.sum() == n_kept(ratio, N_PROMPT, alibi=name == "refact") * kept.size
    assert (kept == [[len(head) for head in positions(llm)[il]] for il in full]).all()
    assert llm.kv_stats().n_kept == pytest.approx(kept.mean())
    assert llm.kv_stats().n_seen == N_PROMPT


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("name", models.ARCHITECTURES)
def test_reported_bytes_hold_the_rows_and_little_more(tiny, text, name, kind):
    llm = load(tiny(name), kind, kv_ratio=0.2, after=text(N_PROMPT))
    used = used_bytes(llm)
    spare = sum(SMALLEST_STEP * info.bytes_row * info.n_head_kv for info in llm.engine.store.layers)
    assert used <= llm.kv_stats().n_bytes <= used + spare


@pytest.mark.parametrize(("hidden", "hidden_bytes"), [("f32", 4), ("f16", 2), ("disk", 0)])
def test_the_peak_is_the_kept_rows_one_layer_and_the_hidden_states(
    tiny, text, hidden, hidden_bytes
):
    llm = load(tiny("llama-gqa"), kv_ratio=0.2, kv_hidden=hidden, after=text(N_PROMPT))
    stats, shape, store = llm.kv_stats(), models.SHAPES["llama-gqa"], llm.engine.store
    one_layer = stats.n_bytes_full // shape.n_layer
    # tokens and positions; row numbers of a chunk, for each of three graphs
    inputs = 8 * N_PROMPT + 8 * 512 * 3 * shape.n_head_kv
    queries = 4 * 32 * shape.n_head * store.layers[0].d_k
    assert stats.n_bytes < stats.n_bytes_peak
    bound = 0.2 * stats.n_bytes_full + one_layer + hidden_bytes * shape.n_embd * N_PROMPT
    assert stats.n_bytes_peak <= bound + inputs + queries + 16384  # rotations, alignment


def test_budgets_in_tokens_in_bytes_and_as_a_table(tiny, text):
    shape = models.SHAPES["llama-gqa"]
    llm = load(tiny("llama-gqa"), kv_budget=150, after=text(N_PROMPT))
    assert (llm.kv_stats().kept == 150).all()

    megabytes = 0.5
    llm = load(tiny("llama-gqa"), kv_budget_mb=megabytes, after=text(N_PROMPT))
    assert 0.9 * megabytes * 2**20 < used_bytes(llm) <= megabytes * 2**20

    table = (
        np.arange(shape.n_layer * shape.n_head_kv, dtype=np.int32).reshape(
            shape.n_layer, shape.n_head_kv
        )
        * 40
        + 50
    )
    llm = load(tiny("llama-gqa"), kv_budget=table, after=text(N_PROMPT))
    assert (llm.kv_stats().kept == table).all()


def test_a_short_prompt_stays_whole(tiny, text):
    llm = load(tiny("llama-gqa"), kv_ratio=0.2, kv_min_tokens=128, after=text(100))
    assert (llm.kv_stats().kept == 100).all()


@pytest.mark.slow
def test_a_chat_of_200_turns_stays_within_its_bounds(tiny, text):
    llm = load(tiny("llama-32k"), kv_ratio=0.2, kv_tail=128, n_ctx=32768)
    rng = np.random.default_rng(0)
    for turn in range(200):
        llm.eval(list(text(int(rng.integers(5, 150)), seed=turn)))
        for token in text(int(rng.integers(1, 20)), seed=turn):
            llm.eval([token])
        check_bounds(llm, 0.2 * llm.n_tokens, tail=128)


@pytest.mark.slow
def test_20000_generated_tokens_stay_within_their_bounds(tiny, text):
    """In a process of its own: what a thousand earlier tests left behind in this one's heap is no
    concern of the engine's.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
        fresh.submit(
            generate, tiny("llama-32k"), list(text(500)), list(text(20_000, seed=1))
        ).result()


def generate(model: Path, prompt: list[int], tokens: list[int]) -> None:
    budget, tail = 200, 256
    llm = load(model, kv_budget=budget, kv_tail=tail, n_ctx=32768, after=prompt)
    n_bytes, resident = [], []
    for index, token in enumerate(tokens):
        llm.eval([token])
        if index % 1000 == 999:
            check_bounds(llm, budget, tail)
            n_bytes.append(llm.kv_stats().n_bytes)
            resident.append(resident_bytes())
    assert llm.kv_stats().n_seen == len(prompt) + len(tokens)
    assert max(n_bytes[10:]) <= max(n_bytes[:10])
    assert resident[-1] - resident[9] < 4 * 2**20  # the rows of 10,000 tokens would be 15 MiB


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's resident size")
def test_a_thousand_turns_leave_nothing_behind_but_what_is_reported(tiny):
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
        after_200, after_1000 = fresh.submit(converse, tiny("llama-32k"), (200, 1000)).result()
    assert after_1000 - after_200 < 5 * 2**20


def converse(model: Path, turns: tuple[int, ...]) -> list[int]:
    """Resident bytes after some turns of one chat, without those that the cache and its checkpoints
    report: a question of 15 tokens each, and a document of 400 every 50 turns.
    """
    llm, rng, found = load(model, kv_ratio=0.2, n_ctx=32768), np.random.default_rng(0), []
    for turn in range(1, turns[-1] + 1):
        question = rng.integers(models.N_SPECIAL, models.N_VOCAB, 15 if turn % 50 else 400)
        seen = llm.input_ids[: llm.n_tokens].tolist()
        llm.create_completion([*seen, *question.tolist()], max_tokens=4, temperature=0.0)
        assert llm.n_tokens > len(seen) + len(question) - 1
        if turn in turns:
            stats = llm.kv_stats()
            assert stats.n_kept < 0.3 * stats.n_seen
            found.append(resident_bytes() - stats.n_bytes - stats.n_bytes_checkpoints)
    return found


def check_bounds(llm, n_kept: float, tail: int) -> None:
    """Rows are n_kept and at most a tail; every row is there once; reported bytes hold them and
    little more.
    """
    stats, store = llm.kv_stats(), llm.engine.store
    assert stats.n_seen == llm.n_tokens
    assert stats.kept.max() <= n_kept + tail + APPEND_MAX
    for heads in positions(llm):
        for rows in heads:
            assert len(np.unique(rows)) == len(rows)
            assert rows.max() == stats.n_seen - 1
            assert rows.min() >= 0
    spare = sum(
        (2 * SMALLEST_STEP + tail) * info.bytes_row * info.n_head_kv for info in store.layers
    )
    assert used_bytes(llm) <= stats.n_bytes <= used_bytes(llm) + spare
