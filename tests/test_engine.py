"""The engine against the unpatched library (nothing compressed) and against the torch reference
(the same rows kept).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from edgekv.base.stats import STAGES
from tests import lib, models
from tests.engine import MAX_NMSE, TYPES, evict_likewise, feed, job, load, logits, positions, read
from tests.reference.cache import QUANTISED, turned_back
from tests.reference.model import ALIBI, Reference
from tests.reference.scores import columns, keep_best, snapkv

N_PROMPT, N_DECODE = 700, 64
KINDS = ("f16", "q8_0", "q4_0")
LIMIT_NODE = 2e-9  # sums in another order; 1.3e-9 with AVX2 alone
LIMIT_STAT = 1e-7


@pytest.fixture(scope="module")
def stock(stock_lib, tiny, text):
    """Logits of the unpatched library for every architecture and cache type: after the prompt and
    after 64 tokens.
    """
    pairs = [(name, kind) for name in models.ARCHITECTURES for kind in KINDS]
    jobs = [job(tiny(name), kind, text(N_PROMPT), text(N_DECODE, seed=1)) for name, kind in pairs]
    return dict(zip(pairs, lib.run(stock_lib, jobs), strict=True))


# ---- nothing compressed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", models.ARCHITECTURES)
def test_ratio_1_is_bit_identical_to_the_unpatched_library(stock, tiny, text, name, kind):
    got = read(load(tiny(name), kind), text(N_PROMPT), text(N_DECODE, seed=1))
    assert np.array_equal(got, stock[name, kind])


@pytest.mark.parametrize("name", models.ARCHITECTURES)
def test_method_full_is_bit_identical_whatever_the_ratio(stock, tiny, text, name):
    got = read(
        load(tiny(name), kv_method="full", kv_ratio=0.2), text(N_PROMPT), text(N_DECODE, seed=1)
    )
    assert np.array_equal(got, stock[name, "f16"])


@pytest.mark.parametrize("options", [{"kv_budget": 10 * N_PROMPT}, {"kv_fast_prefill": True}])
@pytest.mark.parametrize("name", models.ARCHITECTURES)
def test_a_store_that_keeps_every_row_agrees_with_the_unpatched_library(
    stock, tiny, text, nmse, name, options
):
    llm = load(tiny(name), **options)
    assert llm.kv_stats().mode == "layers"
    got, expected = read(llm, text(N_PROMPT), text(N_DECODE, seed=1)), stock[name, "f16"]
    assert nmse(got[0], expected[0]) < 1e-7
    # llama.cpp sums values in f16 when it decodes, which alone is up to 5e-5
    assert nmse(got, expected) < 1e-4


# ---- the same rows, the same logits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", models.ARCHITECTURES)
def test_same_rows_same_logits_as_the_reference(tiny, text, nmse, name, kind):
    check_against_reference(tiny(name), text, nmse, kind, kind, kind)


@pytest.mark.parametrize(
    "kind", ["bf16", "q5_1", "q5_0", "q4_1", "q8_0,q4_0", "f16,q8_0", "q4_0,f16"]
)
@pytest.mark.parametrize("name", ["llama-gqa", "llama-d128"])
def test_every_cache_type_and_mixed_ones(tiny, text, nmse, name, kind):
    type_k, type_v = (kind.split(",") * 2)[:2]
    check_against_reference(tiny(name), text, nmse, kind, type_k, type_v)


@pytest.mark.parametrize(
    ("kind", "in_window"),
    [
        ("q8_0,q4_0", "q8_0,q8_0"),
        ("q4_1,q4_0", "q8_0,q8_0"),
        ("q4_0,q4_0", "q4_0,q4_0"),
        ("q4_0,q8_0", "q4_0,q8_0"),
        ("f16,q8_0", "f16,q8_0"),
    ],
)
def test_windows_have_8_bits_where_values_have_fewer_than_quantised_keys(
    tiny, text, kind, in_window
):
    llm = load(tiny("gemma3"), kind, after=text(N_PROMPT), kv_ratio=0.3)
    type_k, type_v = (TYPES[x] for x in kind.split(","))
    layers = llm.engine.store.layers
    windows = tuple(TYPES[x] for x in in_window.split(","))
    assert {(x.type_k, x.type_v) for x in layers if x.n_swa} == {windows}
    assert {(x.type_k, x.type_v) for x in layers if not x.n_swa} == {(type_k, type_v)}
    stored = sum(
        x.bytes_row * len(rows)
        for x, heads in zip(layers, positions(llm), strict=True)
        for rows in heads
    )
    assert llm.kv_stats().n_bytes_used == stored


def check_against_reference(path, text, nmse, kind, type_k, type_v):
    llm = load(path, kind, kv_method="random", kv_ratio=0.3)
    late = any(layer.rounds_late for layer in llm.engine.store.layers)
    reference = Reference(path, type_k, type_v, late=late)
    rounds = not {type_k, type_v}.isdisjoint(QUANTISED)
    assert late == (rounds and reference.weights.arch not in ALIBI)
    limit = max(MAX_NMSE[type_k], MAX_NMSE[type_v])
    prompt = reference.prefill(text(N_PROMPT), all_logits=False).logits.numpy()
    assert nmse(read(llm, text(N_PROMPT), ()), prompt) < limit
    evict_likewise(reference, llm)
    decoded = reference.decode(text(16, seed=1)).numpy()
    assert nmse(feed(llm, text(16, seed=1)), decoded) < limit


def test_iq4_nl_is_about_as_good_as_q4_0(tiny, text, nmse):
    """The reference cannot quantise to iq4_nl, so it is compared with an f16 cache."""
    exact = read(
        load(tiny("llama-gqa"), kv_method="streaming", kv_ratio=0.3),
        text(N_PROMPT),
        text(16, seed=1),
    )
    error = {
        kind: nmse(
            read(
                load(tiny("llama-gqa"), kind, kv_method="streaming", kv_ratio=0.3),
                text(N_PROMPT),
                text(16, seed=1),
            ),
            exact,
        )
        for kind in ("iq4_nl", "q4_0")
    }
    assert 0 < error["iq4_nl"] < 1.5 * error["q4_0"]


@pytest.mark.parametrize("name", models.ARCHITECTURES)
def test_a_later_turn_is_read_over_the_rows_that_were_kept(tiny, text, nmse, name):
    llm, reference = load(tiny(name), kv_method="random", kv_ratio=0.4), Reference(tiny(name))
    llm.eval(list(text(N_PROMPT)))
    reference.prefill(text(N_PROMPT))
    for seed, n_tokens in (
        (2, 10),
        (3, 300),
        (4, 200),
    ):  # a short turn is appended, long ones are compressed
        evict_likewise(reference, llm)
        turn = text(n_tokens, seed=seed)
        llm.eval(list(turn))
        expected = reference.prefill(turn, all_logits=False).logits.numpy()
        assert nmse(logits(llm)[None], expected) < MAX_NMSE["f16"]
    evict_likewise(reference, llm)
    assert (
        nmse(feed(llm, text(16, seed=1)), reference.decode(text(16, seed=1)).numpy())
        < MAX_NMSE["f16"]
    )


@pytest.mark.parametrize("hidden", ["f16", "disk"])
def test_hidden_states_may_wait_elsewhere(tiny, text, nmse, hidden):
    expected, got = (
        read(
            load(tiny("llama-gqa"), kv_ratio=0.3, kv_hidden=mode), text(N_PROMPT), text(16, seed=1)
        )
        for mode in ("f32", hidden)
    )
    assert np.array_equal(got, expected) if hidden == "disk" else nmse(got, expected) < 1e-4


def test_hidden_states_beyond_f16s_range_keep_their_precision(tmp_path, text, nmse, monkeypatch):
    """All that a layer adds to the residual stream is 2^20 times as large, as a few channels are in
    Gemma 3.
    """
    plain = models.tensors
    adds = ("token_embd.weight", "attn_output.weight", "ffn_down.weight")
    monkeypatch.setattr(
        models,
        "tensors",
        lambda shape: [
            (name, x * np.float32(2**20 if name.endswith(adds) else 1)) for name, x in plain(shape)
        ],
    )
    path = models.write("llama-gqa", tmp_path)
    expected, got = (
        read(load(path, kv_ratio=0.3, kv_hidden=mode), text(N_PROMPT), text(16, seed=1))
        for mode in ("f32", "f16")
    )
    assert nmse(got, expected) < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_the_number_of_threads_changes_nothing(tiny, text, kind):
    one, three = (
        read(
            load(tiny("llama-gqa"), kind, kv_ratio=0.3, n_threads=n),
            text(N_PROMPT),
            text(16, seed=1),
        )
        for n in (1, 3)
    )
    assert np.array_equal(one, three)


def test_what_compressing_took_is_told_by_stage(tiny, text):
    llm = load(tiny("llama-gqa"), kv_ratio=0.3, kv_method="d2o", after=text(300))
    stats = llm.kv_stats()
    assert tuple(stats.stage_ms) == STAGES and all(ms > 0 for ms in stats.stage_ms.values())
    assert stats.compress_ms == pytest.approx(sum(stats.stage_ms.values()))
    assert stats.compress_ms < stats.prefill_ms


def test_what_compressing_took_is_that_of_the_last_prompt(tiny, text):
    """Not of an earlier one when a short turn is appended as it is, nor of the tail while the model
    writes.
    """
    llm = load(tiny("llama-gqa"), kv_ratio=0.3, kv_tail=64, after=text(300))
    first = dict(llm.kv_stats().stage_ms)
    feed(llm, text(100, seed=1))
    assert llm.engine.store.memory().boundary > 300, "the tail was compressed"
    assert dict(llm.kv_stats().stage_ms) == first
    llm.eval(list(text(5, seed=2)))
    assert llm.kv_stats().compress_ms == 0 and llm.kv_stats().stage_ms == {}


# ---- scores


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", models.ARCHITECTURES)
def test_statistics_equal_the_references(tiny, text, nmse, name, kind):
    """Over the same rows: a value of four bits that rounds the other way in an earlier layer is
    none of the scorer's business.
    """
    from edgekv import native

    n, names = 400, ("mean", "var", "max", "col_entropy")
    llm = load(tiny(name), kind, kv_ratio=0.5)
    rows, stats = [], {}
    observers = [native.Observer(n - 32, n, names), native.Observer(0, n, ("mean",))]
    with native.Prefill(llm._ctx.ctx, text(n), observers) as prefill:
        for il, info in enumerate(llm.engine.store.layers):
            prefill.run(il)
            k, v = (
                torch.from_numpy(np.stack(x))
                for x in zip(*(prefill.rows(head) for head in range(info.n_head_kv)), strict=True)
            )
            rows.append(turned_back(k, v, kind))
            if info.n_swa:
                continue
            stats[il] = [*(prefill.stat(0, stat) for stat in names), prefill.stat(1, "mean") * n]
            prefill.keep([np.arange(n, dtype=np.int32)] * info.n_head_kv)
    prompt = Reference(tiny(name), kind, kind).prefill(
        text(n), observe=32, all_logits=False, rows=rows
    )
    for il, got in stats.items():
        expected, layer = columns(prompt.layers[il].attention), prompt.layers[il]
        wanted = (expected.mean, expected.var, expected.max, expected.entropy, layer.col_sum)
        for stat, x, y in zip((*names, "col_sum"), got, wanted, strict=True):
            assert nmse(x, y.numpy()) < LIMIT_STAT, (il, stat)


@pytest.mark.parametrize("name", models.ARCHITECTURES)
def test_snapkv_keeps_what_the_reference_keeps_except_at_ties(tiny, text, name):
    llm = load(tiny(name), kv_ratio=0.2, after=text(N_PROMPT))
    prompt = Reference(tiny(name)).prefill(text(N_PROMPT), observe=32, all_logits=False)
    for il, heads in enumerate(positions(llm)):
        if llm.engine.store.layers[il].n_swa:
            continue
        scores = snapkv(prompt.layers[il].attention)
        for k, expected in enumerate(keep_best(scores, len(heads[0]))):
            odd = np.setxor1d(heads[k], expected)
            free = np.setdiff1d(
                expected, np.concatenate([np.arange(4), np.arange(N_PROMPT - 32, N_PROMPT)])
            )
            threshold = float(scores[k, free].min())
            assert np.allclose(scores[k, odd], threshold, rtol=1e-3), (il, k, odd)


# ---- layer by layer is compressing the finished cache


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", models.ARCHITECTURES)
def test_kept_rows_have_the_bytes_of_the_full_cache(tiny, text, name, kind):
    full = load(tiny(name), kind, kv_budget=10 * N_PROMPT)
    part = load(tiny(name), kind, kv_ratio=0.2)
    for llm in (full, part):
        llm.eval(list(text(N_PROMPT)))
    for il, heads in enumerate(positions(part)):
        for k, rows in enumerate(heads):
            assert len(set(rows.tolist())) == len(rows)
            there = full.engine.store.positions(il, k).tolist()
            order = [there.index(row) for row in rows.tolist()]
            for kept, everything in zip(
                part.engine.store.row_bytes(il, k), full.engine.store.row_bytes(il, k), strict=True
            ):
                size = len(everything) // len(there)
                assert kept == b"".join(everything[row * size : (row + 1) * size] for row in order)


def test_evicting_a_finished_cache_gives_the_same_next_logits(tiny, text, nmse):
    """Invariant 2: compress while reading, or read in full and evict the same rows afterwards."""
    late = load(tiny("llama-gqa"), kv_budget=10 * N_PROMPT)
    early = load(tiny("llama-gqa"), kv_ratio=0.2)
    for llm in (late, early):
        llm.eval(list(text(N_PROMPT)))
    for il, heads in enumerate(positions(early)):
        # in a store that has every row, a row's number is its token index
        late.engine.store.evict(il, heads)
    assert nmse(feed(late, text(16, seed=1)), feed(early, text(16, seed=1))) < 1e-10


# ---- other ways to the same result


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", models.ARCHITECTURES)
def test_a_graph_that_cannot_be_cut_gives_the_same_rows_and_logits(
    tiny, text, monkeypatch, name, kind
):
    """EDGEKV_WHOLE=1 reads all layers at once, as for a graph without cuts. All of them stand in
    full then, in the types of the cache.
    """
    monkeypatch.setenv("EDGEKV_RECENT", "rounded")
    layers = load(tiny(name), kind, kv_ratio=0.3)
    expected = read(layers, text(N_PROMPT), text(8, seed=1))
    monkeypatch.setenv("EDGEKV_WHOLE", "1")
    whole = load(tiny(name), kind, kv_ratio=0.3)
    assert np.array_equal(read(whole, text(N_PROMPT), text(8, seed=1)), expected)
    assert whole.kv_stats().mode == "full then compress" and whole.kv_stats().note
    assert [[h.tolist() for h in x] for x in positions(whole)] == [
        [h.tolist() for h in x] for x in positions(layers)
    ]


@pytest.mark.parametrize("path", ["graph", "node"])
@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize("name", models.ARCHITECTURES)
def test_paths_of_other_backends_agree(tiny, text, nmse, monkeypatch, name, kind, path):
    """EDGEKV_ATTEND=graph: ordinary flash attention, one call per KV head once they differ, as on a
    backend without our kernels.

    EDGEKV_ATTEND=node: the one node over all heads, and the table of their lengths, that a backend
    with our kernel gets. Both round new rows at once.
    """
    monkeypatch.setenv("EDGEKV_RECENT", "rounded")

    def run() -> np.ndarray:
        llm = load(tiny(name), kind, kv_ratio=0.3, kv_method="random")
        table = np.random.default_rng(0).integers(40, 300, llm.kv_stats().kept.shape)
        llm.kv_set(budget=table.astype(np.int32))  # heads of different length
        first = read(llm, text(N_PROMPT), text(4, seed=1))
        llm.eval(list(text(10, seed=2)))  # a few tokens at once
        llm.eval(list(text(200, seed=3)))  # a turn over ragged heads
        return np.concatenate([first, feed(llm, text(4, seed=4))])

    expected = run()
    monkeypatch.setenv("EDGEKV_ATTEND", path)
    # upstream's kernels round queries and sum in f16; the node computes the same in another order
    assert nmse(run(), expected) < (
        LIMIT_NODE if path == "node" else 1e-4 if kind == "f16" else 1e-2
    )


def test_a_batch_that_wants_too_many_logits_is_refused(tiny, text):
    from edgekv import native

    llm = load(tiny("llama-gqa"), kv_ratio=0.5)
    n = native.OUTPUTS
    llm._batch.set_batch(list(text(n + 1)), n_past=0, logits_all=True)
    with pytest.raises(RuntimeError):
        llm._ctx.decode(llm._batch)
    llm._batch.set_batch(list(text(n)), n_past=0, logits_all=True)
    llm._ctx.decode(llm._batch)
    assert np.isfinite(logits(llm)).all()


def test_llama_cpps_own_clock_sees_a_prompt_that_was_read_layer_by_layer(tiny, text):
    from edgekv.native import llama_cpp

    llm = load(tiny("llama-gqa"), kv_ratio=0.5, after=text(400))
    spent = llama_cpp.llama_perf_context(llm.ctx)
    assert spent.n_p_eval == 400
    assert spent.t_p_eval_ms > 0.5 * (llm.kv_stats().prefill_ms - llm.kv_stats().compress_ms)
