"""Products of a prompt's tokens with quantised weights: nearer to f32 than llama.cpp's, which
rounds activations to 8 bits first; as near, where both do that for weights of 8 bits.
"""

from dataclasses import replace

import gguf
import numpy as np
import pytest

from edgekv.errors import BadInput
from edgekv_lab.bench import synthetic
from tests.engine import load, logits
from tests.lib import nmse
from tests.quantized import quantize

SMALL = dict(n_layer=4, n_embd=256, n_ff=512, n_head=4, n_head_kv=2, d_head=64, n_vocab=512)
SHAPES = {
    "dense": replace(synthetic.SHAPES["llama-1b"], **SMALL),
    # all of them are chosen: a choice by chance would hide the rounding
    "experts": replace(
        synthetic.SHAPES["lfm2-moe-1b"], **SMALL, n_expert=4, n_used=4, n_ff_expert=256, n_dense=0
    ),
}
TOKENS = [7 * i % 500 + 6 for i in range(200)]
PROMPTS = [[i * factor % 500 + 6 for i in range(200)] for factor in (3, 7, 11, 13, 17, 23)]
F32, Q4_0, Q8_0, Q4_K, Q5_0, Q6_K = 0, 2, 7, 15, 8, 18
"""llama_ftype."""


def read(path, tokens=TOKENS, **options):
    llm = load(path, **options)
    llm.eval(tokens)
    return logits(llm)


def multiplies_in_8_bits(path):
    llm = load(path, kv_budget=1000)
    llm.eval(TOKENS)
    return llm.engine.turn.clock.work["levels"][0] > 0


@pytest.mark.parametrize("ftype", [Q4_0, Q8_0, Q4_K, Q5_0, Q6_K])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_prompts_products_are_nearer_to_f32(tmp_path, monkeypatch, shape, ftype):
    synthetic.write(tmp_path / "f16.gguf", SHAPES[shape], "f16")
    path = quantize(tmp_path / "f16.gguf", tmp_path / "quantised.gguf", ftype)
    exact = quantize(path, tmp_path / "f32.gguf", F32)
    references = [read(exact, tokens) for tokens in PROMPTS]

    def error():
        found = [read(path, tokens, kv_budget=1000) for tokens in PROMPTS]
        return np.mean([nmse(x, y) for x, y in zip(found, references, strict=True)])

    ours = error()
    alike = ftype == Q8_0 and multiplies_in_8_bits(path)
    monkeypatch.setenv("EDGEKV_PRODUCTS", "0")
    # for types with 256 values both round tokens in steps of so many
    most = 2.5e-3 if ftype in (Q4_K, Q6_K) else 1e-3
    assert ours < most and ours < error() * (1.25 if alike else 1)


def with_values_of(path, other):
    """Values' weights of `path` become those of `other` in Q4_K, whose rows take as many bytes."""
    raw, n = bytearray(path.read_bytes()), 0
    of_other = {tensor.name: tensor for tensor in gguf.GGUFReader(other).tensors}
    for tensor in gguf.GGUFReader(path).tensors:
        got = of_other[tensor.name]
        if "attn_v" not in tensor.name or got.tensor_type != gguf.GGMLQuantizationType.Q4_K:
            continue
        assert tensor.n_bytes == got.n_bytes
        at = raw.index(tensor.name.encode()) + len(tensor.name) + 4 + 8 * len(tensor.shape)
        raw[at : at + 4] = int(got.tensor_type).to_bytes(4, "little")
        raw[tensor.data_offset : tensor.data_offset + got.n_bytes] = got.data.tobytes()
        n += 1
    assert n > 0
    path.write_bytes(raw)
    return path


def test_weights_of_other_types_read_the_tokens_anew(tmp_path, monkeypatch):
    """Queries and keys in q4_0 have tokens in steps of 32 values, values in Q4_K of 256."""
    synthetic.write(tmp_path / "f16.gguf", SHAPES["dense"], "f16")
    q4_0, q4_k = (quantize(tmp_path / "f16.gguf", tmp_path / f"{f}.gguf", f) for f in (Q4_0, Q4_K))
    path = with_values_of(q4_0, q4_k)
    exact = read(quantize(path, tmp_path / "f32.gguf", F32))
    ours = nmse(read(path, kv_budget=1000), exact)
    monkeypatch.setenv("EDGEKV_PRODUCTS", "0")
    assert ours < 2e-3 and ours < nmse(read(path, kv_budget=1000), exact)


def test_a_short_turn_and_ratio_1_are_llama_cpps(tmp_path, monkeypatch):
    synthetic.write(tmp_path / "m.gguf", SHAPES["dense"], "q8_0")
    whole = read(tmp_path / "m.gguf")
    monkeypatch.setenv("EDGEKV_PRODUCTS", "0")
    assert (whole == read(tmp_path / "m.gguf")).all()


def test_a_fast_prefill_is_nearer_to_f32_at_ratio_1_too(tmp_path):
    synthetic.write(tmp_path / "m.gguf", SHAPES["dense"], "q4_0")
    exact = quantize(tmp_path / "m.gguf", tmp_path / "f32.gguf", F32)
    references = [read(exact, tokens) for tokens in PROMPTS]

    def error(**options):
        found = [read(tmp_path / "m.gguf", tokens, **options) for tokens in PROMPTS]
        return np.mean([nmse(x, y) for x, y in zip(found, references, strict=True)])

    assert error(kv_fast_prefill=True) < error()


@pytest.mark.parametrize("options", [{}, {"kv_ratio": 0.2, "kv_method": "full"}])
def test_a_fast_prefill_keeps_everything_that_comes(tmp_path, options):
    synthetic.write(tmp_path / "m.gguf", SHAPES["dense"], "q4_0")
    llm = load(tmp_path / "m.gguf", kv_fast_prefill=True, kv_tail=64, **options)
    llm.eval(TOKENS)
    for token in TOKENS:  # more than a tail
        llm.eval([token])
    stats = llm.kv_stats()
    assert (stats.method, stats.mode, stats.ratio) == ("full", "layers", 1)
    assert stats.n_kept == stats.n_seen == 2 * len(TOKENS)


def test_a_ratio_may_follow_a_fast_prefill(tmp_path):
    synthetic.write(tmp_path / "m.gguf", SHAPES["dense"], "q4_0")
    llm = load(tmp_path / "m.gguf", kv_fast_prefill=True)
    llm.eval(TOKENS)
    llm.kv_set(ratio=0.2, method="snapkv")
    llm.reset()
    llm.eval(TOKENS)
    assert llm.kv_stats().method == "snapkv" and llm.kv_stats().n_kept == len(TOKENS) // 5
    llm.kv_set(ratio=1)
    llm.reset()
    llm.eval(TOKENS)
    assert llm.kv_stats().method == "full" and llm.kv_stats().n_kept == len(TOKENS)


def test_a_fast_prefill_gives_no_embeddings(tmp_path):
    synthetic.write(tmp_path / "m.gguf", SHAPES["dense"], "q4_0")
    with pytest.raises(BadInput, match="kv_fast_prefill"):
        load(tmp_path / "m.gguf", kv_fast_prefill=True, embedding=True)


def test_unpacked_weights_take_what_the_cache_saves(tmp_path):
    """The same bits whatever is kept: nothing where little is saved, all where much is."""
    synthetic.write(tmp_path / "m.gguf", SHAPES["dense"], "q4_0")

    def work(n_tokens, **more):
        tokens = [7 * i % 500 + 6 for i in range(n_tokens)]
        llm = load(tmp_path / "m.gguf", n_ctx=4096, kv_ratio=0.2, repack=False, **more)
        llm.eval(tokens)
        done = llm.engine.turn.clock.work
        return logits(llm), done["weights"][1] + done["levels"][1], llm.kv_stats()

    for n_tokens, hidden in ((600, "f32"), (4000, "f32"), (4000, "disk")):
        few, n_few, stats = work(n_tokens, kv_hidden=hidden)
        all, n_all, lavish = work(n_tokens, kv_hidden=hidden, kv_prefill_memory="64MiB")
        assert (few == all).all() and n_few == n_all > 0
        if hidden == "disk":
            assert stats.n_bytes_peak == lavish.n_bytes_peak < stats.n_bytes_full
        else:
            assert stats.n_bytes_peak < lavish.n_bytes_peak - 2**18
            assert stats.n_bytes_peak <= stats.n_bytes_full or n_tokens == 600


def test_prefill_memory_bounds_what_products_work_with(tmp_path, monkeypatch):
    """The same bits with as little as the tokens of a chunk take; llama.cpp's with less."""
    synthetic.write(tmp_path / "m.gguf", SHAPES["dense"], "q4_0")
    tokens = 3 * TOKENS  # several chunks, which meet the same weights

    def work(most):
        llm = load(tmp_path / "m.gguf", kv_budget=1000, kv_prefill_memory=most, repack=False)
        llm.eval(tokens)
        done = llm.engine.turn.clock.work
        return logits(llm), done["weights"][1] + done["levels"][1], llm.kv_stats().n_bytes_peak

    whole, n_whole, peak_whole = work(None)
    some, n_some, peak_some = work("600KiB")
    none, n_none, peak_none = work(1000)
    assert n_whole == n_some > 0 == n_none and (whole == some).all()
    assert peak_none < peak_some <= peak_none + (600 << 10) < peak_whole
    monkeypatch.setenv("EDGEKV_PRODUCTS", "0")
    assert (none == work(None)[0]).all()


@pytest.mark.parametrize("ftype", [Q4_0, Q8_0, Q4_K, Q5_0, Q6_K])
def test_a_step_of_several_tokens_is_as_near_to_f32(tmp_path, ftype):
    """Whether its products are llama.cpp's or ours, which begin at another number of tokens for
    each type.
    """
    synthetic.write(tmp_path / "f16.gguf", SHAPES["dense"], "f16")
    path = quantize(tmp_path / "f16.gguf", tmp_path / "quantised.gguf", ftype)
    exact, llm = (
        load(x, kv_budget=1000, after=TOKENS[:100])
        for x in (quantize(path, tmp_path / "f32.gguf", F32), path)
    )
    for n in (2, 9, 20, 48):
        errors = []
        for begin in range(100, 100 + 3 * n, n):
            for one in (exact, llm):
                one.back_to(100)
                one.eval(TOKENS[begin % 50 : begin % 50 + n])
            errors.append(nmse(logits(llm), logits(exact)))
        assert np.mean(errors) < 4e-3
