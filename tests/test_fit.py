"""fit: predictions against what is allocated, what is given up in which order, and what the command
says.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgekv import methods, native
from edgekv.base.machine import rss_now
from edgekv.base.sizes import size_text
from edgekv.commands import load as seam
from edgekv.commands.fit import Device, Report
from edgekv.conversation import parked
from edgekv.errors import BadInput
from edgekv.memory.fit import HIDDEN, PICKED, RATIOS, Planner, Wish
from edgekv.model.blueprint import Blueprint, Context
from edgekv.model.header import tensor_sizes
from edgekv.native import LayerInfo, ProductBytes
from tests import archs, models
from tests.cli import refused, typed
from tests.engine import TYPES, load, n_kept
from tests.quantized import quantize
from tests.recurrent import write as write_recurrent

N_CTX = 1280
PEAK_ABOVE, PEAK_SPARE = 1.01, 64 * 1024
"""How far a predicted peak of the cache may lie above the real one; never below."""


# ---- against the library


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0,f16"])
@pytest.mark.parametrize("name", models.ARCHITECTURES)
def test_a_point_has_the_bytes_that_a_prompt_then_takes(tiny, text, name, kind):
    kinds = tuple((kind.split(",") * 2)[:2])
    with Blueprint(str(tiny(name)), n_ubatch=256) as blueprint:
        planner = Planner(
            blueprint, methods.get("snapkv"), Wish(2**40, N_CTX, min_tokens=1), n_ubatch=256
        )
        for ratio, hidden in ((0.5, "f32"), (0.1, "f16")):
            point = planner.point(N_CTX, ratio, kinds, hidden)
            llm = load(tiny(name), kind, kv_ratio=ratio, kv_hidden=hidden, n_ctx=N_CTX)
            llm.eval(list(text(N_CTX)))
            stats = llm.kv_stats()
            expected = n_kept(
                ratio, N_CTX, kind, d_head=models.SHAPES[name].d_head, alibi=name == "refact"
            )
            assert (point.n_kept, point.kv) == (expected, stats.n_bytes)
            reading = point.peak - point.weights - point.compute
            assert (
                stats.n_bytes_peak
                <= reading
                <= max(PEAK_ABOVE * stats.n_bytes_peak + PEAK_SPARE, point.kv + point.tail)
            )
        layers = blueprint.context(True, N_CTX, TYPES[kinds[0]], TYPES[kinds[1]]).layers
        assert layers == tuple(llm.engine.store.layers)


@pytest.mark.parametrize("name", ["llama-gqa", "qwen2", "gemma3"])
def test_a_point_of_a_fast_prefill_has_them_too(tiny, text, name):
    with Blueprint(str(tiny(name)), n_ubatch=256) as blueprint:
        wish = Wish(2**40, N_CTX, [1.0], fast_prefill=True)
        point = Planner(blueprint, methods.get("snapkv"), wish, n_ubatch=256).best(N_CTX)
    llm = load(tiny(name), kv_fast_prefill=True, kv_hidden="auto", n_ctx=N_CTX)
    llm.eval(list(text(N_CTX)))
    stats = llm.kv_stats()
    assert (point.n_kept, point.kv, point.hidden) == (N_CTX, stats.n_bytes, stats.hidden)
    reading = point.peak - point.weights - point.compute
    assert (
        stats.n_bytes_peak
        <= reading
        <= max(PEAK_ABOVE * stats.n_bytes_peak + PEAK_SPARE, point.kv + point.tail)
    )


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize("name", ["llama-gqa", "gemma3"])
def test_a_point_within_a_limit_has_the_rows_that_stay_then(tiny, text, name, kind):
    with Blueprint(str(tiny(name)), n_ubatch=256) as blueprint:
        plan = Planner(blueprint, methods.get("snapkv"), Wish(2**40, N_CTX), n_ubatch=256)
        half = plan.point(N_CTX, 0.5, (kind, kind), "auto")
        limit = 3 * (half.kv + half.tail) // 4
        plan = Planner(blueprint, methods.get("snapkv"), replace(plan.wish, memory=limit), 256)
        point = plan.point(N_CTX, 1.0, (kind, kind), "auto")
        report = Report(plan, "m", "m", Device("CPU", False, 0, 0), 2**40, 0).text()
    llm = load(tiny(name), kind, kv_memory=limit, kv_hidden="auto", n_ctx=N_CTX, after=text(N_CTX))
    stats = llm.kv_stats()
    assert (point.n_kept, point.kv, point.hidden) == (stats.n_kept, stats.n_bytes, stats.hidden)
    assert point.limited and point.ratio == pytest.approx(stats.ratio, abs=1e-3)
    assert stats.n_bytes_peak <= point.peak - point.weights - point.compute
    assert "--kv-ratio" not in point.command("m", False)
    assert "--kv-fast-prefill" not in point.command("m", False)
    assert "of the tokens" in report and "quality: not measured" in report


def test_a_limit_that_holds_everything_changes_no_point():
    usual, wide = planner(2**40).best(4096), planner(2**40, memory=2**40).best(4096)
    assert (usual.ratio, usual.n_kept) == (wide.ratio, wide.n_kept) == (1.0, 4096)
    assert not wide.limited


def test_memory_for_products_is_bounded_in_the_plan_too(demo_model):
    with Blueprint(str(demo_model)) as blueprint:
        plans = [
            Planner(blueprint, methods.get("snapkv"), Wish(2**40, 4096, prefill_memory=most))
            for most in (None, 2**20)
        ]
        free, bounded = (p.point(4096, 0.2, ("f16", "f16"), "f32") for p in plans)
        more = sum(blueprint.product_bytes(4096, 512)) - 2**20
    assert free.inputs - bounded.inputs == more > 0


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize("name", ["llama-gqa", "llama-d128", "qwen3"])
def test_llama_cpps_own_cache_is_predicted_too(tiny, name, kind):
    with Blueprint(str(tiny(name))) as blueprint:
        context = blueprint.context(False, 2048, TYPES[kind], TYPES[kind])
    assert context.cache == load(tiny(name), kind, n_ctx=2048).kv_stats().n_bytes
    assert not context.layers and context.compute > 0


@pytest.mark.parametrize("name", ["llama-gqa", "falcon-h1", "lfm2", "qwen35"])
def test_other_answers_have_the_bytes_that_they_then_take(tiny, tmp_path, text, name):
    """Conversations that wait, and the cells that recurrent layers have for each."""
    n = 4
    if name in models.SHAPES:
        source = tiny(name)
    else:
        source = min(archs.write(tmp_path, f"^{name}$").glob(f"{name}-*e*.gguf"))
    path = quantize(source, tmp_path / "quantized.gguf")
    with Blueprint(str(path), n_ubatch=256) as blueprint:
        wish = Wish(2**40, N_CTX, min_tokens=1, parallel=n)
        alone, point = (
            Planner(blueprint, methods.get("snapkv"), one, 256).point(
                N_CTX, 0.5, ("f16",) * 2, "f32"
            )
            for one in (replace(wish, parallel=1), wish)
        )
        together = blueprint.rows_alike
    llm = load(path, n_ctx=N_CTX, kv_ratio=0.5, kv_method="snapkv", kv_min_tokens=1)
    before, _ = native.context_bytes(llm.ctx)
    llm.write_together(n, None)
    cache, compute = native.context_bytes(llm.ctx)
    assert together == native.rows_alike(llm.model)
    # of the engine, which has the logits of more tokens
    assert 0 <= compute - point.compute <= 4096
    waiting = []
    for _ in range(n - 1):
        llm.eval([token % 100 + 6 for token in text(N_CTX)])
        waiting.append(parked.park(llm))
        llm.reset()
    real = cache - before + sum(x.n_bytes for x in waiting)
    assert 0 <= point.others - real <= (n - 1) * point.tail
    assert alone.others == 0
    assert point.peak - alone.peak == point.others + point.compute - alone.compute
    llm.close()


@pytest.mark.parametrize("compressed", [False, True])
def test_compute_buffers_are_those_that_a_context_then_has(tiny, compressed):
    with Blueprint(str(tiny("llama-gqa")), n_ubatch=256) as blueprint:
        context = blueprint.context(
            compressed,
            N_CTX,
            TYPES["f16"],
            TYPES["f16"],
            n_outputs=native.OUTPUTS if compressed else 512,
        )
    llm = load(tiny("llama-gqa"), n_ctx=N_CTX, kv_ratio=0.5 if compressed else 1.0)
    cache, compute = native.context_bytes(llm._ctx.ctx)
    assert compute == context.compute and cache == context.cache


def test_a_model_that_cannot_be_compressed_has_only_ratio_1(tmp_path):
    path = tmp_path / "recurrent.gguf"
    write_recurrent(path)
    with Blueprint(str(path)) as blueprint:
        assert blueprint.why
        ways = list(Planner(blueprint, methods.get("snapkv"), Wish(2**40, N_CTX)).ways(N_CTX))
    assert ways and {p.ratio for p in ways} == {1.0}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "ratio"), [("f16", 1.0), ("q8_0", 0.2)])
def test_the_processs_peak_is_within_5_percent_of_the_plan(demo_model, tmp_path, kind, ratio):
    from edgekv_lab.bench.runner import sample
    from edgekv_lab.bench.spec import Case

    line = f"fit -m {demo_model} -c 1024 -ctk {kind} --ratios {ratio:g} --kv-method snapkv "
    words = [*line.split(), "--memory", "64GiB", "--json"]
    # its size is part of the plan
    done = subprocess.run(
        [sys.executable, "-m", "edgekv", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    measured = sample(Case(str(demo_model), 1000, 0, 0, kind, kind, "snapkv", ratio))[
        "mem_peak_host"
    ]
    assert measured == pytest.approx(json.loads(done.stdout)["best"]["peak"], rel=0.05)


# ---- what is given up, in order


class FakeBlueprint:
    """A model of 32 layers at the public face of `Blueprint`."""

    weights, n_embd, n_ctx_train, why, on_host = 4 * 2**30, 4096, 131072, "", 281 * 2**20
    experts = 0
    rows_alike = False
    shape = {"d_head_k": 128, "d_head_v": 128, "v_in_k": False}

    def product_bytes(self, n_tokens: int, n_ubatch: int, most: int | None = None) -> ProductBytes:
        return ProductBytes()  # no weight is quantised

    def context(
        self,
        compressed: bool,
        n_ctx: int,
        type_k: int,
        type_v: int,
        n_outputs: int = 1,
        n_seq_max: int = 1,
    ) -> Context:
        from edgekv.memory.footprint import row_bytes

        layers = [
            LayerInfo(
                32, 8, 128, 128, type_k, type_v, 0, row_bytes(type_k, 128) + row_bytes(type_v, 128)
            )
        ] * 32
        full = sum(x.bytes_row * x.n_head_kv * n_ctx for x in layers)
        return Context(tuple(layers) if compressed else (), 100 * 2**20, full)


def planner(n_bytes: int, n_ctx: int = 32768, **more) -> Planner:
    return Planner(FakeBlueprint(), methods.get("snapkv"), Wish(n_bytes, n_ctx, **more))


def test_the_sum_is_the_one_in_the_design():
    """Llama-3-8B at 32K, a fifth kept: 0.8 + 0.13 + 0.5 GiB instead of 4.0; as q8_0 the layer is
    smaller.
    """
    for kind, parts in (("f16", (0.8, 0.125, 0.5, 4.0)), ("q8_0", (0.8, 0.066, 0.5, 4.0))):
        point = planner(0).point(32768, 0.2, (kind, kind), "f32")
        got = (point.kv, point.layer, point.hidden_bytes, point.kv_full)
        assert [x / 2**30 for x in got] == pytest.approx(parts, rel=0.01)
        assert (
            point.peak
            >= point.weights
            + point.compute
            + point.kv * 31 // 32
            + point.layer
            + point.hidden_bytes
        )


def test_on_a_gpu_what_lies_in_main_memory_is_no_part_of_the_peak():
    """Llama-3-8B at 32K, ubatches of 512: 31/32 or all of the kept rows, one layer, a mask of 512 x
    (32768 + 512 + 255) halves, 32 queries and a sum for each row.
    """
    preset, wish = methods.get("snapkv"), Wish(0, 32768)
    here, there = (
        Planner(FakeBlueprint(), preset, wish, on_gpu=x).point(32768, 0.2, ("f16", "f16"), "f32")
        for x in (False, True)
    )
    assert (here.masks, here.host_weights, there.masks, there.host_weights) == (
        0,
        0,
        2 * 512 * (32768 + 512 + 255) + 4 * (32 * 128 * 32 + 8 * 32768),
        281 * 2**20,
    )
    assert there.weights == here.weights - there.host_weights == 4 * 2**30 - 281 * 2**20
    assert (there.kv, there.layer, there.hidden_bytes, there.inputs) == (
        here.kv,
        here.layer // 32768 * (32768 + 255),
        here.hidden_bytes,
        here.inputs,
    )
    assert there.peak == there.weights + there.compute + max(
        there.kv + there.layer + there.masks, there.kv + there.tail
    )
    assert (
        here.peak
        == here.weights
        + here.compute
        + here.kv * 31 // 32
        + here.layer
        + here.hidden_bytes
        + here.inputs
    )
    dense = Planner(FakeBlueprint(), preset, wish, on_gpu=True).point(
        32768, 0.2, ("q8_0", "q8_0"), "f32"
    )
    assert dense.masks == there.masks + 2 * (32768 + 255) * 8 * (128 + 128), (
        "CUDA's flash attention makes f16 of the layer"
    )
    waiting = Planner(FakeBlueprint(), preset, wish, on_gpu=True).point(
        32768, 0.2, ("f16", "f16"), "device"
    )
    assert waiting.peak == there.peak + there.hidden_bytes - there.kv // 32
    full = Planner(FakeBlueprint(), preset, wish, on_gpu=True).point(
        32768, 1.0, ("f16", "f16"), "f32"
    )
    assert full.peak == there.weights + full.kv + full.compute and full.masks == 0
    recalls = Planner(FakeBlueprint(), preset, replace(wish, recall=0.05), on_gpu=True).point(
        32768, 0.2, ("f16", "f16"), "f32"
    )
    assert recalls.index > 0 and recalls.kv == pytest.approx(there.kv, rel=0.01)
    assert recalls.peak == there.peak + (recalls.kv - recalls.index) - there.kv
    plan = Planner(FakeBlueprint(), preset, replace(wish, n_bytes=there.peak), on_gpu=True)
    assert plan.best(32768) == replace(there, chosen=True)  # states in a file would not help it
    wish = replace(wish, n_bytes=waiting.peak, ratios=[0.2])
    plan = Planner(FakeBlueprint(), preset, wish, on_gpu=True)
    assert plan.best(32768) == replace(waiting, chosen=True)  # there is room for them


@pytest.mark.parametrize("name", ["llama-gqa", "gemma3", "qwen2", "refact"])
def test_the_token_table_stays_in_main_memory_unless_the_output_shares_it(tiny, name):
    import gguf

    sizes = {t.name: int(t.n_bytes) for t in gguf.GGUFReader(str(tiny(name))).tensors}
    assert tensor_sizes(tiny(name)) == sizes
    with Blueprint(str(tiny(name))) as blueprint:
        assert blueprint.on_host == (sizes["token_embd.weight"] if "output.weight" in sizes else 0)


def test_sizes_are_found_behind_any_kind_of_value(tmp_path):
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "llama")
    for kind, value in (
        ("uint8", 1),
        ("int16", -2),
        ("uint32", 3),
        ("float32", 0.5),
        ("bool", True),
        ("string", "ä" * 9),
        ("uint64", 4),
        ("float64", 0.1),
    ):
        getattr(writer, f"add_{kind}")(f"a.{kind}", value)
    writer.add_array("a.words", ["x", "yy", ""])
    writer.add_array("a.numbers", [1, 2, 3])
    writer.add_array("a.truths", [True, False])
    writer.add_tensor("token_embd.weight", np.zeros((3, 5), np.float16))
    writer.add_tensor(
        "output.weight", np.zeros((2, 18), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q4_0
    )
    models.finish(writer)
    assert tensor_sizes(tmp_path / "x.gguf") == {"token_embd.weight": 30, "output.weight": 36}


@settings(deadline=None, max_examples=40)
@given(st.integers(4 * 2**30, 10 * 2**30), st.sampled_from([4096, 32768, 131072]))
def test_the_context_stays_then_the_ratio_falls(n_bytes, n_ctx):
    plan = planner(n_bytes, n_ctx)
    best = plan.best(n_ctx)
    order = [("f16", r, h) for r in RATIOS for h in (HIDDEN if r < 1 else ("auto",))]
    # only as full caches: a ratio is of bytes
    order += [("q8_0", 1.0, "auto"), ("q4_0", 1.0, "auto")]
    fitting = [x for x in order if plan.point(n_ctx, x[1], (x[0], x[0]), x[2]).peak <= n_bytes]
    if best:
        way = "auto" if best.chosen else best.hidden
        assert (best.n_ctx, (best.type_k, best.ratio, way)) == (n_ctx, fitting[0])
    else:
        assert not fitting
        longest = plan.largest()
        assert (
            longest is None
            or longest.n_ctx < n_ctx
            and longest.fits(n_bytes)
            and not plan.best(longest.n_ctx + 256)
        )


def test_a_method_is_looked_up_once_for_each_ratio():
    """`auto` reads the model's file and its profile for that."""
    asked: list[float] = []

    def auto(ratio: float) -> methods.Preset:
        asked.append(ratio)
        return methods.get("snapkv")

    shape = FakeBlueprint.shape | {"mode": "layers"}
    blueprint = FakeBlueprint()
    blueprint.shape = shape
    plan = Planner(blueprint, methods.get("snapkv"), Wish(2**20, 32768, types=[PICKED]), auto=auto)
    assert plan.best(32768) is None and plan.largest() is None
    assert sorted(asked) == sorted(r for r in RATIOS if r < 1)


def test_no_more_is_planned_than_the_model_was_trained_with():
    plan = planner(2**40, 262144)
    report = Report(plan, "m", "m", Device("CPU", False, 0, 0), 2**40, 0)
    assert report.best.n_ctx == max(plan.contexts()) == FakeBlueprint.n_ctx_train
    text = report.text()
    assert "trained with 131,072 tokens" in text and "262144" not in text.split("use:")[1]
    assert report.record()["n_ctx_wanted"] == 262144


def test_the_plan_chooses_as_the_engine_does(tiny, text):
    for name, way in (("llama-gqa", "f16"), ("qwen2", "whole")):
        with Blueprint(str(tiny(name)), n_ubatch=256) as blueprint:
            plan = Planner(
                blueprint, methods.get("snapkv"), Wish(2**40, N_CTX, [0.3], min_tokens=1), 256
            )
            point = plan.best(N_CTX)
            report = Report(plan, "m", "m", Device("CPU", False, 0, 0), 2**40, 0).text()
        llm = load(tiny(name), kv_ratio=0.3, kv_hidden="auto", n_ctx=N_CTX, after=text(N_CTX))
        stats = llm.kv_stats()
        assert point.hidden == stats.hidden == way
        assert point.n_ctx == N_CTX and "--kv-hidden" not in point.command("m", False)
        assert stats.n_bytes_peak <= point.peak - point.weights - point.compute
        parts = "all layers in full" if way == "whole" else r"hidden states \(f16\)"
        assert re.search(parts, report) and f" {way}: " in report


def test_types_that_were_asked_for_are_not_replaced():
    plan = planner(5 * 2**30, types=[("f16", "q8_0")])
    assert {(p.type_k, p.type_v) for p in plan.ways(4096)} == {("f16", "q8_0")}


def test_types_that_the_heads_cannot_have_are_left_out(monkeypatch):
    monkeypatch.setattr(
        FakeBlueprint, "shape", FakeBlueprint.shape | {"d_head_k": 80, "d_head_v": 80}
    )
    assert {p.type_k for p in planner(2**40).ways(4096)} == {"f16"}
    with pytest.raises(BadInput, match="80 values"):
        list(planner(2**40, types=[("q8_0", "q8_0")]).ways(4096))


def test_the_command_line_says_all_that_differs_from_the_defaults():
    point = planner(0).point(4096, 0.2, ("q8_0", "q4_0"), "disk")
    assert (
        point.command("a b.gguf", False)
        == "edgekv chat -m 'a b.gguf' -c 4096 --kv-ratio 0.2 -ctk q8_0 -ctv q4_0 --kv-hidden disk"
        " -ngl 0"
    )
    assert (
        replace(point, ratio=1.0, type_k="f16", type_v="f16").command("m", True)
        == "edgekv chat -m m -c 4096 --kv-fast-prefill --kv-hidden disk -ngl all"
    )
    point = planner(0).point(4096, 1.0, ("f16", "f16"), "auto")
    assert point.command("m", True) == "edgekv chat -m m -c 4096 -ngl all"


def test_no_layers_on_a_gpu_are_named_where_the_build_knows_none(tiny):
    with Blueprint(str(tiny("llama-gqa"))) as blueprint:
        point = Planner(blueprint, methods.get("snapkv"), Wish(2**40, N_CTX)).point(
            N_CTX, 1.0, ("f16", "f16"), "f32"
        )
    assert "-ngl" not in point.command("m", on_gpu=False, has_gpu=False)
    assert point.command("m", on_gpu=False, has_gpu=True).endswith("-ngl 0")


# ---- the command


def call(line: str = "", *words: str):
    return typed(f"fit {line}", *words)


def test_the_command_prints_a_plan_and_the_command_line(tiny):
    done = call(f"-m {tiny('llama-gqa')} --memory 2GiB -c 4000 --kv-method snapkv")
    assert done.exit_code == 0, done.output
    assert "4,096 tokens, all tokens kept" in done.output and "use: edgekv chat -m " in done.output
    assert "(1: all)" in done.stdout and re.search(r"^4,096 +1: \d+\.\d MiB", done.stdout, re.M)


def test_a_limit_for_the_cache_is_planned_for_and_typed(tiny):
    line = f"-m {tiny('llama-gqa')} --memory 2GiB -c 4096 --kv-method snapkv --json"
    best = json.loads(call(line + " --kv-memory 1MiB").stdout)["best"]
    assert best["kv"] + best["tail"] <= 2**20 and best["n_kept"] < 4096
    assert best["command"].endswith(" --kv-memory 1048576")
    assert "kv_memory" in refused(call(line + " --kv-memory 1KiB"))


@pytest.mark.parametrize("option", ["--kv-window", "--kv-tail"])
def test_new_tokens_that_wait_are_planned_for_and_typed(tiny, option):
    line = f"-m {tiny('llama-gqa')} --memory 2GiB -c 4096 --ratios 0.5 --kv-method snapkv --json"
    usual, long = (json.loads(call(line + more).stdout) for more in ("", f" {option} 900"))
    assert option not in usual["best"]["command"]
    assert long["best"]["command"].endswith(f" {option} 900")
    assert long["best"]["tail"] > usual["best"]["tail"], "as many new tokens wait behind the prompt"


def test_an_archive_and_its_index_are_planned_for_and_typed(tiny):
    line = f"-m {tiny('llama-gqa')} --memory 2GiB -c 4096 --kv-method snapkv --json"
    usual, with_index = (
        json.loads(call(f"{line} --ratios {ratios} {more}").stdout)
        for ratios, more in (("0.2", ""), ("1,0.2,0.02", "--kv-recall 0.05"))
    )
    assert usual["best"]["archive"] == 0
    points = {x["ratio"]: x for x in with_index["points"] if x["n_ctx"] == 4096}
    assert set(points) == {1.0} and "--kv-recall" not in points[1.0]["command"]
    best = json.loads(call(f"{line} --ratios 0.2 --kv-recall 0.05").stdout)["best"]
    assert best["command"].endswith(" --kv-recall 0.05")
    assert best["archive"] == best["kv_full"] and best["index"] > 0
    assert best["n_kept"] < usual["best"]["n_kept"]
    assert best["kv"] == pytest.approx(usual["best"]["kv"], rel=0.01)
    refused = call(f"{line} --ratios 0.02 --kv-recall 0.05")
    assert refused.exit_code == 2


@pytest.mark.slow
def test_quality_says_what_was_measured_and_no_more(demo_model):
    done = call(f"-m {demo_model} --memory 8GiB -c 8192 --ratios 0.2")
    (quality,) = re.findall(r"^quality: (.*)$", done.stdout, re.M)
    assert quality.startswith("0.2 on this model: ") and "not measured" not in quality
    done = call(f"-m {demo_model} --memory 8GiB -c 8192 --ratios 0.2 --kv-method snapkv")
    assert "quality: not measured on this model" in done.stdout


def test_json_has_every_point_with_its_parts(tiny):
    record = json.loads(
        call(
            f"-m {tiny('llama-32k')} --memory auto --margin 0 -c 8192 --json --kv-method snapkv"
        ).stdout
    )
    assert record["best"]["n_ctx"] == 8192
    assert record["memory"] == record["memory_free"] <= record["memory_total"]
    for point in record["points"]:
        moving = point["peak"] - point["weights"] - point["compute"] - point["process"]
        assert (
            point["kv"]
            <= moving
            <= point["kv"]
            + point["tail"]
            + point["layer"]
            + point["hidden_bytes"]
            + point["inputs"]
            + point["kv"]
        )
        assert point["peak"] <= record["memory"]
        assert point["quality"]
        assert point["command"].startswith("edgekv chat")


def test_a_margin_is_named_where_memory_is_short(tiny):
    model = str(tiny("llama-32k"))
    # the plan counts this process, which other tests make large
    n_mib = 4 * (rss_now() >> 22) + 700
    plan = ("-m", model, "-c", "32768", "--kv-method", "snapkv", "--memory")
    args = (*plan, f"{n_mib}MiB")
    said = call(*args, "--margin", f"{n_mib - 100}MiB").stdout
    margin = re.search(r"with --margin (\d+MiB|0) 32,768 tokens would fit", said)
    assert margin, said
    assert "32,768 tokens" in call(*args, "--margin", margin[1]).stdout.split("use:")[0]
    assert call(*args, "--margin", margin[1]).exit_code == 0
    assert "such as 175MiB" in call(*plan, "700MiB").stderr


def test_a_plan_with_a_file_says_how_large_it_gets(tiny):
    text = call(
        f"-m {tiny('llama-gqa')} --memory 2GiB -c 4096 --kv-method snapkv --ratios 0.5"
    ).stdout
    assert "temporary file" not in text
    with Blueprint(str(tiny("llama-gqa"))) as blueprint:
        plan = Planner(blueprint, methods.get("snapkv"), Wish(2**40, 4096, [0.5], hidden=["disk"]))
        report = Report(plan, "m", "m", Device("CPU", False, 0, 0), 2**40, 0)
        # 4096 tokens x 128 values x 4 bytes
        assert re.search(r"temporary file +2\.0\n", report.text())


def test_what_does_not_fit_is_said_with_code_2(tiny):
    done = call("-m", str(tiny("llama-gqa")), "--memory", "2MiB", "--margin", "1MiB")
    assert done.exit_code == 2
    assert "nothing fits into 1.0 MiB" in done.stdout
    assert "--memory" in done.stdout


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--memory", "lots"], "512MiB"),
        (["--memory", "1GiB"], "--margin"),
        (["--device", "CUDA9"], "choose one of: CPU"),
        (["--ratios", "20"], "0.2"),
        (["--kv-method", "magic"], "snapkv"),
        (["--margin", "-1"], "512MiB"),
        (["-c", "100000000"], "4194304"),
    ],
)
def test_mistakes_are_one_line(tiny, args, says):
    done = call("-m", str(tiny("llama-gqa")), *args)
    assert done.exit_code == 2 and len(done.stderr.splitlines()) == 1 and says in done.stderr


def test_a_model_too_big_for_the_gpu_is_never_sent_to_the_cpu(tiny, monkeypatch):
    info = seam.build_info()
    gpu = {
        "name": "GPU0",
        "description": "a GPU",
        "memory_total": 2**31,
        "memory_free": 2**30 + 2**20,
    }
    monkeypatch.setattr(seam, "build_info", lambda: {**info, "devices": [*info["devices"], gpu]})
    model = str(tiny("llama-32k"))
    done = call("-m", model, "-c", "32768", "--kv-method", "snapkv")
    assert done.exit_code == 2
    assert "on GPU0" in done.stdout
    assert "never done by itself" in done.stdout
    assert "use:" not in done.stdout
    assert (
        "-ngl 0"
        in call("-m", model, "-c", "1024", "--device", "CPU", "--kv-method", "snapkv").stdout
    )
    monkeypatch.setattr(
        seam, "build_info", lambda: {**info, "devices": [{**gpu, "memory_free": 2**31}]}
    )
    done = call("-m", model, "-c", "1024", "--kv-method", "snapkv")
    assert done.exit_code == 0 and "-ngl all" in done.stdout and size_text(2**31) in done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="psutil reads /proc on Linux alone")
def test_a_system_without_proc_is_told_so_in_one_line(tiny, monkeypatch, tmp_path):
    import psutil

    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    assert "mount /proc" in refused(call(f"-m {tiny('llama-gqa')} -c 4000 --kv-method snapkv"))


@pytest.mark.parametrize("ratio", ["1", "0.2"])
def test_answers_of_a_server_are_planned_for_and_typed(tiny, ratio):
    line = f"-m {tiny('llama-gqa')} -c 2048 --memory 2GiB --margin 0 --ratios {ratio}"
    best = json.loads(call(f"{line} -np 3 --json").stdout)["best"]
    assert best["others"] >= 2 * best["kv"] > 0
    assert best["command"].startswith("edgekv serve ") and "-np 3" in best["command"]
    assert "the other answers under way" in call(f"{line} -np 3").stdout
    assert "other answers" not in call(line).stdout


@pytest.mark.parametrize("ratio", ["1", "0.2"])
def test_a_draft_model_is_planned_for_and_typed(tiny, text, ratio):
    draft = str(tiny("qwen2"))
    line = f"-m {tiny('llama-gqa')} -c 2048 --memory 2GiB --margin 0 --ratios {ratio} --json"
    alone, both = (
        json.loads(call(f"{line}{more}").stdout)["best"] for more in ("", f" -md {draft}")
    )
    grown = both["process"] - alone["process"]  # as it was when the command began
    assert both["peak"] - alone["peak"] - grown == both["draft"] > Path(draft).stat().st_size // 2
    assert f"-md {draft}" in both["command"] and both["kv"] == alone["kv"]
    assert "draft model" in call(f"{line.replace(' --json', '')} -md {draft}").stdout
    llm = load(draft, n_ctx=2048, kv_ratio=float(ratio), kv_min_tokens=128)
    llm.eval(text(2000))
    stats = llm.kv_stats()
    assert both["draft"] > stats.n_bytes_peak
