"""choose: auto takes the model's profile where there is one, presets and mixes find theirs by kind,
and what is missing is said.
"""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest

from edgekv import profiles
from edgekv.choice.choose import (
    WITH_PROFILE,
    WITH_SHARES,
    WITHOUT_PROFILE,
    choose,
    learns,
    wants_predictions,
)
from edgekv.errors import BadInput
from edgekv.methods.kvzap import Surrogate, n_features
from edgekv.profiles import places


def test_auto_uses_the_shipped_profile_of_the_demo_model(demo_model):
    assert choose("auto", str(demo_model)).name == WITH_PROFILE
    assert choose("auto", str(demo_model), "none").name == WITHOUT_PROFILE
    assert choose("score=random,budget=profile", str(demo_model)).budget.name == "profile"


@pytest.mark.parametrize("kind", ["lukv", "evolkv"])
def test_the_demo_model_has_every_kind_of_profile(demo_model, kind):
    preset = choose(kind, str(demo_model))
    shares = preset.budget.shares(0.2)
    assert (
        preset.score.name == "snapkv"
        and shares.mean() == pytest.approx(0.2)
        and np.ptp(shares) > 0.2
    )
    assert (np.ptp(shares, axis=1) == 0).all() == (kind == "evolkv"), (
        "EvolKV's heads of a layer have the same"
    )


@pytest.fixture
def folder(tiny, tmp_path, monkeypatch):
    """A model alone in a folder, nothing shipped, an empty cache: (path of the model, add(kind,
    score, name, value) -> path).
    """
    model = str(shutil.copy(tiny("llama-gqa"), tmp_path / "m.gguf"))
    monkeypatch.setattr(places, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(places, "user_cache", lambda: tmp_path / "cache")
    identity = profiles.identify(model)

    def add(
        kind: str, score: str, name: str, first: float = 0.1, model=identity, maps: bool = False
    ) -> str:
        """A profile in which layer 0 has the share `first` at 0.2; maps: with `first` in all of
        kvzap's.
        """
        shares = np.full(
            (1, identity.n_layer, 2),
            (0.2 * identity.n_layer - first) / (identity.n_layer - 1),
            np.float32,
        )
        shares[0, 0] = first
        weights = np.full(
            (*shares.shape[1:], n_features(identity.d_head_k, identity.d_head_v) + 1),
            first,
            np.float32,
        )
        surrogate = Surrogate(weights, "halves") if maps else None
        profiles.write(
            profiles.Profile(model, kind, (0.2,), shares, score, surrogate=surrogate),
            tmp_path / name,
        )
        return str(tmp_path / name)

    return model, add


def first_of(preset) -> float:
    return round(float(preset.budget.shares(0.2)[0, 0]), 4)


def test_without_a_profile_auto_takes_the_best_method_that_needs_none(folder):
    assert choose("auto", folder[0]).name == WITHOUT_PROFILE


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("score=random,budget=profile", "edgekv profile probe"),
        ("lukv", "edgekv profile lukv"),
        ("evolkv", "edgekv profile evolkv"),
        ("score=keydiff,budget=lukv", "edgekv profile lukv"),
        ("evolkv:kernel=5", "edgekv profile evolkv"),
    ],
)
def test_what_needs_a_profile_says_so(folder, text, says):
    for wish in (None, "none"):
        with pytest.raises(BadInput, match=says) as error:
            choose(text, folder[0], wish)
        assert "\n" not in str(error.value)


def test_profiles_lie_side_by_side_and_are_found_by_kind_and_score(folder):
    model, add = folder
    add("probe", "", "kvbudget-m.gguf", 0.11)
    add("evolkv", "snapkv", "kvbudget-m.a-task.gguf", 0.12)
    add("lukv", "keydiff", "kvbudget-m.lukv-keydiff.gguf", 0.13)
    assert (choose("lukv", model).score.name, first_of(choose("lukv", model))) == (
        "keydiff",
        0.13,
    ), "the only one there is brings its score"
    add("lukv", "snapkv", "kvbudget-m.lukv-snapkv.gguf", 0.14)
    assert [
        first_of(choose(text, model))
        for text in ("lukv", "evolkv", "auto", "score=snapkv,budget=profile")
    ] == [0.14, 0.12, 0.11, 0.11]
    assert first_of(choose("score=keydiff,budget=lukv", model)) == 0.13
    assert choose("lukv", model).name == "lukv" and choose("lukv", model).score.name == "snapkv"
    assert choose("lukv:kernel=5", model).params.kernel == 5


def map_of(preset) -> float:
    return round(float(preset.score.surrogate.weights[0, 0, 0]), 4)


def test_auto_wants_maps_and_does_with_shares(folder):
    model, add = folder
    path = add("lukv", "keydiff", "kvbudget-m.lukv.gguf", 0.11)
    assert (choose("auto", model).name, first_of(choose("auto", model))) == (WITH_SHARES, 0.11)
    add("probe", "", "kvbudget-m.gguf", 0.12, maps=True)
    assert (
        choose("auto", model).name,
        first_of(choose("auto", model)),
        map_of(choose("auto", model)),
    ) == (WITH_PROFILE, 0.12, 0.12)
    assert choose("auto", model, path).name == WITH_SHARES, "the file that is named counts"
    assert choose("auto", model, "none").name == WITHOUT_PROFILE


def test_kvzap_goes_with_any_budget(folder):
    model, add = folder
    with pytest.raises(BadInput, match="maps for kvzap.*edgekv profile probe"):
        choose("score=kvzap", model)
    add("probe", "", "kvbudget-m.gguf", 0.12, maps=True)
    path = add("lukv", "kvzap", "kvbudget-m.lukv.gguf", 0.13)
    assert map_of(choose("score=kvzap,budget=adakv", model)) == 0.12
    for preset in (
        choose("score=kvzap,budget=lukv", model),
        choose("score=kvzap,budget=profile", model, path),
    ):
        assert (first_of(preset), map_of(preset)) == (0.13, 0.12), (
            "shares of one profile, maps of another"
        )
    with pytest.raises(BadInput, match="maps for kvzap"):
        choose("score=kvzap", model, "none")


@pytest.mark.parametrize(
    ("text", "wants_maps", "wants_any"),
    [
        ("auto", True, True),
        ("kvzap", True, True),
        ("score=kvzap,budget=adakv", True, True),
        ("score=random,budget=profile", False, True),
        ("lukv", False, False),
        ("snapkv", False, False),
    ],
)
def test_what_first_use_would_make_a_profile_for(text, wants_maps, wants_any):
    assert (wants_predictions(text), learns(text)) == (wants_maps, wants_any)


def test_in_the_cache_they_lie_side_by_side_too(folder, tmp_path):
    model, add = folder
    places.cached(profiles.identify(model)).parent.mkdir(parents=True)
    for kind in ("", "evolkv"):
        shutil.move(
            add(kind or "probe", "", "x.gguf", 0.15 if kind else 0.16),
            places.cached(profiles.identify(model), kind),
        )
    assert first_of(choose("evolkv", model)) == 0.15 and first_of(choose("auto", model)) == 0.16


def test_a_task_profile_is_never_taken_unasked(folder):
    model, add = folder
    path = add("evolkv", "keydiff", "kvbudget-m.gguf")
    assert choose("auto", model).name == WITHOUT_PROFILE
    with pytest.raises(BadInput):
        choose("score=keydiff,budget=profile", model)
    assert choose("score=keydiff,budget=profile", model, path).budget.name == "profile"


def test_the_file_that_is_named_wins_and_brings_its_score(folder):
    model, add = folder
    add("lukv", "snapkv", "kvbudget-m.lukv.gguf", 0.11)
    path = add("lukv", "keydiff", "elsewhere.gguf", 0.12)
    preset = choose("lukv", model, path)
    assert (preset.score.name, first_of(preset), preset.name) == ("keydiff", 0.12, "lukv")


@pytest.mark.parametrize(
    ("text", "kind", "score", "says"),
    [
        ("lukv", "probe", "", "of the kind 'probe', not 'lukv'"),
        ("evolkv", "lukv", "snapkv", "of the kind 'lukv', not 'evolkv'"),
        ("score=h2o,budget=lukv", "lukv", "snapkv", "'snapkv', not for 'h2o'"),
        ("lukv:kernel=5", "lukv", "keydiff", "'keydiff', not for 'snapkv'"),
        ("auto", "lukv", "snapkv", "'snapkv', not for 'keydiff'"),
    ],
)
def test_a_named_profile_of_another_kind_or_score_is_refused(folder, text, kind, score, says):
    model, add = folder
    path = add(kind, score, "elsewhere.gguf")
    with pytest.raises(BadInput, match=says) as error:
        choose(text, model, path)
    assert "\n" not in str(error.value) and "elsewhere.gguf" in str(error.value)


def test_a_profile_of_another_model_is_refused(folder):
    model, add = folder
    path = add(
        "lukv",
        "snapkv",
        "kvbudget-m.lukv.gguf",
        model=replace(profiles.identify(model), embedding="ff"),
    )
    with pytest.raises(BadInput, match="another model"):
        choose("lukv", model, path)
    with pytest.raises(BadInput, match="there is no lukv profile"):
        choose("lukv", model)


def test_heads_keep_different_numbers_of_rows_and_the_sum_is_that_of_the_ratio(demo_model):
    from edgekv import Llama

    llm = Llama(
        str(demo_model),
        n_ctx=1024,
        kv_ratio=0.3,
        kv_method="auto",
        type_k=8,
        type_v=8,
        verbose=False,
    )
    llm.eval(llm.tokenize(b"A line of text that is read again and again. " * 70)[:700])
    kept = llm.kv_stats().kept
    assert (
        kept.max() > 4 * kept.min() and kept.sum() <= 0.3 * 64 / 34 * 700 * kept.size
    )  # rows of 34 bytes where f16 has 64


def test_a_choice_looks_once(demo_model, monkeypatch):
    """Identifying a model reads pieces of all of its attention weights."""
    looked = []
    read, identify = places.read, places.identify
    monkeypatch.setattr(places, "read", lambda path: looked.append(str(path)) or read(path))
    monkeypatch.setattr(places, "identify", lambda path: looked.append(path) or identify(path))
    for name in ("auto", "kvzap-summary", "edgekv", "lukv", "score=joint,budget=profile"):
        looked.clear()
        choose(name, str(demo_model), ratio=0.2)
        assert str(demo_model) in looked and len(set(looked)) == len(looked)
