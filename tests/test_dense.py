"""dense: where nobody named a cache type, `auto` stores rows as q8_0 and a ratio is of the bytes
that f16 would take.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from edgekv import Llama, methods
from edgekv.commands import report, slash
from edgekv.commands.conversation import Conversation
from edgekv.learn.reading import predict
from edgekv.memory.dense import fits
from edgekv.memory.fit import PICKED, Planner, Wish
from edgekv.model.blueprint import Blueprint
from edgekv_lab.eval.reader import Reader
from tests.engine import SHARED, TYPES, feed, logits, n_kept
from tests.recurrent import write as write_recurrent

RATIO, N_PROMPT = 0.2, 600
MORE = 64 / 34
"""Bytes of 32 values in f16 and in q8_0."""


def auto(path: Any, after: Sequence[int] = (), **options: Any) -> Llama:
    """The default method, with no cache type named unless `options` do. after: tokens that it has
    read."""
    llm = Llama(
        str(path),
        **{
            **SHARED,
            "kv_ratio": RATIO,
            "kv_profile": "none",
            "kv_min_tokens": 1,
            "verbose": False,
            **options,
        },
    )
    if after:
        llm.eval(list(after))
    return llm


def types(llm: Llama) -> tuple[int, int]:
    return int(llm.context_params.type_k), int(llm.context_params.type_v)


@pytest.mark.parametrize("ratio", [0.2, 0.5])
@pytest.mark.parametrize("model", ["llama-gqa", "llama-mha", "llama-d128", "qwen3"])
def test_more_rows_stay_in_the_bytes_that_were_asked_for(tiny, text, model, ratio):
    llm = auto(tiny(model), kv_ratio=ratio, after=text(N_PROMPT))
    stats = llm.kv_stats()
    in_f16 = auto(tiny(model), type_k=TYPES["f16"], type_v=TYPES["f16"], kv_ratio=ratio)
    in_f16.eval(list(text(N_PROMPT)))
    assert (stats.type_k, stats.type_v, stats.ratio, stats.per_f16) == (
        "q8_0",
        "q8_0",
        ratio,
        pytest.approx(MORE),
    )
    assert int(ratio * MORE * N_PROMPT) - 1 < stats.n_kept <= ratio * MORE * N_PROMPT
    assert stats.n_bytes_full == in_f16.kv_stats().n_bytes_full
    assert (
        0.99 * ratio * stats.n_bytes_full
        < stats.n_bytes
        <= in_f16.kv_stats().n_bytes
        <= ratio * stats.n_bytes_full
    )


def test_it_is_the_q8_0_cache_with_as_many_rows(tiny, text, nmse):
    one = auto(tiny("llama-gqa"))
    other = auto(tiny("llama-gqa"), type_k=TYPES["q8_0"], type_v=TYPES["q8_0"], kv_ratio=RATIO)
    for llm in (one, other):
        llm.eval(list(text(N_PROMPT)))
    assert np.array_equal(one.kv_stats().kept, other.kv_stats().kept)
    assert np.array_equal(logits(one), logits(other))
    assert nmse(feed(one, text(4, seed=1)), feed(other, text(4, seed=1))) == 0


def test_layers_with_a_window_are_counted_by_their_own_rows(tiny, text):
    llm = auto(tiny("gemma3"), after=text(N_PROMPT))
    stats = llm.kv_stats()
    assert stats.n_kept == int(RATIO * MORE * N_PROMPT)
    # K and V of one head in f16; half of the layers see 64 tokens
    assert stats.n_bytes_full == 2 * 2 * 64 * (2 * N_PROMPT + 2 * 64)


@pytest.mark.parametrize(
    "options",
    [
        dict(type_k=TYPES["f16"]),
        dict(type_v=TYPES["q8_0"]),
        dict(kv_method="snapkv"),
        dict(kv_method="kvzip"),
        dict(kv_budget=100),
        dict(kv_ratio=1.0),
        dict(kv_method="full"),
    ],
)
def test_what_the_user_names_is_taken_at_its_word(tiny, text, options):
    llm = auto(tiny("llama-gqa"), after=text(N_PROMPT), **options)
    stats = llm.kv_stats()
    assert types(llm) == (options.get("type_k", 1), options.get("type_v", 1))
    bytes_ratio = n_kept(RATIO, N_PROMPT, f"{stats.type_k},{stats.type_v}")
    assert stats.n_kept == (
        100 if "kv_budget" in options else 600 if stats.method == "full" else bytes_ratio
    )


def test_a_share_above_what_q8_0_takes_keeps_every_row(tiny, text):
    llm = auto(tiny("llama-gqa"), kv_ratio=0.7, after=text(N_PROMPT))
    stats = llm.kv_stats()
    assert stats.n_kept == N_PROMPT
    assert stats.n_bytes == pytest.approx(stats.n_bytes_full / MORE, rel=1e-3)


def test_heads_that_do_not_fill_a_block_stay_in_f16():
    shape = {"mode": "layers", "d_head_k": 64, "d_head_v": 128}
    assert fits(shape)
    assert not fits(shape | {"d_head_k": 80})
    assert not fits(shape | {"d_head_v": 8})
    assert not fits(shape | {"mode": "uncompressed"})


def test_a_model_without_such_a_cache_is_loaded_as_ever(tmp_path):
    write_recurrent(tmp_path / "recurrent.gguf")
    llm = auto(tmp_path / "recurrent.gguf")
    assert types(llm) == (1, 1) and "uncompressed" in llm.kv_stats().note


def test_a_limit_in_bytes_holds_more_rows_and_the_ratio_is_of_bytes(tiny, text):
    limit, n = 900 * 1024, 1000  # new rows wait in f16 in both
    llm = auto(tiny("llama-gqa"), kv_ratio=1.0, kv_memory=limit, kv_tail=32, after=text(n))
    in_f16 = auto(tiny("llama-gqa"), kv_ratio=1.0, kv_memory=limit, kv_tail=32, type_k=1, type_v=1)
    in_f16.eval(list(text(n)))
    stats = llm.kv_stats()
    assert stats.n_kept > 1.5 * in_f16.kv_stats().n_kept and stats.n_bytes <= limit
    assert stats.ratio == pytest.approx(stats.n_kept / n / MORE)


def test_a_ratio_that_is_set_later_picks_too_and_stays_with_the_cache(tiny, text):
    llm = auto(tiny("llama-gqa"), kv_ratio=1.0, after=text(50))
    llm.kv_set(ratio=0.3)
    assert types(llm) == (8, 8)
    for ratio, rows in (
        (0.3, int(0.3 * MORE * N_PROMPT)),
        (0.1, int(0.1 * MORE * N_PROMPT)),
        (1.0, N_PROMPT),
    ):
        llm.reset()
        llm.kv_set(ratio=ratio)
        llm.eval(list(text(N_PROMPT)))
        assert int(llm.kv_stats().n_kept) == rows and llm.kv_stats().ratio == ratio


def test_a_copy_picks_for_itself(tiny, text):
    llm = pickle.loads(pickle.dumps(auto(tiny("llama-gqa"))))
    assert types(llm) == (8, 8)
    llm.eval(list(text(N_PROMPT)))
    assert int(llm.kv_stats().n_kept) == int(RATIO * MORE * N_PROMPT)


def test_a_saved_conversation_comes_back(tiny, text, tmp_path):
    llm = auto(tiny("llama-gqa"), after=text(N_PROMPT))
    llm.kv_save(str(tmp_path / "talk"))
    again = auto(tiny("llama-gqa"))
    again.kv_load(str(tmp_path / "talk"))
    assert np.array_equal(feed(again, [5]), feed(llm, [5]))


def test_the_evaluator_asks_auto_in_its_own_cache_and_the_others_in_f16(tiny, text):
    # the evaluator reads a text once for all, with exact states
    tokens, one = list(text(N_PROMPT)), auto(tiny("llama-gqa"), kv_hidden="f32")
    reader = Reader(
        auto(tiny("llama-gqa"), type_k=1, type_v=1), {"f16": ["full", "snapkv"], "q8_0": ["auto"]}
    )
    one.eval(tokens)
    reader.read(tokens)
    for name, rows, kind in (
        ("full", N_PROMPT, "f16"),
        ("auto", int(RATIO * MORE * N_PROMPT), "q8_0"),
        ("snapkv", int(RATIO * N_PROMPT), "f16"),
    ):
        stats = reader.compress(name, 1.0 if name == "full" else RATIO, kind)
        assert int(stats.n_kept) == rows and stats.type_k == kind
        if name == "auto":
            assert np.array_equal(stats.kept, one.kv_stats().kept)
            assert np.allclose(next(reader.predict([5])), next(predict(one, [5])), atol=1e-4)


def test_what_is_printed_says_type_and_rows(tiny, text):
    llm = auto(tiny("llama-gqa"), after=text(N_PROMPT))
    stats, plain = llm.kv_stats(), auto(tiny("llama-gqa"), type_k=8, type_v=8)
    parts = ["600 tokens seen, 38 % kept", "KV 20 %: 0.2 of 0.9 MiB"]
    assert report.cache_parts(stats) == parts
    assert "q8_0, 1.88 tokens in the bytes of one in f16" in report.stats_table(stats)
    plain.eval(list(text(N_PROMPT)))
    assert report.cache_parts(plain.kv_stats()) == parts


def test_the_chat_says_how_many_rows_a_ratio_would_leave(tiny, text, capsys):
    llm = auto(tiny("llama-gqa"), after=text(N_PROMPT))
    slash.ratio(Conversation(llm, {}), "0.1")
    assert (
        "10 % of the memory from the next prompt on: 0.1 of 0.9 MiB, 112 of the 600 tokens seen"
        " would stay" in "".join(capsys.readouterr())
    )


def test_a_plan_has_the_bytes_of_what_is_picked(tiny, text):
    with Blueprint(str(tiny("llama-gqa")), n_ubatch=256) as blueprint:
        planner = Planner(
            blueprint,
            methods.get("kvzip"),
            Wish(2**40, 1280, types=[PICKED, ("q4_0", "q4_0")], min_tokens=1),
            n_ubatch=256,
        )
        whole, point = (planner.point(1280, ratio, PICKED, "auto") for ratio in (1.0, RATIO))
        assert [p.type_k for p in planner.row(1280)] == ["f16", "q4_0"]
    llm = auto(tiny("llama-gqa"), n_ctx=1280, after=text(1280))
    stats = llm.kv_stats()
    assert (point.type_k, point.n_kept, point.kv, point.kv_full) == (
        "q8_0",
        int(stats.n_kept),
        pytest.approx(stats.n_bytes, rel=1e-3),
        stats.n_bytes_full,
    )
    assert point.command("m", False) == "edgekv chat -m m -c 1280 --kv-ratio 0.2 -ngl 0"
    assert (whole.type_k, whole.picked, whole.command("m", False)) == (
        "f16",
        False,
        "edgekv chat -m m -c 1280 -ngl 0",
    )
