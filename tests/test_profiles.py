"""Profiles: the table, its file, where it is found, how the probe makes it, and the commands around
it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgekv import native, profiles
from edgekv.errors import BadInput, EdgeKVError, Unsupported
from edgekv.learn import contest, probe_profile, surrogate
from edgekv.methods.keydiff import key_diversity
from edgekv.methods.kvzap import Surrogate, features, n_features
from edgekv.profiles import Identity, Profile, curves, draw, file
from edgekv.profiles import places as lookup
from edgekv_lab.makers import lukv, oracle
from tests import models
from tests.cli import refused, typed

ROOT = Path(__file__).resolve().parent.parent
MODEL = Identity("llama", 4, (2, 2, 1, 2), 64, 64, "ab" * 32)
GRID = (0.1, 0.2, 0.5, 0.9)
N_TOKENS = 200
MAPS = Surrogate(
    np.random.default_rng(7).standard_normal((4, 2, n_features(64, 64) + 1)).astype(np.float32),
    "halves",
)
TEXTS = (
    "a list of the things in the old shed: " + "nails, a saw, two bent rakes; " * 10,
    "the fog came in at nine and went at ten. " * 12,
)


def make(model: Identity = MODEL, ratios=GRID, seed: int = 0, **more) -> Profile:
    rng = np.random.default_rng(seed)
    shares = np.stack(
        [
            np.clip(rng.gamma(0.3, r / 0.3, (model.n_layer, max(model.n_head_kv))), 0.001, 1)
            for r in ratios
        ]
    )
    exists = np.arange(shares.shape[2]) < np.asarray(model.n_head_kv)[:, None]
    return Profile(model, "probe", tuple(ratios), (shares * exists).astype(np.float32), **more)


def one_line(error) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


# ---- the table


@given(st.integers(0, 1000), st.floats(0.001, 1))
def test_the_mean_share_is_the_ratio_and_no_share_is_above_one(seed, ratio):
    profile = make(seed=seed)
    shares = profile.shares_at(ratio)
    assert shares.shape == (4, 2) and shares.max() <= 1 and shares[2, 1] == 0
    assert (shares[profile.heads] > 0).all()
    assert shares[profile.heads].mean() == pytest.approx(ratio, abs=1e-9)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.floats(0.001, 1))
def test_scaling_keeps_the_order_and_only_cuts_at_one(shares, mean):
    shares = np.array(shares)
    got = file.scale(shares, mean)
    assert got.mean() == pytest.approx(mean) and got.max() <= 1 + 1e-12
    free = (got < 1) & (shares > 1e-6)
    if free.sum() > 1:
        factors = got[free] / shares[free]
        assert factors == pytest.approx(factors[0])


def test_shares_lie_between_those_of_the_neighbouring_ratios():
    shares = np.array([[[0.1, 0.3]], [[0.5, 0.7]]], np.float32)
    profile = Profile(Identity("llama", 1, (2,), 64, 64, ""), "lukv", (0.2, 0.6), shares)
    assert profile.shares_at(0.2) == pytest.approx(np.array([[0.1, 0.3]]))
    assert profile.shares_at(0.4) == pytest.approx(np.array([[0.3, 0.5]]))
    assert profile.shares_at(0.1) == pytest.approx(
        np.array([[0.05, 0.15]])
    )  # down to 0 in proportion
    assert profile.shares_at(0.8) == pytest.approx(np.array([[0.75, 0.85]]))  # up to 1
    assert profile.shares_at(1.0) == pytest.approx(np.ones((1, 2)))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kind": "guess"}, "kind"),
        ({"ratios": (0.1, 0.5, 0.2, 0.9)}, "rise"),
        ({"ratios": (0.0, 0.2, 0.5, 0.9)}, "rise"),
        ({"ratios": (0.1, 0.2, 0.5)}, "4 x 4 x 2"),
        ({"shares": np.full((4, 4, 2), np.nan, np.float32)}, "between 0 and 1"),
        ({"shares": np.full((4, 4, 2), 1.5, np.float32)}, "between 0 and 1"),
        ({"shares": np.zeros((4, 4, 2), np.float32)}, "none"),
        ({"shares": np.ones((4, 4, 2), np.float32)}, "do not exist"),
        ({"shares": np.ones((4, 4), np.float32)}, "4 x 4, not"),
        ({"surrogate": Surrogate(MAPS.weights[:, :, 1:], "halves")}, "maps"),
        ({"surrogate": Surrogate(MAPS.weights * np.float32(np.nan), "halves")}, "maps"),
    ],
)
def test_tables_that_make_no_sense_are_refused(change, says):
    with pytest.raises(BadInput) as error:
        replace(make(), **change)
    assert says in one_line(error)


# ---- the file


def test_round_trip(tmp_path):
    profile = make(
        score="snapkv",
        window=16,
        sink=2,
        calibration="cd" * 32,
        command="edgekv profile probe -m 'a b.gguf'",
        surrogate=MAPS,
    )
    profiles.write(profile, tmp_path / "p.gguf")
    got = profiles.read(tmp_path / "p.gguf")
    for name in (f.name for f in fields(Profile) if f.name not in ("shares", "surrogate")):
        assert getattr(got, name) == getattr(profile, name), name
    assert np.array_equal(got.shares, profile.shares)
    assert got.surrogate.pairs == MAPS.pairs and np.array_equal(got.surrogate.weights, MAPS.weights)
    assert [p.name for p in tmp_path.iterdir()] == ["p.gguf"]
    reader = gguf.GGUFReader(tmp_path / "p.gguf")
    assert reader.fields["general.type"].contents() == "kvbudget"


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    profiles.write(make(), tmp_path / "p.gguf")
    before = (tmp_path / "p.gguf").read_bytes()

    def full(fd: int) -> None:
        raise OSError(28, "No space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BadInput, match="No space left"):
        profiles.write(make(seed=1), tmp_path / "p.gguf")
    assert (tmp_path / "p.gguf").read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_damaged_files_are_refused_in_one_line(tmp_path):
    path = tmp_path / "p.gguf"
    profiles.write(make(), path)
    data, rng = path.read_bytes(), np.random.default_rng(0)
    for n in range(0, len(data) - 40, 23):
        path.write_bytes(data[:n])
        with pytest.raises(BadInput) as error:
            profiles.read(path)
        assert "p.gguf" in one_line(error)
    for _ in range(150):
        broken = bytearray(data)
        for place in rng.integers(4, len(data), 3):
            broken[place] = rng.integers(256)
        path.write_bytes(broken)
        try:
            profiles.read(path)
        except BadInput as error:
            assert "\n" not in str(error)
    for n in (2**62, 2**33):  # as many keys, as the header says
        path.write_bytes(data[:16] + n.to_bytes(8, "little") + data[24:])
        with pytest.raises(BadInput):
            profiles.read(path)


def test_other_files_are_no_profiles(tmp_path, tiny):
    (tmp_path / "empty").touch()
    for path in (tmp_path / "empty", tmp_path / "missing", tmp_path, tiny("llama-gqa"), __file__):
        with pytest.raises(BadInput) as error:
            profiles.read(path)
        assert str(path) in one_line(error)


# ---- the model


@pytest.mark.parametrize("name", models.SHAPES)
def test_a_model_is_known_by_its_shape_and_embedding(tiny, tmp_path, name):
    shape, got = models.SHAPES[name], profiles.identify(str(tiny(name)))
    assert (got.arch, got.n_layer, got.n_head_kv) == (
        shape.arch,
        shape.n_layer,
        (shape.n_head_kv,) * shape.n_layer,
    )
    assert (got.d_head_k, got.d_head_v) == (shape.d_head, shape.d_head)
    copy = shutil.copy(tiny(name), tmp_path / "another name.gguf")
    assert profiles.identify(str(copy)) == got


def test_another_model_or_score_is_refused(tiny):
    mine, others = (profiles.identify(str(tiny(name))) for name in ("llama-gqa", "llama-q4"))
    profile = make(mine, score="snapkv")
    profile.check(mine)
    profile.check(mine, "snapkv")
    with pytest.raises(BadInput) as error:
        profile.check(others, name="x.gguf")
    assert "x.gguf belongs to another model (its token embeddings differ)" in one_line(error)
    with pytest.raises(BadInput, match="architecture llama, not qwen2"):
        profile.check(profiles.identify(str(tiny("qwen2"))))
    with pytest.raises(BadInput) as error:
        profile.check(mine, "keydiff")
    assert "'snapkv', not for 'keydiff'" in one_line(error)


@pytest.mark.parametrize(
    "content",
    [b"", b"GGUF", b"GGUF\3\0\0\0" + b"\xff" * 16, b"GGUF\3\0\0\0" + bytes(16), b"no model at all"],
)
def test_files_that_are_no_models(tmp_path, content):
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(BadInput) as error:
        profiles.identify(str(tmp_path / "m.gguf"))
    assert "m.gguf" in one_line(error)


# ---- found


@pytest.fixture
def places(tmp_path, tiny, monkeypatch):
    """A model in a folder of its own, with nothing shipped and an empty cache: (path of the model,
    identity).
    """
    (tmp_path / "models").mkdir()
    model = str(shutil.copy(tiny("llama-gqa"), tmp_path / "models" / "m.gguf"))
    monkeypatch.setattr(lookup, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(lookup, "user_cache", lambda: tmp_path / "cache")
    return model, profiles.identify(model)


def test_beside_the_model_before_shipped_before_cached(places, tmp_path):
    model, identity = places
    assert profiles.find(model) is None
    for i, path in enumerate(
        (
            lookup.cached(identity),
            tmp_path / "shipped" / "any.gguf",
            tmp_path / "models" / "kvbudget-m.gguf",
        )
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        profiles.write(make(identity, command=str(i)), path)
        assert profiles.find(model).command == str(i)
    assert profiles.find(model, profiles.NONE) is None
    assert profiles.find(model, str(tmp_path / "shipped" / "any.gguf")).command == "1"


def test_a_foreign_profile_is_an_error_when_named_and_left_out_when_found(places, tmp_path, caplog):
    model, identity = places
    path = tmp_path / "models" / "kvbudget-m.gguf"
    profiles.write(make(replace(identity, embedding="ff")), path)
    assert profiles.find(model) is None and "another model" in caplog.text
    with pytest.raises(BadInput, match="another model"):
        profiles.find(model, str(path))
    with pytest.raises(BadInput, match="cannot be read"):
        profiles.find(model, str(tmp_path / "nowhere.gguf"))


def test_a_profile_for_another_score_is_passed_over(places, tmp_path):
    model, identity = places
    profiles.write(make(identity, score="snapkv"), tmp_path / "models" / "kvbudget-m.gguf")
    assert (
        profiles.find(model, score="snapkv") is not None
        and profiles.find(model, score="h2o") is None
    )


def test_a_name_that_could_steer_a_terminal_is_passed_over(places, tmp_path):
    model, identity = places
    profiles.write(make(identity), tmp_path / "models" / "kvbudget-m.\x1b[2J.gguf")
    assert profiles.find(model) is None
    profiles.write(make(identity), tmp_path / "models" / "kvbudget-m.äß.gguf")
    assert profiles.find(model).path.endswith("kvbudget-m.äß.gguf")


def rewritten(source: Path, target: Path, change) -> str:
    """A copy of a model whose layers went through `change`, a function of a tensor's name and its
    values that returns others of the same shape.
    """
    shutil.copy(source, target)
    reader = gguf.GGUFReader(target, "r+")
    for tensor in reader.tensors:
        if tensor.name.startswith("blk."):
            tensor.data[:] = change(tensor.name, np.array(tensor.data))
    reader.data.flush()
    return str(target)


def heads_swapped(name: str, data: np.ndarray) -> np.ndarray:
    """KV heads 0 and 1 of the last layer, with the query heads that read them."""
    is_theirs = name in (f"blk.2.attn_{part}.weight" for part in "qkv")
    return np.concatenate(np.split(data, 2)[::-1]) if is_theirs else data


def other_norms(name: str, data: np.ndarray) -> np.ndarray:
    return data * np.float32(1.5) if name == "blk.1.attn_norm.weight" else data


@pytest.mark.parametrize("change", [heads_swapped, other_norms])
def test_other_attention_weights_make_another_model(places, tmp_path, change):
    model, identity = places
    other = rewritten(Path(model), tmp_path / "other.gguf", change)
    profiles.write(make(identity), tmp_path / "p.gguf")
    assert profiles.find(model, str(tmp_path / "p.gguf")) is not None
    with pytest.raises(BadInput, match="attention weights differ"):
        profiles.find(other, str(tmp_path / "p.gguf"))
    found = lookup.cached(identity)
    found.parent.mkdir(parents=True)
    profiles.write(make(identity), found)
    assert profiles.find(model) is not None and profiles.find(other) is None
    assert lookup.cached(profiles.identify(other)) != found, "one would replace the other's"


def test_profiles_made_before_attention_weights_counted_stay_accepted(places, tmp_path):
    model, identity = places
    older = replace(identity, attention="")
    profiles.write(make(older), tmp_path / "p.gguf")
    assert profiles.read(tmp_path / "p.gguf").model == older
    assert profiles.find(model, str(tmp_path / "p.gguf")) is not None
    lookup.cached(older).parent.mkdir(parents=True)
    profiles.write(make(older), lookup.cached(older))
    assert profiles.find(model).path == str(lookup.cached(older))


def test_metadata_that_people_edit_do_not_count(places, tmp_path):
    model, identity = places
    reader = gguf.GGUFReader(model)
    writer = gguf.GGUFWriter(tmp_path / "edited.gguf", "llama")
    for name, field_ in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            value = "another name" if name == "general.name" else field_.contents()
            inner = field_.types[-1] if field_.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, value, field_.types[0], inner)
    writer.add_string("edited", "x" * 5000)
    for tensor in reader.tensors[::-1]:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert profiles.identify(str(tmp_path / "edited.gguf")) == identity


def test_what_is_shipped_can_be_read_and_names_no_folder():
    for path in lookup.SHIPPED.glob("*.gguf"):
        profile = profiles.read(path)
        assert profile.command.startswith("edgekv profile ") and "/" not in profile.command
        assert profile.shares_at(0.2)[profile.heads].mean() == pytest.approx(0.2)
        if profile.kind == "probe":
            assert profile.calibration == probe_profile.hash_of(probe_profile.texts()), (
                f"{path.name}: texts changed, make it again"
            )


# ---- made by the probe


def test_counting_is_one_threshold_over_all_heads():
    scores = np.random.default_rng(0).random((3, 2, 50), np.float32)
    scores[1, 1] = np.nan
    got = probe_profile.count(scores, (0.1, 0.5))
    for i, n in enumerate((25, 125)):
        threshold = np.sort(scores[np.isfinite(scores)])[-n]
        assert np.array_equal(got[i], (scores >= threshold).sum(axis=2) / 50)


@pytest.fixture(scope="module")
def llm(tiny):
    return probe_profile.load(str(tiny("llama-gqa")), N_TOKENS, n_threads=1)


def test_a_probe_profile(llm, tiny):
    steps = []
    profile = probe_profile.make(
        llm, TEXTS, progress=lambda *step: steps.append(step), n_tokens=N_TOKENS
    )
    assert profile.shares.shape == (49, 3, 2) and profile.kind == "probe" and profile.score == ""
    assert profile.shares.mean(axis=(1, 2)) == pytest.approx(np.array(profile.ratios), abs=1e-3)
    assert (np.diff(profile.shares, axis=0) >= 0).all()  # a larger budget takes from nobody
    assert steps == sorted(steps) and steps[0][0] == 0 and steps[-1][0] == steps[-1][1]
    profile.check(profiles.identify(str(tiny("llama-gqa"))))
    assert llm.engine.store.memory().n_past == 0


def test_the_scores_of_a_probe_are_those_of_the_method_that_reads_it(llm, tiny):
    from edgekv import native
    from edgekv.methods import probe

    tokens = tuple(llm.tokenize(TEXTS[0].encode()))[:N_TOKENS]
    got, _ = probe_profile.measure(llm, tokens)
    repeated = [t for piece in probe.pieces(tokens, llm.engine.tokenize) for t in piece]
    n = len(tokens)
    with native.Prefill(
        llm.engine.ctx, [*tokens, *repeated], [native.Observer(n, n + len(repeated), ("max",))]
    ) as p:  # stored, the same attention
        for il in range(3):
            p.run(il)
            np.testing.assert_allclose(got[il], p.stat(0, "max")[:, :n], rtol=1e-2, atol=1e-5)
            p.keep([np.arange(n + len(repeated), dtype=np.int32)] * 2)


def test_maps_are_those_of_least_squares():
    """With texts that differ as a whole, and features of very different size; a head that takes no
    part stays without.
    """
    rng, truth = np.random.default_rng(0), np.array([3.0, -0.02, 0.5])
    found = []
    for offset in (0.0, 7.0):
        x = (rng.standard_normal((4000, 3)) * [0.1, 30, 1] + offset).astype(np.float32)
        y = (x @ truth + offset * 5 + rng.standard_normal(4000) * 0.01).astype(np.float32)
        found.append(np.stack([surrogate.moments(x, y), np.zeros((5, 4), np.float32)])[None])
    weights = surrogate.solve(np.mean(found, axis=0), "halves").weights
    assert weights.shape == (1, 2, 4) and not weights[0, 1].any()
    np.testing.assert_allclose(weights[0, 0, :3], truth, rtol=0.01)


def test_maps_predict_what_the_probe_pays(tiny):
    """On a text that they were not learned from, better than chance in nearly all heads; the model
    is random, its attention is not.
    """
    llm = probe_profile.load(str(tiny("llama-gqa")), N_TOKENS, n_threads=1)
    maps = probe_profile.make(llm, TEXTS[:1], GRID, n_tokens=N_TOKENS).surrogate
    tokens = tuple(llm.tokenize(TEXTS[1].encode()))[:N_TOKENS]
    rows = {}
    keep = native.Prefill.keep

    def record(self, kept):
        rows[self.il] = [self.rows(k) for k in range(len(kept))]
        keep(self, kept)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native.Prefill, "keep", record)
        paid, _ = probe_profile.measure(llm, tokens)
    found = [
        np.corrcoef(
            features(*rows[il][k], key_diversity(rows[il][k][0]), maps.pairs)
            @ maps.weights[il, k, :-1],
            surrogate.target(paid[il, k]),
        )[0, 1]
        for il in rows
        for k in range(2)
    ]
    assert np.median(found) > 0.3, np.round(found, 2)


def test_layers_with_a_sliding_window_take_no_part(tiny):
    llm = probe_profile.load(str(tiny("gemma3")), N_TOKENS, n_threads=1)
    profile = probe_profile.make(llm, TEXTS, (0.2, 0.5), n_tokens=N_TOKENS)
    assert profile.heads.tolist() == [[False], [True], [False], [True]]
    assert profile.shares_at(0.2)[profile.heads].mean() == pytest.approx(0.2)


def test_heads_of_different_size_get_shares_and_no_maps(llm, monkeypatch):
    model = profiles.identify(llm.model_path)
    other = replace(model, d_head_k=2 * model.d_head_k)
    assert probe_profile.heads_alike(llm.engine.store, model) and not probe_profile.heads_alike(
        llm.engine.store, other
    )
    monkeypatch.setattr(probe_profile, "identify", lambda path: other)
    profile = probe_profile.make(llm, TEXTS, GRID, n_tokens=N_TOKENS)
    assert profile.surrogate is None and profile.shares.any()


def test_a_stopped_profile_goes_on(llm, tmp_path, monkeypatch):
    partial, read = tmp_path / "p.partial", []
    measure = probe_profile.measure
    monkeypatch.setattr(
        probe_profile,
        "measure",
        lambda llm, tokens, progress: (read.append(1), measure(llm, tokens, progress))[1],
    )

    def stop(done, total):
        if done > total / 2:
            raise KeyboardInterrupt

    expected = probe_profile.make(llm, TEXTS, GRID, n_tokens=N_TOKENS)
    with pytest.raises(KeyboardInterrupt):
        probe_profile.make(llm, TEXTS, GRID, n_tokens=N_TOKENS, partial=partial, progress=stop)
    assert partial.is_file() and len(read) == 4
    kept = partial.read_bytes()
    steps = []
    got = probe_profile.make(
        llm,
        TEXTS,
        GRID,
        n_tokens=N_TOKENS,
        partial=partial,
        progress=lambda *step: steps.append(step),
    )
    assert len(read) == 5 and not partial.exists()
    assert steps[0][0] == steps[0][1] / 2, "what was done before is said at once"
    assert steps[-1][0] == steps[-1][1]
    partial.write_bytes(kept)
    other = probe_profile.make(llm, TEXTS[1:], GRID, n_tokens=N_TOKENS, partial=partial)
    assert not np.array_equal(other.surrogate.weights, expected.surrogate.weights), (
        "what was read for other texts does not count"
    )
    assert np.array_equal(got.shares, expected.shares) and np.array_equal(
        got.surrogate.weights, expected.surrogate.weights
    )
    partial.write_bytes(b"PK\3\4 damaged")
    assert np.array_equal(
        probe_profile.make(llm, TEXTS, GRID, n_tokens=N_TOKENS, partial=partial).shares,
        expected.shares,
    )


def test_first_use_makes_the_profile_once_and_keeps_it(places, monkeypatch):
    model, _ = places
    monkeypatch.setattr(probe_profile, "named_texts", lambda: dict(enumerate(TEXTS)))
    monkeypatch.setattr(contest, "N_READ", 320)
    made = probe_profile.cache(model, n_tokens=N_TOKENS, n_threads=1)
    found = profiles.find(model)
    assert np.array_equal(found.shares, made.shares) and found.command == "made on first use"
    assert [path.name for path in lookup.cached(profiles.identify(model)).parent.iterdir()] == [
        lookup.cached(profiles.identify(model)).name
    ]


def test_short_texts_and_uncompressed_models_are_refused(llm, tiny):
    from tests.engine import load

    with pytest.raises(BadInput, match="64 tokens"):
        probe_profile.make(llm, ["too short"])
    with pytest.raises(Unsupported, match="uncompressed"):
        probe_profile.make(load(tiny("llama-gqa")), TEXTS)


def test_the_shipped_texts():
    texts = probe_profile.texts()
    assert len(texts) == 8 and all(3500 < len(text) < 6500 for text in texts)


# ---- LU-KV


def best_loss(losses: list[np.ndarray], n_rows: int) -> float:
    """The least sum of losses[h][kept rows of h] with n_rows kept in all: dynamic programming."""
    table = np.concatenate([[0.0], np.full(n_rows, np.inf)])
    for loss in losses:
        table = np.array(
            [
                min(table[n - i] + loss[i] for i in range(min(n, len(loss) - 1) + 1))
                for n in range(n_rows + 1)
            ]
        )
    return float(table[n_rows])


@pytest.mark.parametrize("seed", range(20))
def test_greedy_is_the_optimum_of_the_convex_problem(seed):
    pytest.importorskip("scipy")
    rng = np.random.default_rng(seed)
    importance = rng.gamma(0.3, 1, (1, 4, 6)).astype(np.float32)
    order = np.argsort(-(importance[0] + rng.random((4, 6))), axis=1)
    gains = lukv.convex(importance, order)[0]
    assert (np.diff(gains, axis=1) <= 1e-6).all() and gains.sum(axis=1) == pytest.approx(
        importance[0].sum(axis=1), rel=1e-5
    )
    losses = [np.concatenate([[0], np.cumsum(-g)]) + g.sum() for g in gains.astype(np.float64)]
    for n in (3, 10, 17):
        kept = np.rint(probe_profile.count(gains[None], (n / 24,))[0, 0] * 6).astype(int)
        assert kept.sum() == n
        assert sum(loss[k] for loss, k in zip(losses, kept, strict=True)) == pytest.approx(
            best_loss(losses, n), abs=1e-5
        )


def test_rows_that_the_score_finds_late_make_the_loss_convex():
    pytest.importorskip("scipy")
    gains = lukv.convex(np.array([[[1.0, 5.0, 0.0, 2.0]]], np.float32), np.array([[0, 1, 2, 3]]))
    assert gains[0, 0].tolist() == [3, 3, 1, 1]


def test_output_norms_are_those_of_the_projected_values(tiny):
    shape, weights = models.SHAPES["llama-gqa"], dict(models.tensors(models.SHAPES["llama-gqa"]))
    values = np.random.default_rng(0).standard_normal((7, shape.d_head)).astype(np.float32)
    w_o = weights["blk.1.attn_output.weight"]
    expected = np.mean(
        [np.linalg.norm(values @ w_o[:, h * 64 : h * 64 + 64].T, axis=1) for h in (2, 3)], axis=0
    )
    got = oracle.OutputWeights(str(tiny("llama-gqa"))).norms(
        1, shape.n_head, values, 1, shape.n_head_kv
    )
    np.testing.assert_allclose(got, expected, rtol=1e-4)


def test_a_lukv_profile_goes_on_and_serves_its_score(tiny, tmp_path, monkeypatch):
    pytest.importorskip("scipy")
    model, sources = (
        str(tiny("llama-gqa")),
        [lukv.Questioned(TEXTS[0], ("where?", "when?")), lukv.Questioned(TEXTS[1], ("who?",))],
    )
    llm, partial = lukv.load(model, "keydiff", 1024, n_threads=1), tmp_path / "p.partial"

    read = []

    def stop(done, total):
        if partial.exists() and len(json.loads(partial.read_text())) == 4:
            read.append((done, total))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lukv.make(llm, sources, partial=partial, progress=stop)
    assert len(json.loads(partial.read_text())) == 3 + 1, "three answers and the first text"
    steps, measured, measure = [], [], lukv.measure
    monkeypatch.setattr(
        lukv,
        "measure",
        lambda llm, weights, context, *more: (
            measured.append(context) or measure(llm, weights, context, *more)
        ),
    )
    kept = partial.read_bytes()
    profile = lukv.make(llm, sources, partial=partial, progress=lambda *step: steps.append(step))
    assert len(measured) == 1
    partial.write_bytes(kept)
    lukv.make(llm, sources, (0.5,), partial=partial)
    assert len(measured) == 3, "what was measured for other ratios does not count"
    assert np.array_equal(lukv.make(llm, sources).shares, profile.shares)
    assert (
        profile.shares.shape == (99, 3, 2)
        and profile.shares.min() > 0.5 * lukv.LEAST
        and not partial.exists()
    )
    assert profile.shares.mean(axis=(1, 2)) == pytest.approx(np.array(profile.ratios), rel=0.005)
    assert steps == sorted(steps) and steps[-1][0] == steps[-1][1]
    assert steps[0] == read[0], "what was done before is said at once"
    assert profile.score == "keydiff" and profile.kind == "lukv"


def test_known_answers_are_read_and_the_others_decoded(tiny, monkeypatch):
    pytest.importorskip("scipy")
    llm = lukv.load(str(tiny("llama-gqa")), "keydiff", 1024, n_threads=1)
    decoded, measured, measure = [], [], lukv.measure
    monkeypatch.setattr(
        oracle, "decode", lambda llm, n, question: decoded.append(question) or [7, 8, 9]
    )
    monkeypatch.setattr(
        lukv,
        "measure",
        lambda llm, weights, context, dialogues, *more: (
            measured.extend(dialogues) or measure(llm, weights, context, dialogues, *more)
        ),
    )
    lukv.make(
        llm,
        [lukv.Questioned.parse(TEXTS[0], ["where?\tin the shed", "", "when? \t", "who?"])],
        (0.2,),
    )
    answers = [answer for _, answer in measured]
    assert (
        answers
        == [llm.tokenize(b"in the shed", add_bos=False)[: oracle.MAX_ANSWER], [7, 8, 9], [7, 8, 9]]
        and len(decoded) == 2
    )


def test_the_two_objectives_by_hand():
    pytest.importorskip("scipy")
    importance = np.array(
        [  # two questions, two layers of two heads (one of which does not exist), three rows
            [[[3, 1, 0], [np.nan] * 3], [[2, 0, 2], [4, 0, 0]]],
            [[[1, 1, 2], [np.nan] * 3], [[0, 1, 0], [0, 0, 1]]],
        ],
        np.float32,
    )
    order = np.array([[[2, 0, 1], [0, 1, 2]], [[0, 1, 2], [0, 1, 2]]], np.int32)
    paper, energy = (lukv.gains(importance, order, name) for name in ("paper", "energy"))
    assert paper.shape == (2, 2, 2, 3) and energy.shape == (1, 2, 2, 3)
    assert np.isnan(paper[:, 0, 1]).all() and np.isnan(energy[:, 0, 1]).all()
    assert paper[0, 0, 0] == pytest.approx(
        [0.375, 0.375, 0.25]
    )  # 0, 3, 1 of 4: the late 3 is shared with the 0 before it
    assert paper[0, 1] == pytest.approx(
        np.array([[0.25, 0.125, 0.125], [0.5, 0, 0]])
    )  # of 8 in the layer
    first = np.array([0, 9, 1]) / 34  # 9 + 1 + 4 + 4 + 16
    second = np.array([4, 1, 1]) / 8
    assert energy[0, 0, 0] == pytest.approx((first + second) / 2)
    pooled = (4 / 34 + 1 / 8) / 4  # the second row adds more than the first
    assert energy[0, 1, 0] == pytest.approx([pooled, pooled, 2 / 34])


def test_questions_that_do_not_do(tiny):
    llm = lukv.load(str(tiny("llama-gqa")), "snapkv", 512, n_threads=1)
    for text, asked, says in (
        (TEXTS[0], [], "questions"),
        (TEXTS[0], ["why " * 50], "60 tokens"),
        (TEXTS[0] * 3, ["why?"], "this model takes"),
    ):
        with pytest.raises(BadInput, match=says):
            lukv.make(llm, [lukv.Questioned(text, tuple(asked))])


def test_the_shipped_questions():
    sources = lukv.sources()
    assert len({question for source in sources for question in source.questions}) == 30
    assert all(
        len(source.answers) == len(source.questions) and all(source.answers) for source in sources
    )
    assert 3500 < sum(len(source.text.split()) for source in sources) < 4500


# ---- curves and pictures


def test_published_curves_go_in_and_out(tmp_path):
    removed = np.sort(np.random.default_rng(0).random((99, 4, 2)), axis=0).astype(np.float32)
    model = replace(MODEL, n_head_kv=(2,) * 4)
    np.save(tmp_path / "c.npy", removed)
    profile = curves.read_curve(str(tmp_path / "c.npy"), model, "snapkv")
    assert profile.ratios[0] == 0.01 and profile.ratios[-1] == 0.99 and profile.kind == "imported"
    assert profile.shares[0] == pytest.approx(np.maximum(1 - removed[-1], 0.01))  # 99 % removed
    curves.write_curve(profile, str(tmp_path / "d.npy"))
    out = np.load(tmp_path / "d.npy")
    assert out.shape == removed.shape and out.mean(axis=(1, 2)) == pytest.approx(
        curves.REMOVED, abs=1e-6
    )
    again = curves.read_curve(str(tmp_path / "d.npy"), model)
    assert again.shares_at(0.3) == pytest.approx(profile.shares_at(0.3), abs=0.01)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((98, 4, 2)),
        np.zeros((99, 4, 2), np.int64),
        np.full((99, 4, 2), 1.2),
        np.full((99, 4, 2), np.nan),
    ],
)
def test_other_arrays_are_no_curves(tmp_path, array):
    np.save(tmp_path / "c.npy", array)
    with pytest.raises(BadInput) as error:
        curves.read_curve(str(tmp_path / "c.npy"), replace(MODEL, n_head_kv=(2,) * 4))
    assert "c.npy" in one_line(error)


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"text", b"PK\3\4"])
def test_other_files_are_no_curves(tmp_path, content):
    (tmp_path / "c.npy").write_bytes(content)
    with pytest.raises(BadInput) as error:
        curves.read_curve(str(tmp_path / "c.npy"), MODEL)
    assert "c.npy" in one_line(error)


def test_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    draw.image(make(), 0.2, str(tmp_path / "p.png"))
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_matplotlib_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(EdgeKVError) as error:
        draw.image(make(), 0.2, str(tmp_path / "p.png"))
    assert "edgekv[profile]" in one_line(error)


@pytest.mark.parametrize("n_head_kv", [2, 40])
def test_the_heat_map_has_a_line_for_each_layer(capsys, n_head_kv):
    draw.heat_map(make(replace(MODEL, n_head_kv=(n_head_kv, n_head_kv, 1, n_head_kv))), 0.2)
    assert len(capsys.readouterr().out.splitlines()) == 5


# ---- commands


@pytest.mark.parametrize("name", ["probe", "lukv", "show"])
def test_help_loads_no_library(name):
    code = (
        "import sys; sys.argv[0] = 'edgekv'\nfrom edgekv.commands import main\n"
        "try: main()\nfinally: assert not {'llama_cpp', 'gguf', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "profile", name, "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "--" in done.stdout, done.stderr


def call(line: str = "", *words: str):
    return typed(f"profile {line}", *words)


def test_the_commands_together(tiny, tmp_path, monkeypatch):
    monkeypatch.delenv("LLAMA_ARG_THREADS", raising=False)
    model, out = str(tiny("llama-gqa")), str(tmp_path / "p.gguf")
    for i, text in enumerate(TEXTS):
        (tmp_path / f"{i}.txt").write_text(text)
    texts = [word for i in range(2) for word in ("--contexts", str(tmp_path / f"{i}.txt"))]
    done = call(
        f"probe -m {model} -o {out}", *texts, "--ratios", "0.5,0.2", "--tokens", "200", "-t", "1"
    )
    assert done.exit_code == 0 and done.stdout.startswith("at 0.2 kept"), done.output
    shown = json.loads(call("show", out, "--json").stdout)
    assert (
        shown["command"]
        == "edgekv profile probe -m llama-gqa.gguf --contexts 0.txt --contexts 1.txt --tokens 200"
        " --ratios 0.2,0.5"
    )
    assert shown["ratios"] == [0.2, 0.5] and np.mean(shown["shares"]) == pytest.approx(
        0.2, abs=1e-5
    )
    assert len(call("show", out, "--kv-ratio", "0.5").stdout.splitlines()) > 10
    curve, again = str(tmp_path / "c.npy"), str(tmp_path / "q.gguf")
    assert call("export", out, curve).exit_code == 0
    assert call("import", curve, "-m", model, "-o", again, "--score", "snapkv").exit_code == 0
    assert profiles.read(again).shares_at(0.2) == pytest.approx(
        profiles.read(out).shares_at(0.2), abs=0.01
    )
    assert profiles.read(again).score == "snapkv"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["probe", "-m", "MODEL", "-o", "no/such/folder/p.gguf"], "folder"),
        (["probe", "-m", "MODEL", "-o", "p", "--contexts", "missing.txt"], "missing.txt"),
        (["probe", "-m", "MODEL", "-o", "p", "--ratios", "0.2,20"], "0.2"),
        (["probe", "-m", "missing.gguf", "-o", "p"], "missing.gguf"),
        (["show", "missing.gguf"], "missing.gguf"),
        (["import", "missing.npy", "-m", "MODEL", "-o", "p"], "missing.npy"),
        (["export", "MODEL", "c.npy"], "no profile"),
        (["lukv", "-m", "MODEL", "-o", "p", "--text", "t.txt"], "both or none"),
        (["lukv", "-m", "MODEL", "-o", "p", "--score", "nothing"], "nothing"),
        (["probe", "-m", "MODEL", "-o", "p", "--contexts", "MODEL"], "no text"),
        (["import", "/dev/zero", "-m", "MODEL", "-o", "p"], "/dev/zero"),
    ],
)
def test_mistakes_are_one_line(tiny, tmp_path, monkeypatch, args, says):
    monkeypatch.chdir(tmp_path)
    done = call(*[str(tiny("llama-gqa")) if arg == "MODEL" else arg for arg in args])
    assert says in refused(done)


@pytest.mark.skipif(os.name == "nt", reason="no pipes in folders")
@pytest.mark.parametrize(
    "args",
    [
        ["probe", "-m", "MODEL", "-o", "OUT"],
        ["lukv", "-m", "MODEL", "-o", "OUT"],
        ["evolkv", "-m", "MODEL", "-o", "OUT"],
        ["import", "c.npy", "-m", "MODEL", "-o", "OUT"],
        ["export", "p.gguf", "OUT"],
        ["show", "p.gguf", "-o", "OUT"],
    ],
)
@pytest.mark.parametrize("out", ["MODEL", "notes.txt", "link", "pipe", "/dev/null"])
def test_an_output_replaces_nothing_that_is_not_ours(tiny, tmp_path, monkeypatch, args, out):
    monkeypatch.chdir(tmp_path)
    model = shutil.copy(tiny("llama-gqa"), tmp_path / "m.gguf")
    profiles.write(make(), "p.gguf")
    curves.write_curve(make(), "c.npy")
    Path("notes.txt").write_text("what I wrote")
    Path("link").symlink_to("notes.txt")
    os.mkfifo("pipe")
    before = {path.name: path.lstat() for path in tmp_path.iterdir()}
    name = {"MODEL": "m.gguf"}.get(out, out)
    done = call(*[{"MODEL": "m.gguf", "OUT": name}.get(arg, arg) for arg in args])
    lines = done.stderr.splitlines()
    assert done.exit_code == 2 and len(lines) == 1 and name in lines[0], done.output
    after = {path.name: path.lstat() for path in tmp_path.iterdir()}
    assert {name: (s.st_ino, s.st_mtime_ns, s.st_size) for name, s in after.items()} == {
        name: (s.st_ino, s.st_mtime_ns, s.st_size) for name, s in before.items()
    }
    assert Path("notes.txt").read_text() == "what I wrote" and not Path("/dev/null").is_file()
    assert Path(model).read_bytes() == tiny("llama-gqa").read_bytes()


def test_what_we_wrote_is_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("real.gguf").touch()
    Path("p.gguf").symlink_to("real.gguf")
    for seed in range(2):
        profiles.write(make(seed=seed), "p.gguf")
        curves.write_curve(make(seed=seed), "c.npy")
    assert np.array_equal(profiles.read("real.gguf").shares, make(seed=1).shares)
    assert Path("p.gguf").is_symlink()
    Path("p.gguf").write_bytes(Path("p.gguf").read_bytes()[:200])  # damaged: it is made again
    profiles.write(make(), "p.gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.npy", "p.gguf", "real.gguf"]


def test_ctrl_c_while_a_text_is_read_is_not_lost(llm):
    """Python raises it where a callback from C begins, and throws away what leaves a callback; so
    nothing may be raised there.
    """
    raised = []

    def progress(done, total):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raised.append(done)

    tokens = tuple(llm.tokenize(TEXTS[0].encode()))[:N_TOKENS]
    with pytest.raises(KeyboardInterrupt):
        probe_profile.measure(llm, tokens, progress)
    assert not raised and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    probe_profile.measure(llm, tokens)
