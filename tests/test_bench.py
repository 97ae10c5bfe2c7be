"""bench: lists, rows, fields and forms like llama-bench's; each sample in its own process; ratios,
equal bytes, synthetic models.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import signal
import sqlite3
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgekv import native
from edgekv.chat.drafts import MODEL
from edgekv.errors import BadInput, EdgeKVError
from edgekv_lab.bench import (
    bandwidth,
    compare,
    fields,
    fill,
    formats,
    long,
    measure,
    reads,
    runner,
    several,
    synthetic,
)
from edgekv_lab.bench.expected import ExpectedBytes
from edgekv_lab.bench.spec import Case, Lists, equal_bytes, parse_ints
from tests.cli import refused, typed
from tests.engine import load, logits, n_kept
from tests.lib import nmse
from tests.recurrent import write as write_recurrent

LLAMA_BENCH_JSON = """
    build_commit build_number cpu_info gpu_info backends model_filename model_type model_size
    model_n_params n_batch n_ubatch n_threads cpu_mask cpu_strict poll type_k type_v
    n_gpu_layers n_cpu_moe split_mode main_gpu no_kv_offload flash_attn devices tensor_split
    tensor_buft_overrides load_mode lazy_mode embeddings no_op_offload no_host repack fit_target
    fit_min_ctx n_prompt n_gen n_depth test_time avg_ns stddev_ns avg_ts stddev_ts samples_ns
    samples_ts
""".split()
"""`llama-bench -o json` of llama.cpp 0c1e57098 (tools/llama-bench/llama-bench.cpp,
`test::get_fields` and `json_printer::print_test`).
"""
ADDED = """
    kv_method kv_ratio kv_tokens_full kv_tokens_kept kv_bytes_full kv_bytes_used
    kv_bytes_allocated kv_bytes_peak mem_peak_device mem_peak_host mem_computed_host
    read_bytes_weights read_bytes_kv mem_bandwidth compress_ms kv_fill n_parallel spec_type
    kv_recall kv_bytes_index kv_bytes_archive kv_bytes_recalled note
""".split()
SAMPLE = {
    **dict.fromkeys(("kv_bytes_index", "kv_bytes_archive", "kv_bytes_recalled"), 0),
    "ns": 2_000_000_000,
    "depth_ns": 1,
    "method": "snapkv",
    "mode": "layers",
    "kv_tokens_full": 100,
    "kv_tokens_kept": 20.2,
    "kv_bytes_full": 1000,
    "kv_bytes_used": 200,
    "kv_bytes_allocated": 300,
    "kv_bytes_peak": 400,
    "read_bytes_weights": 0,
    "read_bytes_kv": 0,
    "compress_ms": 1.5,
    "rss_loaded": 10,
    "peak_loaded": 10,
    "mem_peak_host": 1000,
    "mem_peak_device": 0,
    "build_commit": "abc",
    "model_type": 'llama 1B "Q"',
    "model_size": 5000,
    "model_n_params": 1_500_000_000,
    "cpu_info": "it's a CPU",
    "gpu_info": "",
    "backends": "CPU",
}
CASE = Case("m.gguf", 100, 0, 0, kv_method="snapkv", kv_ratio=0.2)
BITS = {"f16": 16.0, "q8_0": 8.5, "q4_0": 4.5}


# ---- lists and ranges


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("512", [512]),
        ("1,2,4", [1, 2, 4]),
        ("1-4", [1, 2, 3, 4]),
        ("10-20+5", [10, 15, 20]),
        ("512-4096*2", [512, 1024, 2048, 4096]),
        ("0", [0]),
        ("1-9+3,64", [1, 4, 7, 64]),
        ("-1", [-1]),
        ("8-2", []),
    ],
)
def test_lists_and_ranges_as_in_llama_bench(text, expected):
    assert parse_ints(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "1,",
        "1-",
        "1-4/2",
        "0-4*2",
        "1-4*1",
        "1-4+0",
        "1.5",
        "10^20",
        "1-100000000000000",
        "9" * 5000,
    ],
)
def test_other_lists_are_refused(text):
    with pytest.raises(BadInput, match="-p"):
        parse_ints(text, "-p")


@given(st.integers(0, 50), st.integers(0, 200), st.integers(1, 9))
def test_a_range_is_pythons_range(first, last, step):
    assert parse_ints(f"{first}-{last}+{step}") == list(range(first, last + 1, step))


# ---- rows


def lists(**more) -> Lists:
    base = dict(
        models=["m"],
        n_prompt=[512],
        n_gen=[128],
        pairs=[],
        n_depth=[0],
        n_batch=[2048],
        n_ubatch=[512],
        types=[("f16", "f16")],
        n_threads=[1],
        n_gpu_layers=[-1],
        flash_attn=["auto"],
        kv_method=["snapkv"],
        kv_ratio=[0.2],
    )
    return Lists(**{**base, **more})


@pytest.mark.parametrize(
    ("p", "n", "d", "name"),
    [
        (512, 0, 0, "pp512"),
        (0, 128, 4096, "tg128 @ d4096"),
        (16, 8, 0, "pp16+tg8"),
        (16, 8, 32, "pp16+tg8 @ d32"),
    ],
)
def test_names_of_tests(p, n, d, name):
    assert Case("m", p, n, d).test == name
    several = name.replace(" @", " np3 @") if d else name + " np3"
    assert Case("m", p, n, d, n_parallel=3).test == several


def test_full_caches_stand_beside_every_compressed_row_of_their_test_once():
    cases = lists(
        kv_ratio=[1, 0.5, 0.2],
        n_depth=[0, 64],
        full=["f16", "q8_0"],
        types=[("f16", "f16"), ("q8_0", "q4_0")],
    ).cases()
    assert len(set(cases)) == len(cases)
    by_test: dict[str, list[str]] = {}
    for case in cases:
        by_test.setdefault(case.test, []).append(case.setting)
    expected = [
        "f16 full",
        "q8_0 full",
        "q8_0/q4_0 full",
        "f16 x 0.5 snapkv",
        "f16 x 0.2 snapkv",
        "q8_0/q4_0 x 0.5 snapkv",
        "q8_0/q4_0 x 0.2 snapkv",
    ]
    assert by_test == {test: expected for test in ("pp512", "tg128", "pp512 @ d64", "tg128 @ d64")}
    assert {c.setting for c in lists(kv_ratio=[1], full=["q4_0"]).cases()} == {"f16 full"}, (
        "with nothing compressed there is nothing to stand beside"
    )


def test_every_list_multiplies_the_rows_and_zero_leaves_a_test_out():
    assert (
        len(
            lists(
                n_threads=[1, 2],
                n_ubatch=[64, 128, 256],
                kv_ratio=[0.5, 0.2],
                n_gen=[0],
                pairs=[(8, 4)],
                n_parallel=[1, 4],
            ).cases()
        )
        == 2 * 3 * 2 * 2 * 2
    )


def test_equal_bytes_never_gives_a_larger_type_more():
    rows = equal_bytes(lists(kv_ratio=[1]).cases(), "snapkv", "f32", BITS)
    groups: list[list[Case]] = []
    for row in rows:
        groups.append([row]) if row.is_full else groups[-1].append(row)
    assert [[r.setting for r in g] for g in groups[:2]] == [
        ["q8_0 full", "f16 x 0.5312 snapkv"],
        ["q4_0 full", "q8_0 x 0.2812 snapkv", "f16 x 0.2812 snapkv"],
    ]
    for full, *others in groups:
        for row in others:
            share = row.kv_ratio * BITS["f16"] / BITS[full.type_k]
            assert 0.999 < share <= 1 and row.same_test(full)


# ---- fields and forms


def table(n: int = 3) -> runner.Measurements:
    made = runner.Measurements([CASE.full("f16"), CASE])
    made.samples = [
        [
            {**SAMPLE, "ns": ns * scale, "method": method, "mode": mode, "kv_bytes_used": kept}
            for ns in range(10**9, (n + 1) * 10**9, 10**9)
        ]
        for scale, method, mode, kept in (
            (3, "full", "uncompressed", 1000),
            (1, "snapkv", "layers", 200),
        )
    ]
    made.computed = [1000, 900]
    return made


def test_json_has_llama_benchs_names_and_ours():
    for r in json.loads(formats.as_json(table().records())):
        assert set(r) == {*LLAMA_BENCH_JSON, *ADDED}
        assert list(r)[: len(LLAMA_BENCH_JSON) - 2] == LLAMA_BENCH_JSON[:-2], (
            "in llama-bench's order"
        )
        for name, kind in {**fields.LLAMA_BENCH, **fields.OURS}.items():
            assert type(r[name]) is kind or kind is float and type(r[name]) is int, name


def test_means_and_deviations_are_llama_benchs():
    r = table().records()[1]
    ts = [100.0, 50.0, 100 / 3]
    assert r["samples_ts"] == pytest.approx(ts)
    assert (r["avg_ts"], r["stddev_ts"]) == pytest.approx(
        (statistics.mean(ts), statistics.stdev(ts))
    )
    assert (r["avg_ns"], r["stddev_ns"]) == (2 * 10**9, 10**9)
    assert fields.deviation([5.0]) == 0


def test_jsonl_and_csv_hold_the_same_values():
    records = table().records()
    assert [json.loads(line) for line in formats.as_jsonl(records).splitlines()] == records
    rows = list(csv.DictReader(io.StringIO(formats.as_csv(records))))
    assert list(rows[0]) == LLAMA_BENCH_JSON[:-2] + ADDED
    assert [row["model_type"] for row in rows] == [SAMPLE["model_type"]] * 2
    assert float(rows[1]["avg_ts"]) == records[1]["avg_ts"]
    assert rows[0]["repack"] == "1", "truth values as llama-bench writes them"


def test_sql_runs_and_holds_the_same_values():
    with sqlite3.connect(":memory:") as base:
        base.executescript(formats.as_sql(table().records()))
        got = base.execute(
            "SELECT cpu_info, model_type, kv_ratio, mem_peak_host FROM llama_bench ORDER BY"
            " kv_ratio"
        ).fetchall()
    base.close()
    assert got == [
        ("it's a CPU", SAMPLE["model_type"], 0.2, 1000),
        ("it's a CPU", SAMPLE["model_type"], 1.0, 1000),
    ]


def test_markdown_is_llama_benchs_table_with_the_caches_columns():
    made = table()
    for samples in made.samples:
        for x in samples:
            x |= {
                name: x[name] * 2**20 // 10
                for name in (
                    "kv_bytes_full",
                    "kv_bytes_used",
                    "kv_bytes_allocated",
                    "kv_bytes_peak",
                )
            }
    page = formats.as_md(made.records())
    lines = page.splitlines()
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines[:4]}) == 1
    assert lines[0].startswith(
        "| model | size | params | backend | threads | type_k | type_v | kv_method | kv_ratio |"
        " test | t/s |"
    )
    assert lines[0].endswith(
        "| KV used | tokens kept | KV allocated MiB | KV peak MiB | process MiB |"
    )
    assert (
        "| pp100 | 61.11 ± 34.69 | 20 %: 20.0 of 100.0 MiB | 20 % | 30.0 | 40.0 | 0 |" in lines[3]
    )
    assert "1.50 B" in lines[3]
    assert lines[-1] == "build: abc (0)" and "*" not in page


# ---- ratios


def test_ratios_are_taken_within_rounds():
    (x,) = compare.ratios(table())
    assert x.speeds == (3.0, 3.0, 3.0)
    assert x.speed == pytest.approx(3)
    assert x.kv == 0.2
    assert x.memory == 1
    assert "| 0.20 x | 1.00 x | 3.00 x | 3.00 to 3.00 |" in compare.as_md([x])


@pytest.mark.parametrize(
    ("speeds", "says"),
    [
        ((0.8, 1.0, 1.4), "1.04 x | 0.52 to 2.09, no difference shown |"),
        ((1.9, 2.0, 2.1), "2.00 x | 1.76 to 2.26 |"),
        ((2.0,), "2.00 x | one round |"),
    ],
)
def test_differences_that_the_rounds_do_not_show_are_called_so(speeds, says):
    found = compare.as_md([compare.Ratio(CASE, CASE.full("f16"), speeds, 0.2, 1.0)])
    assert found.rstrip().endswith(says)


# ---- what a token reads


def test_the_weights_that_a_token_touches():
    sizes = {
        "token_embd.weight": 100,
        "output.weight": 120,
        "blk.0.ffn_up_exps.weight": 80,
        "blk.0.attn_q.weight": 10,
    }
    assert reads.weights_read(sizes, 310) == 210, "one row of the table of tokens"
    assert reads.weights_read(sizes, 310, 8, 2) == 210 - 60, "two of eight experts"
    del sizes["output.weight"]
    assert reads.weights_read(sizes, 190) == 190, "the table is the output as well"


def test_bytes_read_beside_the_memorys_speed():
    made = table()
    made.cases = [replace(c, n_prompt=0, n_gen=10, n_depth=100) for c in made.cases]
    made.bandwidth = {1: 50e9}
    for samples, kv in zip(made.samples, (4, 1), strict=True):
        for x in samples:
            x |= dict(ns=10**9, read_bytes_weights=2 * 10**9, read_bytes_kv=kv * 10**9)
    full, kept = made.records()
    assert (reads.per_token(full), reads.speed(full), reads.share(full)) == (
        6 * 10**9,
        pytest.approx(60e9),
        pytest.approx(1.2),
    )
    assert (reads.per_token(kept), reads.share(kept)) == (3 * 10**9, pytest.approx(0.6))
    page = reads.as_md([full, kept], ["f16 full", "kept"])
    assert "| f16 full |" in page and "| 60.0 | 120 % |" in page and "| 30.0 | 60 % |" in page
    assert "50.0 GB/s to 1 thread" in page
    assert "Above 100 %" in page
    assert "processor's caches" in page
    assert (
        "Above" not in reads.as_md([kept], ["kept"])
        and reads.as_md(table().records(), ["", ""]) == ""
    ), "a prompt is no such test"


def test_a_gpus_rows_are_not_held_against_main_memory():
    made = table()
    made.cases, made.bandwidth = [replace(c, n_prompt=0, n_gen=10) for c in made.cases], {1: 50e9}
    for samples in made.samples:
        for x in samples:
            x |= dict(gpu_info="a GPU", read_bytes_weights=10**9)
    assert all(reads.share(r) is None for r in made.records())
    assert "not measured" in reads.as_md(made.records(), ["a", "b"])


def test_the_memorys_speed_is_measured():
    assert 1e8 < bandwidth.measured(2, 2**22) < 1e13


# ---- real samples


@pytest.fixture(scope="module")
def little(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("synthetic") / "tiny.gguf"
    synthetic.write(path, synthetic.SHAPES["tiny"])
    return str(path)


def test_rounds_are_interleaved_and_every_sample_has_its_own_process(little):
    cases, order = lists(models=[little], n_prompt=[200], n_gen=[], full=["q8_0"]).cases(), []
    seen = runner.run(
        cases, 2, lambda done, total, case: order.append((done, total, case.setting)), warm_up=False
    )
    assert [x[2] for x in order] == [
        "q8_0 full",
        "f16 x 0.2 snapkv",
        "f16 x 0.2 snapkv",
        "q8_0 full",
        "f16 x 0.2 snapkv",
    ]
    full, compressed = seen.records()
    assert (full["kv_method"], full["kv_tokens_kept"], full["flash_attn"]) == ("full", 200, -1)
    assert (
        compressed["kv_method"],
        compressed["kv_tokens_full"],
        compressed["kv_tokens_kept"],
    ) == ("snapkv", 200, 40)
    assert (
        compressed["kv_bytes_used"]
        == 40 / 200 * compressed["kv_bytes_full"]
        < compressed["kv_bytes_peak"]
    )
    assert len(full["samples_ns"]) == 2
    assert full["kv_bytes_used"] == 200 * 4 * 2 * 136 < full["kv_bytes_allocated"]
    for r in (full, compressed):
        assert 2**24 < r["mem_peak_host"] < 2**29 and r["mem_computed_host"] > r["model_size"]


def test_a_row_under_a_depth_times_only_the_test(little):
    got = runner.sample(Case(little, 0, 8, 600, kv_method="snapkv", kv_ratio=0.5), warm_up=False)
    assert got["kv_tokens_full"] == 608
    assert got["kv_tokens_kept"] == 308
    assert 0 < got["ns"] < got["depth_ns"]
    assert got["compress_ms"] > 0
    assert got["read_bytes_kv"] == 304 * 4 * 2 * 256 < got["kv_bytes_allocated"]
    assert got["read_bytes_weights"] == got["model_size"]


@pytest.mark.parametrize("setting", [dict(kv_method="snapkv", kv_ratio=0.5), {}])
def test_several_conversations_are_counted_together(little, setting):
    alone, three = (
        runner.sample(Case(little, 40, 8, 600, n_parallel=n, **setting), warm_up=True)
        for n in (1, 3)
    )
    for name in ("tokens_full", "tokens_kept", "bytes_full", "bytes_used"):
        assert three[f"kv_{name}"] == 3 * alone[f"kv_{name}"], name
    assert three["kv_bytes_peak"] >= three["kv_bytes_allocated"] >= three["kv_bytes_used"]
    assert (three["method"], three["mode"]) == (alone["method"], alone["mode"])


@pytest.mark.parametrize("setting", [dict(kv_method="snapkv", kv_ratio=0.5), {}])
def test_answers_are_written_with_drafts_and_without(little, setting):
    case = Case(little, 0, 30, 200, spec_type="none", **setting)
    found = [
        measure.sample(replace(case, spec_type=name, draft_model=draft), False, False)
        for name, draft in (("none", None), ("ngram-simple", None), (MODEL, little))
    ]
    assert [x["kv_tokens_full"] >= 230 and x["ns"] > 0 for x in found] == [True] * 3
    assert not any(x["read_bytes_weights"] or x["read_bytes_kv"] for x in found)
    assert case.test == "tg30 none @ d200"


def test_a_row_with_recall_says_what_was_looked_up(little, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    case = Case(little, 0, 8, 600, kv_method="snapkv", kv_ratio=0.5, kv_recall=0.1)
    without, found = (measure.sample(replace(case, kv_recall=x), False, False) for x in (0.0, 0.1))
    names = ("kv_bytes_index", "kv_bytes_archive", "kv_bytes_recalled")
    assert [without[name] for name in names] == [0, 0, 0]
    assert found["kv_bytes_archive"] >= 600 * found["kv_bytes_full"] // 608
    assert 0 < found["kv_bytes_index"] < found["kv_bytes_allocated"]
    made = [
        fields.record(x, [y], 0)
        for x, y in ((replace(case, kv_recall=0.0), without), (case, found))
    ]
    head, rows = (lambda c: ([h for h, _, _ in c], formats.rows(made)))(formats.columns(made))
    looked = found["kv_bytes_recalled"] / 2**20
    assert [row[head.index("recall")] for row in rows] == [None, 0.1]
    assert [row[head.index("looked up MiB")] for row in rows] == [None, looked]
    assert looked > 0
    assert case.setting.endswith("recall 0.1") and case.full("f16").kv_recall == 0


def test_what_a_token_reads_is_shared_by_several_conversations(little):
    case = Case(little, 0, 8, 600, kv_method="snapkv", kv_ratio=0.5, n_parallel=4)
    alone, four = (runner.sample(replace(case, n_parallel=n), warm_up=False) for n in (1, 4))
    assert four["read_bytes_weights"] == alone["read_bytes_weights"] // 4
    assert four["read_bytes_kv"] == alone["read_bytes_kv"]
    made = fields.record(case, [four], 0)
    assert made["avg_ts"] == pytest.approx(1e9 * 4 * 8 / four["ns"])
    assert made["n_parallel"] == 4


@pytest.mark.parametrize("setting", [dict(kv_method="snapkv", kv_ratio=0.5), {}])
def test_several_conversations_go_on_by_their_own_rows(little, setting):
    """Their logits are those of one conversation with the same tokens."""
    case = Case(little, 0, 8, 600, n_parallel=3, **setting)
    llm, alone = measure.load(case), measure.load(replace(case, n_parallel=1))
    talks, text = several.of(llm, 3), measure.tokens(alone, 600)
    talks.read(lambda: llm.eval(text))
    alone.eval(text)
    for token in (5, 7, 11):
        talks.step([token] * 3)
        alone.eval([token])
        for i in range(3):
            assert nmse(native.logits(llm.ctx, llm.n_vocab(), i), logits(alone)) < 1e-5


def test_several_conversations_of_a_model_that_is_not_compressed_are_refused(tmp_path):
    path = write_recurrent(tmp_path / "recurrent.gguf")
    case = Case(str(path), 0, 4, 200, kv_method="snapkv", kv_ratio=0.5, n_parallel=2)
    with pytest.raises(BadInput, match="--kv-ratio 1"):
        runner.sample(case, warm_up=False)


def test_equal_ratios_are_equal_bytes_in_every_cache_type(little):
    got = [
        runner.sample(
            Case(little, 600, 0, 0, kind, kind, kv_method="snapkv", kv_ratio=0.2), warm_up=False
        )
        for kind in ("f16", "q8_0", "q4_0")
    ]
    assert all(x["kv_bytes_used"] == pytest.approx(0.2 * x["kv_bytes_full"], rel=0.01) for x in got)
    assert [round(x["kv_tokens_kept"]) for x in got] == [120, 225, 426]
    for kind, x in zip(("f16", "q8_0", "q4_0"), got, strict=True):
        with ExpectedBytes(little, 512) as expected:
            wanted = expected.host(
                Case(little, 600, 0, 0, kind, kind, kv_method="snapkv", kv_ratio=0.2), x
            )
        assert x["mem_peak_host"] == pytest.approx(wanted, rel=0.1)


def test_what_the_engine_refuses_is_said_with_the_row(little):
    with pytest.raises(BadInput, match=r"pp8, f16 x 0.5 magic: .*snapkv"):
        runner.sample(Case(little, 8, 0, 0, kv_method="magic", kv_ratio=0.5))


def test_a_sample_that_dies_is_said(little, monkeypatch):
    class Dead:
        returncode, stdout = -9, ""

    monkeypatch.setattr(subprocess, "run", lambda *a, **k: Dead)
    with pytest.raises(EdgeKVError, match="not the memory"):
        runner.sample(CASE)


# ---- depths that are filled


FIRST = 512


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_a_filled_whole_cache_holds_the_first_rows_again_and_again(little, kind):
    from edgekv.conversation.state import take

    def parts(llm, n):
        """Positions, and the K and V rows of every layer, of llama.cpp's saved state: 16 bytes in
        front, 8 between, 12 before each block.
        """
        state, row = np.frombuffer(take(llm).data, np.uint8), {"f16": 256, "q8_0": 136}[kind]
        assert len(state) == 16 + 12 * n + 8 + 2 * 4 * (12 + n * row), (
            "4 layers of 2 heads of 64 values"
        )
        cells = state[16 : 16 + 12 * n].view(np.int32).reshape(n, 3)
        blocks = state[24 + 12 * n :].reshape(8, -1)
        return cells[:, 0], blocks[:, 12:].reshape(8, n, row)

    case = Case(little, 0, 8, 1300, kind, kind)
    llm = measure.load(case)
    first = measure.tokens(llm, FIRST)
    llm.eval(first)
    _, rows = parts(llm, FIRST)
    llm.reset()
    fill.fill(llm, first, case.n_depth)
    places, filled = parts(llm, case.n_depth)
    assert (places == np.arange(1300)).all() and llm.n_tokens == 1300
    assert (filled == rows[:, np.arange(1300) % FIRST]).all()
    measure.write(llm, several.Alone(llm, 1), 8, 1)
    assert llm.kv_stats().n_seen == 1308


@pytest.mark.parametrize("method", ["snapkv", "pyramidkv", "score=keydiff,budget=pooled"])
def test_a_filled_store_holds_what_the_budget_gives_each_head_at_that_depth(little, method):
    case = Case(little, 0, 8, 1300, "q8_0", "f16", method, 0.2)
    read = measure.load(case)
    measure.read(read, several.Alone(read, 1), 1300)
    llm = measure.load(case)
    fill.fill(llm, measure.tokens(llm, FIRST), 1300)
    kept = llm.kv_stats().kept
    if "pooled" in method:  # spread as the first tokens' rows are, which is not known beforehand
        assert len(set(kept.flat)) > 1 and kept.min() > 0
    else:
        assert (kept == read.kv_stats().kept).all()
    assert kept.sum() == read.kv_stats().kept.sum() == n_kept(0.2, 1300, "q8_0,f16") * kept.size
    assert llm.kv_stats().n_bytes == pytest.approx(read.kv_stats().n_bytes, rel=1e-3)
    first = measure.load(case)
    first.eval(measure.tokens(first, FIRST))
    for il in range(len(kept)):
        for k in range(kept.shape[1]):
            for mine, theirs in zip(
                llm.engine.store.rows(il, k), first.engine.store.rows(il, k), strict=True
            ):
                assert (mine == theirs[np.arange(len(mine)) % len(theirs)]).all()
    measure.write(llm, several.Alone(llm, 1), 8, 1)
    assert llm.kv_stats().n_seen == 1308 and (llm.kv_stats().kept == kept + 8).all()


def test_rows_say_that_they_were_filled_and_show_no_peak(little):
    cases = lists(
        models=[little], n_prompt=[], n_gen=[8], n_depth=[256, 1300], full=["q8_0"], fill="repeat"
    ).cases()
    table = runner.run(cases, 1, warm_up=False)
    records = table.records()
    assert [r["kv_fill"] for r in records] == ["read", "read", "repeat", "repeat"], (
        "what is as short as the first tokens is read"
    )
    for r in records[2:]:
        assert r["note"] == fields.FILLED
        assert not (
            r["kv_bytes_peak"] or r["mem_peak_host"] or r["mem_computed_host"] or r["compress_ms"]
        )
        assert r["kv_tokens_full"] == 1308 and r["avg_ts"] > 0
    page = formats.as_md(records)
    assert page.startswith("Depths above 512 are filled")
    assert re.search(r"\| [\d.]+ \|  \|  \|", page)
    assert "no peak was measured" not in page.split("\n", 1)[1]
    assert records[1]["mem_peak_host"] and not formats.as_md(records[:2]).startswith("Depths")
    assert [x.memory is None for x in compare.ratios(table)] == [False, True]


@pytest.mark.parametrize("setting", [dict(kv_method="snapkv", kv_ratio=0.5), {}])
@pytest.mark.parametrize("kind", ["window", "recurrent"])
def test_caches_of_another_kind_are_not_filled(tiny, tmp_path, kind, setting):
    path = tiny("gemma3") if kind == "window" else write_recurrent(tmp_path / "recurrent.gguf")
    with pytest.raises(BadInput, match="leave --fill repeat out"):
        runner.sample(Case(str(path), 0, 4, 1300, fill="repeat", **setting), warm_up=False)


# ---- synthetic models


@pytest.mark.parametrize("kind", ["q4_0", "q8_0", "f16"])
def test_a_synthetic_model_has_its_shape_and_loads(tmp_path, text, kind):
    path = tmp_path / "m.gguf"
    shape = replace(synthetic.SHAPES["tiny"], qkv_bias=True, arch="qwen2", tied=False, n_layer=2)
    synthetic.write(path, shape, kind)
    tensors = {t.name: t for t in gguf.GGUFReader(str(path)).tensors}
    assert sum(t.n_bytes for t in tensors.values()) == synthetic.n_bytes(shape, kind)
    weights = gguf.quants.dequantize(
        tensors["blk.0.ffn_up.weight"].data, tensors["blk.0.ffn_up.weight"].tensor_type
    )
    assert weights.shape == (shape.n_ff, shape.n_embd)
    assert weights.std() == pytest.approx(1 / np.sqrt(shape.n_embd), rel=0.05)
    llm = load(path, kv_ratio=0.3)
    llm.eval([t for t in text(300)])
    assert llm.kv_stats().n_kept == 90 and llm.kv_stats().mode == "layers"


def test_shapes_have_the_weights_that_their_names_say():
    wanted = {
        "llama-1b": 1.24,
        "llama-3b": 3.21,
        "llama-8b": 8.03,
        "qwen-1.5b": 1.54,
        "qwen-7b": 7.62,
    }
    vocabularies = {
        "llama-1b": 128256,
        "llama-3b": 128256,
        "llama-8b": 128256,
        "qwen-1.5b": 151936,
        "qwen-7b": 152064,
    }
    for name, billions in wanted.items():
        shape = replace(synthetic.SHAPES[name], n_vocab=vocabularies[name])
        n = synthetic.n_bytes(shape, "f16") / 2
        assert n / 1e9 == pytest.approx(billions, abs=0.006), name


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3.5-0.8b", dict(n_delta=2, d_delta=32)),
        ("gemma4-1b", dict(n_window=32)),
        ("lfm2-moe-1b", dict(n_ff_expert=64)),
        ("deepseek2-1b", dict(n_head_kv=1, n_latent=64, n_rope=32, n_query=64)),
    ],
)
@pytest.mark.parametrize("kind", ["q4_0", "q8_0", "f16"])
def test_layers_of_several_kinds_load_and_are_compressed(
    tmp_path, monkeypatch, name, options, kind
):
    # beside llama.cpp's, whose activations have 8 bits: by what is rounded, experts change
    monkeypatch.setenv("EDGEKV_PRODUCTS", "0")
    monkeypatch.setenv("EDGEKV_ATTEND", "f32")
    shape = replace(
        synthetic.SHAPES[name],
        n_layer=12,
        n_embd=256,
        n_ff=128,
        n_head=4,
        d_head=64,
        n_vocab=512,
        **{"n_head_kv": 2, **options},
    )
    assert synthetic.n_bytes(synthetic.SHAPES[name], "q8_0") > 0.5e9
    path = tmp_path / "m.gguf"
    synthetic.write(path, shape, kind)
    llm, plain = load(path, kv_budget=1000), load(path)
    for model in (llm, plain):
        model.eval(list(range(6, 206)))
    assert llm.kv_stats().mode == "layers" and len(llm.engine.full_layers) == 12 // getattr(
        shape, "every", 1
    )
    assert np.isfinite(logits(llm)).all() and nmse(logits(llm), logits(plain)) < 1e-2
    llm.kv_set(ratio=0.2)
    llm.reset()
    llm.eval(list(range(6, 206)))
    assert llm.kv_stats().n_kept == 40


@pytest.mark.parametrize(("text", "says"), [("gpt-5", "llama-1b"), ("llama-1b:q2_k", "q4_0")])
def test_unknown_shapes_are_refused(text, says):
    with pytest.raises(BadInput, match=says):
        synthetic.parse(text)


def test_a_disk_without_room_is_said_before_writing(tmp_path, monkeypatch):
    from collections import namedtuple

    monkeypatch.setattr(
        synthetic.shutil, "disk_usage", lambda _: namedtuple("Usage", "total used free")(1, 1, 1000)
    )
    with pytest.raises(BadInput, match="TMPDIR"):
        synthetic.write(tmp_path / "m.gguf", synthetic.SHAPES["llama-8b"])
    assert not list(tmp_path.iterdir())


# ---- the command


def call(line: str = "", *words: str):
    return typed(f"bench {line}", *words)


@pytest.fixture
def quick(monkeypatch):
    """Samples without a process; `quick.seen` are the cases."""

    class Quick:
        seen: list[Case] = []
        learned: list[tuple[str, str]] = []

    def sample(case: Case, warm_up: bool = True, verbose: bool = False):
        Quick.seen.append(case)
        return {
            **SAMPLE,
            "method": case.kv_method,
            "kv_tokens_full": case.n_depth + case.n_prompt + case.n_gen,
            "read_bytes_weights": 5000 * case.only_writes,
        }

    Quick.seen, Quick.learned = [], []
    monkeypatch.setattr(runner, "sample", sample)
    monkeypatch.setattr(runner, "bandwidth", lambda n_threads: 1e10)
    monkeypatch.setattr(
        "edgekv.commands.first_use.make_profile",
        lambda engine, path, threads: Quick.learned.append((engine.kv.method, path)),
    )
    return Quick


def test_the_command_writes_every_form(little, quick):
    assert json.loads(call(f"-m {little} -r 1 -o json").stdout)[0]["model_filename"] == little
    for form in ("csv", "jsonl", "sql", "md"):
        assert call(f"-m {little} -r 1 -o {form}").exit_code == 0


def test_flags_reach_the_rows(little, quick):
    done = call(
        f"-m {little} -p 8,16 -p 32 -n 0 -pg 4,2 -d 64 -b 128 -ub 64 -ctk q8_0 -ctv q4_0 -t 3 "
        "-ngl 0 -fa off --kv-ratio 0.5,0.1 --kv-method snapkv,tova --kv-hidden disk "
        "--full none -r 2"
    )
    assert done.exit_code == 0, done.output
    assert len(quick.seen) == 4 * 4 * 2
    assert quick.seen[0] == Case(
        little, 8, 0, 64, "q8_0", "q4_0", "snapkv", 0.5, "disk", 128, 64, 3, 0, "off"
    )
    assert {(c.n_prompt, c.n_gen) for c in quick.seen} == {(8, 0), (16, 0), (32, 0), (4, 2)}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], ["f16"]),
        (["-ctk", "q8_0,q4_0"], ["q8_0/f16", "q4_0/f16"]),
        (["-ct", "q8_0,q4_0"], ["q8_0", "q4_0"]),
        (["-ctk", "f16,q8_0", "-ctv", "f16,q4_0"], ["f16", "f16/q4_0", "q8_0/f16", "q8_0/q4_0"]),
    ],
)
def test_cache_types_combine_as_in_llama_bench_or_go_in_pairs(little, quick, flags, expected):
    assert call(f"-m {little} -r 1 -n 0 --full none --kv-method snapkv", *flags).exit_code == 0
    assert [c.setting.split(" x ")[0] for c in quick.seen] == expected


def test_the_default_row_is_the_products_beside_full_caches(little, quick):
    assert call(f"-m {little} -r 1 -p 16 -n 0").exit_code == 0
    assert [c.setting for c in quick.seen] == [
        "f16 full",
        "q8_0 full",
        "q4_0 full",
        "q8_0 x 0.2 auto",
    ]
    assert quick.learned == [("auto", little)], "as a chat would on its first use"


def test_methods_that_are_named_store_what_a_chat_would(little, quick):
    assert (
        call(
            f"-m {little} -r 1 -p 16 -n 0 --full none --kv-method auto,snapkv --kv-ratio 1,0.2"
        ).exit_code
        == 0
    )
    assert [c.setting for c in quick.seen] == ["f16 full", "q8_0 x 0.2 auto", "f16 x 0.2 snapkv"]


def test_types_that_a_models_heads_cannot_have_are_not_among_the_default_rows(quick, tmp_path):
    path = tmp_path / "m.gguf"
    synthetic.write(
        path, replace(synthetic.SHAPES["tiny"], d_head=80, n_embd=320, n_layer=1), "f16"
    )
    assert call(f"-m {path} -r 1 -p 16 -n 0").exit_code == 0
    assert [c.setting for c in quick.seen] == ["f16 full", "f16 x 0.2 auto"]


def test_more_tokens_than_the_model_was_trained_with_are_one_line(little, quick):
    done = call(f"-m {little} -r 1 -p 0 -n 8 -d 9000 --full none")
    assert done.exit_code == 0
    assert re.findall(
        "edgekv: 9,008 tokens are more than the 8,192 that .* was trained with", done.stderr
    )
    assert "trained with" not in call(f"-m {little} -r 1 -p 0 -n 8 -d 8000 --full none").stderr


def test_compare_and_equal_bytes_print_ratios(little, quick):
    assert "95 % interval" in call(f"-m {little} -r 1 --compare").stdout
    done = call(f"-m {little} -r 1 -p 16 -n 0 --equal-bytes --kv-method snapkv -o csv")
    assert [c.setting for c in quick.seen[-5:]] == [
        "q8_0 full",
        "f16 x 0.5312 snapkv",
        "q4_0 full",
        "q8_0 x 0.2812 snapkv",
        "f16 x 0.2812 snapkv",
    ]
    assert "95 % interval" in done.stderr and "95 % interval" not in done.stdout


def test_what_is_complete_is_shown_after_an_error(little, monkeypatch, quick):
    count = iter(range(100))
    real = runner.sample

    def fails(case, warm_up=True, verbose=False):
        if next(count) == 5:
            raise EdgeKVError("no more")
        return real(case, warm_up)

    monkeypatch.setattr(runner, "sample", fails)
    done = call(f"-m {little} -p 16 -n 0 -r 3 -o json")
    assert done.exit_code == 2 and "stopped after 1 of 3 rounds: no more" in done.stderr
    assert all(len(r["samples_ns"]) == 1 for r in json.loads(done.stdout))


def test_the_first_rounds_rows_are_shown_after_an_error(little, monkeypatch, quick):
    real = runner.sample

    def fails(case, warm_up=True, verbose=False):
        if case.kv_ratio == 0.1:
            raise BadInput("too large")
        return real(case, warm_up)

    monkeypatch.setattr(runner, "sample", fails)
    done = call(f"-m {little} -p 16 -n 0 --full f16 --kv-ratio 0.2,0.1 --kv-method snapkv -o json")
    assert done.exit_code == 2 and "in the first round, with 2 of 3 rows: too large" in done.stderr
    assert [r["kv_ratio"] for r in json.loads(done.stdout)] == [1, 0.2]
    assert call(f"-m {little} --kv-ratio 0.1 --full none --kv-method snapkv").exit_code == 2


def test_progress_without_a_terminal_is_a_line_for_each_sample(little, quick):
    done = call(f"-m {little} -p 16 -n 0 --full q8_0 --kv-method snapkv -r 2")
    assert done.stderr.splitlines() == [
        f"edgekv: {i} of 4: pp16, {x}"
        for i, x in enumerate(["q8_0 full", "f16 x 0.2 snapkv", "f16 x 0.2 snapkv", "q8_0 full"], 1)
    ]


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_bench_leaves_no_process_and_no_model(tmp_path, sign):
    words = ["bench", "--synthetic", "tiny", "-p", "8000", "-n", "0", "-r", "99", "--full", "none"]
    # not in the checkout, whose edgekv has no library
    with subprocess.Popen(
        [sys.executable, "-m", "edgekv", *words],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as bench:
        next(line for line in bench.stderr if "1 of 99" in line)
        sample = sample_of(bench.pid)
        if sign == signal.SIGINT:
            os.killpg(bench.pid, sign)  # a terminal's Ctrl-C reaches every process
        else:
            bench.send_signal(sign)
        rest = bench.communicate(timeout=60)[1]
    assert bench.returncode == (130 if sign == signal.SIGINT else 143)
    assert not list(tmp_path.iterdir()) and not sample.is_running()
    assert "Traceback" not in rest, rest


def test_a_sample_that_hears_of_ctrl_c_first_ends_the_bench_alike(monkeypatch):
    monkeypatch.setattr(
        subprocess,
        "run",
        lambda *args, **options: subprocess.CompletedProcess([], -signal.SIGINT, ""),
    )
    with pytest.raises(KeyboardInterrupt):
        runner.child("measure", CASE)


def sample_of(pid: int) -> psutil.Process:
    """The process of the sample in work, once it has loaded more than Python."""
    for _ in range(600):
        for process in psutil.Process(pid).children():
            if (
                process.memory_info().rss > 2**25 and "-c" in process.cmdline()
            ):  # before that it is a copy of its parent
                return process
        time.sleep(0.1)
    raise AssertionError("no sample began")


def test_long_writes_a_page_and_plots(little, quick, tmp_path):
    pytest.importorskip("matplotlib")
    done = call(
        f"-m {little} -d 128,256 -r 2 --long --out {tmp_path / 'out'} --kv-method snapkv --full f16"
    )
    assert done.exit_code == 0, done.output
    assert (
        sorted(p.name for p in (tmp_path / "out").iterdir())
        == """
        long-bytes.png long-memory.png long-speed.png long.json long.md
    """.split()
    )
    page = (tmp_path / "out" / "long.md").read_text()
    assert "| 128 | f16 full |" in page
    assert "| 256 | f16 x 0.2 snapkv |" in page
    assert "long-speed.png" in page
    assert {c.n_depth for c in quick.seen} == {128, 256}
    assert {c.n_gen for c in quick.seen} == {long.N_GEN}


@pytest.mark.slow
def test_a_long_page_of_filled_contexts_is_about_writing_alone(little, tmp_path):
    pytest.importorskip("matplotlib")
    done = call(
        f"-m {little} -d 1024 -r 1 --long --out {tmp_path / 'out'} --kv-method snapkv "
        "--full f16 --fill repeat"
    )
    assert done.exit_code == 0, done.output
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "long-bytes.png",
        "long-speed.png",
        "long.json",
        "long.md",
    ]
    page = (tmp_path / "out" / "long.md").read_text()
    assert "| 1,024 | f16 x 0.2 snapkv |" in page
    assert "--fill repeat" in page
    assert "process MiB" not in page
    assert "read, tokens/s" not in page


def test_long_leaves_out_what_does_not_fit(little, monkeypatch):
    from edgekv.base import machine

    wish = lists(models=[little], full=["f16"])
    assert long.depths_that_fit(wish, []) == [4096, 8192]
    with monkeypatch.context() as patch:
        patch.setattr(machine, "memory_free", lambda: 2**30 + machine.rss_now() + 20 * 2**20)
        assert long.depths_that_fit(wish, [1024, 8192]) == [1024]
        patch.setattr(machine, "memory_free", lambda: 2**30)
        with pytest.raises(BadInput, match="smaller -d"):
            long.depths_that_fit(wish, [])


def test_needles_stand_beside_the_rows(little, quick, monkeypatch):
    asked = []
    monkeypatch.setattr(
        runner,
        "needles",
        lambda case, n_tokens, n_cases: asked.append((case.setting, n_tokens, n_cases)) or "3/4",
    )
    done = call(
        f"-m {little} -r 1 -p 16 -n 8 -d 900 --full q4_0 --kv-method snapkv --eval needle "
        "--eval-cases 4 -o json"
    )
    assert {r["eval_needle"] for r in json.loads(done.stdout)} == {"3/4"}
    assert asked == [("q4_0 full", 900, 4), ("f16 x 0.2 snapkv", 900, 4)], "once for each setting"


@pytest.mark.parametrize("setting", [dict(kv_method="snapkv", kv_ratio=0.5), {}])
def test_needles_are_asked_in_a_process_of_their_own(tiny, setting):
    hits, n = runner.needles(Case(str(tiny("llama-gqa")), 0, 0, 0, **setting), 600, 2).split("/")
    assert 0 <= int(hits) <= int(n) == 2


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "--synthetic llama-1b"),
        (["-m", "M", "-p", "x"], "512-4096*2"),
        (["-m", "M", "-p", "0", "-n", "0"], "above 0"),
        (["-m", "M", "-ctk", "q3"], "q4_0"),
        (["-m", "M", "--kv-ratio", "20"], "0.2"),
        (["-m", "M", "--kv-method", "magic"], "snapkv"),
        (["-m", "nowhere.gguf"], "nowhere.gguf"),
        (["-m", "M", "-pg", "5"], "512,128"),
        (["-m", "M", "-t", "0"], "from 1"),
        (["--synthetic", "gpt"], "llama-1b"),
        (["--synthetic", "tiny", "--eval", "needle"], "--eval"),
        (["-m", "M", "-ct", "f16", "-ctk", "f16"], "alike"),
        (["-m", "M", "--fill", "repeat"], "-p 0"),
        (["-m", "M", "-d", "100000000"], "at most"),
        (["-m", "M", "-d", "10^20"], "512-4096*2"),
        (["-m", "M", "-d", "1" + 20 * "0"], "512-4096*2"),
        (["-m", "M", "--long", "-p", "512"], "leave -p out"),
        (["-m", "M", "-m", "M", "--long"], "one value of -m"),
        (["-m", "M", "--long", "--out", "M"], "--out"),
        (["-m", "M", "--fill", "repeat", "-p", "0", "-fa", "off"], "-fa off"),
        (["-m", "M", "--fill", "x"], "repeat"),
        (["-m", "M", "-fa", "perhaps"], "on, off or auto"),
        (["-m", "M", "-npl", "0"], "from 1"),
        (["-m", "M", "--spec-type", "none"], "give -p 0"),
        (["-m", "M", "-p", "0", "--spec-type", "draft-simple"], "-md"),
        (["-m", "M", "-p", "0", "--spec-type", "magic"], "ngram-simple"),
        (["-m", "M", "-np", "1,32"], "at most 31"),
        (["-m", "M", "-npl", "2", "-n", "449"], "at most 448"),
        (["-m", "M", "-npl", "2", "--long"], "leave -npl out"),
        (["-m", "M", "-npl", "2", "--kv-recall", "0.05"], "leave -npl"),
        (["-m", "M", "--kv-recall", "0.05", "--long"], "leave --kv-recall out"),
        (["-m", "M", "--kv-recall", "auto"], "from 0 up to 1"),
        (["-m", "M", "--kv-recall", "1.5"], "from 0 up to 1"),
    ],
)
def test_mistakes_are_one_line(little, quick, args, says):
    done = call(*[little if x == "M" else x for x in args])
    assert says in refused(done)
    assert not quick.seen


def test_a_synthetic_model_is_measured_and_goes_away(quick):
    done = call("--synthetic tiny:q8_0 -p 8 -n 0 -r 1 -o json")
    assert done.exit_code == 0, done.output
    assert {c.kv_method for c in quick.seen if not c.is_full} == {"snapkv"}
    assert not Path(quick.seen[0].model).exists()


def test_the_lowest_of_a_number_is_seen_while_something_runs():
    from time import monotonic, sleep

    from edgekv_lab.bench.lowest import Lowest

    now = [100]
    with Lowest(lambda: now[0]) as lowest:
        now[0], end = 40, monotonic() + 10
        while lowest.value != 40 and monotonic() < end:
            sleep(0.01)
        now[0] = 0  # a device that does not say
        sleep(0.03)
        now[0] = 90
    assert lowest.value == 40
    with Lowest(lambda: now[0]) as lowest:
        now[0] = 30
    assert lowest.value == 30  # the end is looked at, however short it was


# ---- stages


def test_a_prompts_time_is_told_apart_by_what_it_went_to(tiny):
    words = "-p 1200 -n 0 -pg 40,2 -r 2 --kv-method snapkv --full q8_0 --stages"
    result = typed(f"bench -m {tiny('llama-q4')} {words}")
    assert result.exit_code == 0, result.output
    table = result.stdout[result.stdout.index("| test | setting | stage") :].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert {row[0] for row in rows} == {"pp1200"}, "a full cache, and what writes, have no stages"
    found = {row[2]: row[3:] for row in rows}
    products = {name for name in found if name.startswith("products with weights")}
    assert products and {"attention", "the rest", "all"} <= found.keys()
    assert sum(float(x[0]) for x in found.values()) == pytest.approx(
        2 * float(found["all"][0]), abs=0.06
    )
    for name in (*products, "attention"):
        assert int(found[name][3].rstrip("%")) >= 0 and found[name][2].endswith(" G")
    assert {name for name, x in found.items() if x[2]} == products | {"attention"}


def test_the_multiplications_of_a_prompt_are_counted(tiny, text):
    llm, n = load(tiny("llama-q4"), kv_ratio=0.3, n_ubatch=512), 300
    llm.eval(list(text(n)))
    work, info = llm.engine.turn.clock.work, llm.engine.store.layers[0]
    pairs = n * (n + 1) / 2 * info.n_head * (info.d_k + info.d_v) * len(llm.engine.store.layers)
    assert work["attention"][1] == pairs
    shapes = [t.shape for t in gguf.GGUFReader(tiny("llama-q4")).tensors if t.name[:4] == "blk."]
    weights = [int(a) * int(b) for a, b in (shape for shape in shapes if len(shape) == 2)]
    done = work["weights"][1] + work["levels"][1]
    assert 0.5 * n * sum(weights) < done <= n * sum(weights)
    assert all((ms > 0) == (count > 0) for ms, count in work.values())


@pytest.mark.parametrize(("method", "n_last"), [("snapkv", 100), ("h2o", 300)])
def test_of_the_last_layer_only_what_is_wanted_is_computed(tiny, text, method, n_last):
    """Its K and V, what is observed, and what the last token becomes: of 300 tokens in chunks of
    100, nobody asks what the first 200 become. The answer is that of one chunk.
    """
    work, found = [], []
    for n_ubatch in (100, 512):
        llm = load(tiny("llama-gqa"), kv_ratio=0.3, kv_method=method, n_ubatch=n_ubatch)
        llm.eval(list(text(300)))
        work.append(llm.engine.turn.clock.work["attention"][1])
        found.append(logits(llm))
    info, n_layer = llm.engine.store.layers[0], len(llm.engine.store.layers)
    all_pairs, skipped = 300 * 301 / 2, (300 - n_last) * (301 - n_last) / 2
    each = info.n_head * (info.d_k + info.d_v)
    assert work == [(n_layer * all_pairs - skipped) * each, n_layer * all_pairs * each]
    assert nmse(*found) < 1e-10


def test_stages_of_rows_that_read_nothing_are_one_line(tiny):
    words = "-p 0 -n 2 -r 1 --no-warmup --kv-method snapkv --full none --stages"
    result = typed(f"bench -m {tiny('llama-q4')} {words}")
    assert result.exit_code == 0 and result.stdout.splitlines()[-1].startswith("No row read")
