"""Every preset on the engine: what is kept, the memory, decoding, a second turn; and its scores and
rows against the reference.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from edgekv import methods, profiles
from edgekv.errors import EdgeKVError
from edgekv.methods import budget, probe
from edgekv.methods.expected import Expected
from edgekv.methods.keydiff import KeyDiff, key_diversity
from edgekv.methods.kvzap import PAIRS, KVzap, Surrogate, n_features, predicted_scores
from edgekv.native import Prefill
from tests.engine import feed, load, logits, n_kept, positions, random_profile, share
from tests.reference import budgets
from tests.reference import scores as reference
from tests.reference.cache import turned_back
from tests.reference.model import NEOX, Reference, rope

NAMES = [name for name, preset in methods.REGISTRY.items() if not preset.keeps_all]
MIXES = [
    "score=keydiff,budget=pooled",
    "score=knorm,budget=adakv,alpha=0.5",
    "score=h2o,budget=pooled",
    "cake:gamma=100,tau1=1.6",
    "score=snapkv,budget=d2o",
    "score=kvzip,budget=cake",
    "cake:queries=all",
    "snapkv:queries=probe",
    "score=keydiff,budget=cake",
    "score=h2o,budget=cake",
    "dynamickv:m=1,r_max=2",
]
N_PROMPT, N_MORE = 500, 100
SINK, WINDOW = 4, 32


@pytest.fixture(scope="module")
def profile_for(tiny, tmp_path_factory):
    """profile_for(name): the options with which a preset that needs a profile of llama-gqa has
    one.
    """
    model = profiles.identify(str(tiny("llama-gqa")))
    shares = np.random.default_rng(0).random((1, model.n_layer, 2), np.float32)
    maps = Surrogate(
        np.random.default_rng(1).standard_normal(
            (model.n_layer, 2, n_features(model.d_head_k, model.d_head_v) + 1), np.float32
        ),
        "neighbours",
    )

    def options(name: str) -> dict[str, str]:
        preset = methods.get(name)
        if not isinstance(preset.budget, budget.ProfileBudget):
            return {}
        kind = preset.budget.kind or "probe"
        path = tmp_path_factory.mktemp("profiles") / f"{kind}.gguf"
        profiles.write(
            profiles.Profile(
                model, kind, (0.3,), shares, "" if kind == "probe" else "snapkv", surrogate=maps
            ),
            path,
        )
        return {"kv_profile": str(path)}

    return options


@pytest.fixture(scope="module")
def peak_in_full(tiny, text):
    """bytes_peak of a store that keeps every row of the prompt, per model."""
    found: dict[str, int] = {}

    def peak(name: str) -> int:
        if name not in found:
            llm = load(tiny(name), kv_method="streaming", kv_budget=10 * N_PROMPT)
            llm.eval(list(text(N_PROMPT)))
            found[name] = llm.kv_stats().n_bytes_peak
        return found[name]

    return peak


def check_rows(llm, n_seen: int, n_rows: int) -> None:
    """No more than n_rows per head in the mean, each token once, sinks and window everywhere."""
    full = llm.engine.full_layers
    heads = [rows for il in full for rows in positions(llm)[il]]
    assert sum(map(len, heads)) <= n_rows * len(heads)
    for rows in heads:
        assert len(np.unique(rows)) == len(rows) and rows.min() >= 0 and rows.max() == n_seen - 1
        assert np.isin([*range(SINK), *range(n_seen - WINDOW, n_seen)], rows).all()


@pytest.mark.parametrize("ratio", [0.5, 0.2])
@pytest.mark.parametrize("name", [*NAMES, *MIXES])
def test_prompt_decoding_and_second_turn(tiny, text, peak_in_full, profile_for, name, ratio):
    llm = load(tiny("llama-gqa"), kv_method=name, kv_ratio=ratio, **profile_for(name))
    llm.eval(list(text(N_PROMPT)))
    check_rows(llm, N_PROMPT, int(ratio * N_PROMPT))
    stats = llm.kv_stats()
    assert stats.method == name
    assert stats.n_kept >= ratio * N_PROMPT - 2, "what there is to spend is spent"
    # all queries' statistics, a probe's hidden states and what a summary is made with outweigh the
    # rows of a short prompt
    if ratio < 0.5 and not methods.get(name).observe.probe:
        assert stats.n_bytes_peak - llm.engine.turn.working < peak_in_full("llama-gqa")
    assert np.isfinite(feed(llm, text(8, seed=1))).all()
    llm.eval(list(text(N_MORE, seed=2)))
    n_seen = N_PROMPT + 8 + N_MORE
    check_rows(llm, n_seen, int(ratio * n_seen))
    assert np.isfinite(feed(llm, text(4, seed=3))).all()


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
@pytest.mark.parametrize("model", ["llama-mha", "qwen3", "gemma3"])
@pytest.mark.parametrize("name", ["adakv", "cake", "dynamickv", "d2o", "kvzip", "keydiff"])
def test_other_models_and_quantised_caches(tiny, text, model, kind, name):
    llm = load(tiny(model), kind, kv_method=name, kv_ratio=0.3)
    llm.eval(list(text(N_PROMPT)))
    check_rows(llm, N_PROMPT, n_kept(0.3, N_PROMPT, kind))
    assert np.isfinite(logits(llm)).all()


@pytest.mark.parametrize("name", ["kvzip", "adakv", "lukv", "score=keydiff,budget=pooled"])
def test_heads_differ_where_the_budget_lets_them(tiny, text, profile_for, name):
    llm = load(tiny("llama-gqa"), kv_method=name, kv_ratio=0.3, **profile_for(name))
    llm.eval(list(text(N_PROMPT)))
    assert np.ptp(llm.kv_stats().kept, axis=1).max() > 0


def test_finished_layers_give_memory_back_while_the_prompt_is_read(tiny, text, monkeypatch):
    """A cascade: layer 0 starts with all its rows and is cut again and again; what is held never
    passes the total and a layer.
    """
    llm = load(tiny("llama-gqa"), kv_method="cake", kv_ratio=0.4)
    shrink, cuts = Prefill.shrink, []
    monkeypatch.setattr(
        Prefill,
        "shrink",
        lambda self, il, counts: (cuts.append((il, counts.tolist())), shrink(self, il, counts))[1],
    )
    llm.eval(list(text(N_PROMPT)))
    assert [il for il, _ in cuts][:1] == [0] and {il for il, _ in cuts} == {0, 1}
    kept = llm.kv_stats().kept
    assert dict(cuts)[0] == kept[0].tolist() and dict(cuts)[1] == kept[1].tolist()


@pytest.fixture(scope="module")
def read_by_reference(tiny, text):
    """(model, cache type) -> the reference after the prompt, and what its layers did with it. Each
    is read once.
    """

    @cache
    def read(model: str, kind: str):
        torch_model = Reference(tiny(model), kind, kind)
        return torch_model, torch_model.prefill(text(N_PROMPT), observe=WINDOW, all_logits=False)

    return read


TABLES = ("pyramidkv", "lukv", "evolkv", "kvzap", "kvzap-summary", "joint")
"""Presets whose budgets do not depend on the prompt."""
UNEVEN = ("adakv", "cake", "dynamickv", "d2o", "kvzip", "lukv")


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_does_not_move_the_budgets(tiny, text, profile_for, name):
    """What the model writes is compressed too, but each head's share stays what the prompt made
    it.
    """
    llm = load(tiny("llama-gqa"), kv_method=name, kv_ratio=0.3, kv_tail=64, **profile_for(name))
    llm.eval(list(text(N_PROMPT)))
    shares = llm.kv_stats().kept / N_PROMPT
    assert np.ptp(shares) > 0 or name not in UNEVEN
    compressed = 0
    for token in text(150, seed=3):
        before = llm.kv_stats().kept.sum()
        llm.eval([token])
        kept = llm.kv_stats().kept
        if kept.sum() < before:
            compressed += 1
            n_seen = llm.n_tokens - 1
            floor = (
                0.02 if name in TABLES else 0
            )  # sinks and window are a smaller share of a longer text, and the others' a larger one
            np.testing.assert_allclose((kept - 1) / n_seen, shares, atol=2 / n_seen + floor)
    assert compressed == 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("snapkv:kernel=1,queries=last", "tova"),
        ("snapkv:kernel=1,queries=all", "h2o"),
        ("kvzip:queries=window", "score=kvzip,queries=window,budget=pooled"),
    ],
)
def test_the_same_queries_give_the_same(tiny, text, one, other):
    kept = []
    for name in (one, other):
        llm = load(tiny("llama-gqa"), kv_method=name, kv_ratio=0.3)
        llm.eval(list(text(N_PROMPT)))
        kept.append(positions(llm))
    for a, b in zip(*kept, strict=True):
        assert all(np.array_equal(np.sort(x), np.sort(y)) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def read_as_stored(tiny, text):
    """(model, cache type) -> the same over the rows that the engine stored: a value that rounds the
    other way there is none of a score's business.
    """

    @cache
    def read(model: str, kind: str):
        llm, rows = load(tiny(model), kind, kv_ratio=0.5), []
        with Prefill(llm._ctx.ctx, text(N_PROMPT), []) as p:
            for il, info in enumerate(llm.engine.store.layers):
                p.run(il)
                k, v = (
                    torch.from_numpy(np.stack(x))
                    for x in zip(*(p.rows(head) for head in range(info.n_head_kv)), strict=True)
                )
                rows.append(turned_back(k, v, kind))
                p.keep([np.arange(N_PROMPT, dtype=np.int32)] * info.n_head_kv)
        torch_model = Reference(tiny(model), kind, kind)
        return torch_model, torch_model.prefill(
            text(N_PROMPT), observe=WINDOW, all_logits=False, rows=rows
        )

    return read


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize("model", ["llama-mha", "llama-gqa"])
@pytest.mark.parametrize("name", ["snapkv", "tova", "h2o", "cake", "kvzip", "knorm", "keydiff"])
def test_scores_and_kept_rows_are_those_of_the_reference(
    tiny, text, nmse, read_as_stored, monkeypatch, model, kind, name
):
    """Scores within 1e-4, kept rows the same but for ties; each head has as many as the engine left
    it.
    """
    kind_of_score = type(methods.get(name).score)
    original, seen = kind_of_score.score, []

    def record(self, layer, params=None):
        seen.append(original(self, layer, params))
        return seen[-1]

    monkeypatch.setattr(kind_of_score, "score", record)
    llm = load(tiny(model), kind, kv_method=name, kv_ratio=0.3)
    llm.eval(list(text(N_PROMPT)))
    torch_model, prompt = read_as_stored(model, kind)
    if name == "kvzip":
        (piece,) = probe.pieces(
            text(N_PROMPT), lambda words: llm.tokenize(words.encode(), add_bos=False)
        )
        again = torch_model.fork().prefill(piece, observe=len(piece), all_logits=False)
    formula = {
        "snapkv": lambda il: reference.snapkv(prompt.layers[il].attention),
        "tova": lambda il: reference.tova(prompt.layers[il].attention),
        "cake": lambda il: reference.cake(prompt.layers[il].attention),
        "h2o": lambda il: prompt.layers[il].col_sum,
        "kvzip": lambda il: reference.kvzip(again.layers[il].attention[..., :N_PROMPT]),
        "knorm": lambda il: reference.knorm(torch_model.layers[il].k),
        "keydiff": lambda il: reference.keydiff(torch_model.layers[il].k),
    }
    rough = (
        name == "kvzip" and kind == "q8_0"
    )  # the piece's own rows, which are not stored, round either way
    for il, (scores, heads) in enumerate(zip(seen, positions(llm), strict=True)):
        expected = formula[name](il)
        assert nmse(scores, expected.numpy()) < (1e-3 if rough else 1e-8), il
        for k, rows in enumerate(heads):
            best = reference.keep_best(expected[k : k + 1], len(rows), SINK, WINDOW)[0]
            odd, free = (
                np.setxor1d(rows, best),
                np.setdiff1d(best, [*range(SINK), *range(N_PROMPT - WINDOW, N_PROMPT)]),
            )
            np.testing.assert_allclose(
                expected[k, odd], float(expected[k, free].min()), rtol=0.05 if rough else 1e-3
            )


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize(
    "model", ["llama-mha", "llama-gqa", "llama-d128", "qwen2", "qwen3", "phi3", "gemma3"]
)
def test_expected_attention_is_that_of_the_reference(tiny, text, nmse, monkeypatch, model, kind):
    """Every way to turn queries: both pairings of RoPE, norms and biases before it, scales and the
    cache's own rotation behind it.
    """
    seen, original = {}, Expected.score

    def record(self, layer, params=None):
        seen[layer.il] = original(self, layer, params)
        return seen[layer.il]

    monkeypatch.setattr(Expected, "score", record)
    llm = load(tiny(model), kind, kv_method="expected", kv_ratio=0.3)
    llm.eval(list(text(N_PROMPT)))
    torch_model = Reference(tiny(model), kind, kind)
    layers, w = torch_model.prefill(text(N_PROMPT), all_logits=False).layers, torch_model.weights
    later = torch.arange(N_PROMPT, N_PROMPT + 512)
    assert sorted(seen) == llm.engine.full_layers
    for il, scores in seen.items():
        turn = rope(
            torch.eye(w.d_head)[:, None].expand(-1, 512, -1), later, w.freq_base, w.arch in NEOX
        ).permute(1, 2, 0)
        expected = reference.expected(
            torch_model.layers[il].k, torch_model.layers[il].v, layers[il].raw_q, turn
        ).numpy()
        assert nmse(scores[:, 4:], expected[:, 4:]) < (1e-5 if kind == "f16" else 1e-3), il
        assert (scores[:, :4] >= scores[:, 4:].max(axis=1, keepdims=True)).all()


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize("model", ["llama-gqa", "llama-d128", "qwen3"])
def test_kvzap_sees_the_rows_as_they_are_without_the_cache(
    tiny, text, nmse, monkeypatch, tmp_path, model, kind
):
    """Quantised caches turn K and V; what is predicted of a row must not depend on that."""
    seen, original = {}, KVzap.score

    def record(self, layer, params=None):
        seen[layer.il] = original(self, layer, params)
        return seen[layer.il]

    monkeypatch.setattr(KVzap, "score", record)
    pairs = "halves" if model == "qwen3" else "neighbours"
    maps = random_profile(tiny(model), tmp_path / "p.gguf", pairs)
    llm = load(
        tiny(model),
        kind,
        kv_method="kvzap:novelty=0",
        kv_ratio=0.3,
        kv_profile=str(tmp_path / "p.gguf"),
    )
    llm.eval(list(text(N_PROMPT)))
    torch_model = Reference(tiny(model), "f16", "f16")
    torch_model.prefill(text(N_PROMPT), all_logits=False)
    for il, scores in seen.items():
        rows = torch_model.layers[il]
        expected = reference.kvzap(
            rows.k.float(), rows.v.float(), torch.from_numpy(maps[il]), pairs
        ).numpy()
        assert nmse(scores, expected) < (1e-5 if kind == "f16" else 1e-3), il


@pytest.mark.parametrize(
    ("model", "kind"),
    [("llama-gqa", "f16"), ("llama-gqa", "bf16"), ("qwen3", "q8_0"), ("llama-d128", "q4_0")],
)
def test_kvzap_is_the_same_natively_and_in_numpy(tiny, text, monkeypatch, model, kind):
    """Over blocks of rows, and for rows of an earlier turn."""
    seen = []

    def record(self, layer, params=None):
        for k in range(layer.n_head_kv):
            keys, values = layer.rows(k)
            weights = rng.standard_normal(n_features(keys.shape[1], values.shape[1]) + 1).astype(
                np.float32
            )
            for pairs in PAIRS:
                plain = predicted_scores(
                    keys, values, key_diversity(keys), layer.blocks, weights, pairs
                )
                predicted, diversity = layer.predicted_scores(
                    k, weights, pairs == PAIRS[0], layer.blocks
                )
                np.testing.assert_allclose(predicted, plain, rtol=1e-4, atol=1e-4)
                np.testing.assert_allclose(diversity, key_diversity(keys), rtol=1e-4, atol=1e-5)
        seen.append(len(keys))
        return np.where(layer.pos >= 0, rng.random(layer.pos.shape, np.float32), -np.inf).astype(
            np.float32
        )

    rng = np.random.default_rng(5)
    monkeypatch.setattr(KeyDiff, "score", record)
    llm = load(
        tiny(model),
        kind,
        kv_method="score=keydiff,budget=uniform",
        kv_ratio=share(0.5, kind),
        n_ctx=4096,
    )
    llm.eval(list(text(1100)))
    llm.eval(list(text(1400))[1100:])
    assert {1100, 850} <= set(seen)


def test_a_map_that_does_not_fit_is_refused(tiny, text):
    llm = load(tiny("llama-gqa"), kv_ratio=0.5)
    with Prefill(llm._ctx.ctx, text(100), []) as p:
        p.run(0)
        for weights, blocks in (
            (np.zeros(5, np.float32), (0, 0)),
            (np.zeros(100, np.float32), (48, 0)),
            (np.zeros(100, np.float32), (0, -64)),
        ):
            with pytest.raises(EdgeKVError, match="map does not fit|blocks of that size"):
                p.predicted_scores(0, weights, True, blocks)


@pytest.mark.parametrize("model", ["llama-mha", "llama-gqa"])
@pytest.mark.parametrize("name", ["cake", "d2o"])
def test_layer_budgets_are_those_of_the_reference(tiny, text, read_by_reference, model, name):
    """Attention that differs by rounding moves a budget by a row at most."""
    llm = load(tiny(model), kv_method=name, kv_ratio=0.3)
    llm.eval(list(text(N_PROMPT)))
    layers = read_by_reference(model, "f16")[1].layers
    if name == "cake":
        weights = np.exp(
            [budgets.log_preference(layer.attention, WINDOW, 1.0, 0.6) for layer in layers]
        )
        stages = [weights[: m + 1] for m in range(len(layers))]
    else:
        f = [float(layer.col_sum.double().var(1, correction=0).mean()) for layer in layers]
        stages = [budgets.unit_weights(f[: m + 1]) for m in range(len(layers))]
    least = SINK + WINDOW
    expected = budgets.cascade(stages, (0.3 * N_PROMPT - least) * len(layers), N_PROMPT - least)[-1]
    assert np.abs(llm.kv_stats().kept - least - np.array(expected)[:, None]).max() <= 1
