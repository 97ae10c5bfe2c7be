"""Predicted bytes against the library's: kept rows exactly, the peak within a bound; limits for the
whole cache; sizes as people write them.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgekv import native
from edgekv.base import machine
from edgekv.base.sizes import parse_size, size_text
from edgekv.base.stats import KVStats
from edgekv.choice.config import HIDDEN
from edgekv.engine.observer import QueryObserver
from edgekv.errors import BadInput
from edgekv.memory.footprint import (
    HIDDEN_BYTES,
    extent,
    index_bytes,
    kept_bytes,
    mask_bytes,
)
from edgekv.memory.hidden import AUTO
from edgekv.memory.limit import APPEND_MAX, rows_within
from tests import models
from tests.engine import load, n_kept

N_PROMPT = 1300
PEAK_ABOVE, PEAK_SPARE = 1.01, 64 * 1024
"""The predicted peak is never below the real one, and above it by at most 1 % and the alignment of
a tiny model's many small inputs.
"""


def one_line(error) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


# ---- sizes


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("2GiB", 2 * 2**30),
        ("2G", 2 * 2**30),
        ("2g", 2 * 2**30),
        ("512MiB", 512 * 2**20),
        ("512 mib", 512 * 2**20),
        ("1.5K", 1536),
        ("2GB", 2 * 10**9),
        ("100", 100),
        (4096, 4096),
        ("1T", 2**40),
        ("7B", 7),
    ],
)
def test_sizes_as_people_write_them(text, n_bytes):
    assert parse_size(text) == n_bytes


@pytest.mark.parametrize(
    "text", ["", "G", "-1G", "0", "0.0001", "2Gib/s", "2,5G", "1e9", "iB", "5iB", "nan"]
)
def test_what_is_no_size_is_refused_in_one_line(text):
    with pytest.raises(BadInput, match="512MiB") as error:
        parse_size(text, "--kv-memory")
    assert one_line(error).startswith("--kv-memory")


@given(st.integers(1024, 2**45))
def test_a_size_that_was_printed_is_read_back_to_its_digits(n_bytes):
    assert parse_size(size_text(n_bytes).replace(",", "")) == pytest.approx(n_bytes, rel=0.05)


# ---- predictions


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0", "q5_1,iq4_nl"])
@pytest.mark.parametrize("name", models.ARCHITECTURES)
def test_kept_bytes_are_predicted_to_the_byte_and_the_peak_within_its_bound(tiny, text, name, kind):
    for ratio, hidden in ((0.3, "f32"), (0.07, "disk")):
        check(tiny(name), kind, list(text(N_PROMPT)), "snapkv", ratio, hidden)


@pytest.mark.parametrize(
    "method",
    ["tova", "random", "h2o", "score=expected,budget=uniform", "score=kvzip,budget=uniform"],
)
def test_whatever_the_query_source_the_prediction_holds(tiny, text, method):
    check(tiny("llama-gqa"), "f16", list(text(N_PROMPT)), method, 0.2, "f16")


@pytest.mark.parametrize(("n", "score"), [(N_PROMPT, "snapkv"), (80, "kvzip"), (180, "kvzip")])
def test_what_products_with_quantised_weights_work_with_is_predicted(tiny, text, n, score):
    """A probe's pieces are chunks of their own, also where they and the prompt are one chunk's
    tokens.
    """
    check(tiny("llama-q4"), "f16", list(text(n)), f"score={score},budget=uniform", 0.2, "f32")


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize("name", models.ARCHITECTURES)
def test_all_layers_at_once_take_what_is_predicted(tiny, text, name, kind):
    check(tiny(name), kind, list(text(N_PROMPT)), "snapkv", 0.3, "whole")


@pytest.mark.parametrize("method", ["h2o", "score=expected,budget=uniform", "kvzip"])
def test_all_layers_at_once_with_other_query_sources_take_what_is_predicted(tiny, text, method):
    llm = load(tiny("llama-gqa"), kv_ratio=0.2, kv_method=method, kv_hidden="whole")
    kv = llm.engine
    for n in (400, N_PROMPT):  # a later turn stands on the kept rows of the first
        tokens = list(text(n, seed=n))
        predicted = kv.prompt_bytes(
            QueryObserver(llm.settings, tokens, kv.tokenize), kv.plan(len(tokens))
        )
        llm.eval(tokens)
        peak, counted = llm.kv_stats().n_bytes_peak, predicted.peak - predicted.unreported
        assert peak <= counted <= PEAK_ABOVE * peak + predicted.kept + PEAK_SPARE


def test_hidden_states_wait_where_everybody_says_that_they_may():
    assert (AUTO, *native.HIDDEN) == (AUTO, *HIDDEN_BYTES) == HIDDEN


@pytest.mark.parametrize("name", ["llama-gqa", "gemma3"])
def test_masks_of_a_device_are_predicted(tiny, text, name, monkeypatch):
    """EDGEKV_ATTEND=graph: the CPU goes the way of devices."""
    peaks = []
    for how in ("", "graph"):
        monkeypatch.setenv("EDGEKV_ATTEND", how)
        llm = load(tiny(name), kv_ratio=0.2, kv_method="snapkv")
        llm.eval(list(text(N_PROMPT)))
        peaks.append(llm.kv_stats().n_bytes_peak)
    masks = mask_bytes(llm.engine.store.layers, N_PROMPT, 256)
    # inputs are other ones too
    assert masks > 0 and peaks[1] - peaks[0] == pytest.approx(masks, rel=0.15)


@pytest.mark.parametrize("method", ["adakv", "pyramidkv", "cake", "kvzip"])
def test_rows_that_move_between_heads_stay_within_the_predicted_bytes(tiny, text, method):
    llm = load(tiny("llama-gqa"), kv_ratio=0.2, kv_method=method)
    kv, tokens = llm.engine, list(text(N_PROMPT))
    predicted = kv.prompt_bytes(
        QueryObserver(llm.settings, tokens, kv.tokenize), kv.plan(len(tokens))
    )
    llm.eval(tokens)
    stats = llm.kv_stats()
    assert stats.n_bytes <= predicted.kept + 64 * len(kv.store.layers)
    assert stats.n_bytes_peak <= predicted.peak
    assert predicted.peak <= stats.n_bytes_peak + predicted.kept + PEAK_SPARE


@pytest.mark.parametrize(
    "method",
    [
        "snapkv",
        "tova",
        "h2o",
        "random",
        "kvzip",
        "score=expected",
        "score=keydiff,merge=summary",
        "score=late,merge=summary",
    ],
)
def test_a_plan_knows_what_a_method_reads_without_the_prompt(tiny, text, method):
    llm = load(tiny("llama-gqa"), kv_ratio=0.2, kv_method=method)
    settings = llm.settings
    for n in (100, 1300, 1999):
        real = QueryObserver(settings, list(text(n)), llm.engine.tokenize).extent(256)
        planned = extent(settings.preset, n, settings.window, 256)
        assert (planned.n_tokens, planned.n_drawn) == (n, real.n_drawn)
        assert 0 <= planned.n_raw - real.n_raw <= settings.sink and (planned.n_raw > 0) == (
            real.n_raw > 0
        )
        assert real.n_all == pytest.approx(planned.n_all, abs=40)
        assert real.n_rows == pytest.approx(planned.n_rows, abs=40)
        assert real.n_observed <= planned.n_observed <= 256


def check(path, kind, tokens, method, ratio, hidden) -> None:
    llm = load(path, kind, kv_ratio=ratio, kv_method=method, kv_hidden=hidden)
    kv = llm.engine
    predicted = kv.prompt_bytes(
        QueryObserver(llm.settings, tokens, kv.tokenize), kv.plan(len(tokens))
    )
    llm.eval(tokens)
    stats = llm.kv_stats()
    x = kv.store.layers[0]
    n_rows = n_kept(ratio, len(tokens), kind, d_head=x.d_k, alibi=index_bytes(x) > 0)
    assert stats.n_bytes == predicted.kept == kept_bytes(kv.store.layers, len(tokens), n_rows)
    counted = predicted.peak - predicted.unreported
    assert stats.n_bytes_peak <= counted <= PEAK_ABOVE * stats.n_bytes_peak + PEAK_SPARE


# ---- a limit for the whole cache


@pytest.mark.parametrize("method", ["snapkv", "kvzip"])
@pytest.mark.parametrize(
    ("name", "kind"), [("llama-gqa", "f16"), ("llama-32k", "q4_0"), ("gemma3", "q8_0")]
)
def test_the_cache_stays_inside_its_limit_whatever_comes(tiny, text, name, kind, method):
    limit = 1_200_000 if kind == "f16" else 700_000
    llm = load(tiny(name), kind, kv_memory=limit, kv_tail=96, kv_method=method, n_ctx=4096)
    sizes = []
    for turn, n in enumerate((300, 1500, 20, 700)):
        llm.eval(list(text(n, seed=turn)))
        sizes.append(llm.kv_stats().n_bytes)
        for token in text(150, seed=turn):
            llm.eval([token])
            sizes.append(llm.kv_stats().n_bytes)
    stats = llm.kv_stats()
    assert max(sizes) <= limit < stats.n_bytes_full
    assert max(sizes) > 0.8 * limit, "what is allowed is used"
    assert stats.n_bytes_limit == limit and 0 < stats.ratio < 1


def test_the_picked_ratio_is_reported_and_a_short_prompt_stays_whole(tiny, text):
    llm = load(tiny("llama-gqa"), kv_memory="1MiB", kv_tail=64)
    llm.eval(list(text(200)))
    assert llm.kv_stats().ratio == 1 and (llm.kv_stats().kept == 200).all()
    llm.reset()
    llm.eval(list(text(1600)))
    stats, layers = llm.kv_stats(), llm.engine.store.layers
    rows = rows_within(layers, 2**20, 64, 32, 4)
    assert (stats.kept == rows).all()
    assert stats.ratio == pytest.approx(rows / 1600)
    assert stats.n_kept == rows
    llm.kv_set(memory="900KiB")
    llm.reset()
    llm.eval(list(text(1600)))
    assert llm.kv_stats().ratio < stats.ratio
    llm.kv_set(ratio=0.01)  # the smaller of both counts
    llm.reset()
    llm.eval(list(text(1600)))
    assert llm.kv_stats().n_kept == 16


@pytest.mark.parametrize("kind", ["f16", "q8_0,q4_0"])
def test_new_tokens_stay_whole_as_long_as_the_limit_allows(tiny, text, kind):
    """With a ratio as well, which is another limit, no more than --kv-tail."""
    limit = 700_000

    def written(ratio: float) -> list[KVStats]:
        llm = load(tiny("llama-32k"), kind, kv_memory=limit, kv_tail=64, kv_ratio=ratio, n_ctx=4096)
        llm.eval(list(text(40)))
        found = []
        for token in text(1500, seed=1):
            llm.eval([token])
            found.append(llm.kv_stats())
        return found

    alone, both = written(1.0), written(0.3)
    whole = [x for x in alone if x.n_kept == x.n_seen]
    assert max(x.n_bytes for x in alone) <= limit
    assert whole[-1].n_bytes > 0.8 * limit and alone[-1].n_kept < alone[-1].n_seen
    assert next(x for x in both if x.n_kept < x.n_seen).n_seen < 300 < whole[-1].n_seen


def test_a_limit_that_cannot_be_kept_is_refused(tiny):
    with pytest.raises(BadInput, match="--kv-tail") as error:
        load(tiny("llama-gqa"), kv_memory=100_000)
    one_line(error)
    with pytest.raises(BadInput, match="method full"):
        load(tiny("llama-gqa"), kv_memory="1MiB", kv_method="full")
    load(tiny("llama-gqa"), kv_memory="8MiB", kv_method="full")
    with pytest.raises(BadInput, match="one of them"):
        load(tiny("llama-gqa"), kv_memory="8MiB", kv_budget=[[1, 2]] * 3)
    llm = load(tiny("llama-gqa"), kv_memory="2MiB")
    with pytest.raises(BadInput, match="too small"):
        llm.kv_set(memory=50_000)
    assert llm.settings.memory == 2 * 2**20


@given(st.integers(1, 40), st.integers(1, 700), st.integers(1, 64))
def test_rows_within_is_the_largest_number_that_fits(n_layer, tail, window):
    from edgekv.memory.limit import reserve
    from edgekv.native import LayerInfo

    layers = [LayerInfo(8, 2, 64, 64, 1, 1, 0, 256)] * n_layer
    n_bytes = reserve(layers, tail, window) + 2 * 256 * n_layer * 500 + 17
    assert rows_within(layers, n_bytes, tail, window, 4) == 500
    assert reserve(layers, tail, window) >= 2 * 256 * n_layer * (tail + APPEND_MAX)


# ---- a prompt that cannot fit


def test_a_prompt_that_the_machine_has_no_memory_for_is_refused_before_anything_is_allocated(
    tiny, text, monkeypatch
):
    from edgekv import native
    from edgekv.memory import room

    llm = load(tiny("llama-gqa"), kv_ratio=0.2)
    llm.eval(list(text(300)))
    before = llm.kv_stats()
    with monkeypatch.context() as patch:
        patch.setattr(room, "memory_free", lambda swap: 500_000)
        patch.setattr(native, "Prefill", None)  # it is not even begun
        with pytest.raises(
            BadInput, match="shorter prompt.*--kv-ratio.*-ctk.*--kv-hidden disk"
        ) as error:
            llm.eval(list(text(1500)))
        assert "488.3 KiB are free" in one_line(error)
    with monkeypatch.context() as patch:  # what lies on a GPU takes none of it
        need = llm.engine.prompt_bytes(
            QueryObserver(llm.settings, list(text(1500)), None), llm.engine.plan(1500)
        )
        patch.setattr(room, "memory_free", lambda swap: need.hidden + need.inputs)
        patch.setattr(llm.engine, "offloaded", True)
        llm.engine._check_room(
            QueryObserver(llm.settings, list(text(1500)), None), llm.engine.plan(1500)
        )
    after = llm.kv_stats()
    assert (after.n_seen, after.n_bytes) == (before.n_seen, before.n_bytes)
    llm.eval(list(text(1500)))
    assert llm.kv_stats().n_seen == 1800


@pytest.mark.parametrize("name", models.ARCHITECTURES)
def test_a_whole_cache_that_is_larger_than_memory_is_refused_before_loading(
    tiny, monkeypatch, name
):
    from edgekv.memory import room

    n_bytes = load(tiny(name), n_ctx=2048).kv_stats().n_bytes
    monkeypatch.setattr(room, "memory_free", lambda swap: n_bytes - 20_000)
    with pytest.raises(BadInput, match="2,048 tokens.*-c.*--kv-ratio.*-ctk") as error:
        load(tiny(name), n_ctx=2048)
    one_line(error)
    load(tiny(name), n_ctx=1024)
    load(tiny(name), "q8_0", n_ctx=2048)
    load(tiny(name), n_ctx=2048, kv_ratio=0.5)  # has no whole cache


# ---- the machine


def test_free_memory_is_some_of_the_machines():
    others = 2**30  # what other processes may take between two looks
    assert 0 < machine.memory_free() <= machine.memory_free(swap=True) + others
    assert machine.memory_free() < machine.memory_total()
    assert 2**20 < machine.rss_now() <= machine.rss_peak() < machine.memory_total()


def test_a_containers_limit_counts(tmp_path, monkeypatch):
    (tmp_path / "max").write_text("3000000\n")
    (tmp_path / "used").write_text("1500000\n")
    (tmp_path / "stat").write_text("anon 900000\ninactive_file 300000\nactive_file 200000\n")
    files = ("max", "used", "stat")
    monkeypatch.setattr(
        machine, "_CGROUP", (("", str(tmp_path / "no"), files), ("memory", str(tmp_path), files))
    )
    assert machine.memory_free() == 2_000_000, "cached files give way"
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    for name, text in zip(files, ("1200000", "200000", "anon 200000"), strict=True):
        (inner / name).write_text(text)
    (tmp_path / "own").write_text("5:cpu,cpuacct:/\n4:memory:/outer/inner\n0::/x\n")
    monkeypatch.setattr(machine, "_OWN_GROUPS", tmp_path / "own")
    assert machine.memory_free() == 1_000_000, "a group in a group has the least of both"
    (tmp_path / "own").write_text("4:memory:/that/is/not/seen/here\n")
    assert machine.memory_free() == 2_000_000
    (tmp_path / "max").write_text("max\n")
    assert machine.memory_free() > 2_000_000
