"""Profiles that go from one computer to another, by a folder or by a repository."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgekv import profiles
from edgekv.methods.kvzap import Surrogate, n_features
from edgekv.profiles import places, shared
from tests import hub_server, models, stores
from tests.cli import refused, typed
from tests.test_profiles import make

REPO = "who/profiles"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    return stores.empty_home(monkeypatch, tmp_path)


@pytest.fixture
def model(tmp_path):
    """A model with a profile of each of two kinds in the cache of whoever made them."""
    path = models.write("llama-gqa", tmp_path)
    identity = profiles.identify(str(path))
    for kind, more in (("", {}), ("lukv-snapkv", {"kind": "lukv", "score": "snapkv"})):
        target = places.cached(identity, kind)
        target.parent.mkdir(parents=True, exist_ok=True)
        profiles.write(replace(make(identity), **more), target)
    return path


def packed(model, tmp_path):
    """The folder of the model's profiles, and the user's cache empty again."""
    result = typed(f"profile pack {model} -o {tmp_path / 'share'}")
    assert result.exit_code == 0, result.output
    for path in places.cached(profiles.identify(str(model))).parent.iterdir():
        path.unlink()
    return tmp_path / "share"


def test_a_folder_serves_another_user_of_the_model(model, tmp_path):
    before = profiles.find(str(model))
    folder = packed(model, tmp_path)
    digest = profiles.identify(str(model)).digest
    names = sorted(path.name for path in folder.iterdir())
    assert names == [f"kvbudget-{digest}.gguf", f"kvbudget-{digest}.lukv-snapkv.gguf"]
    assert profiles.find(str(model)) is None  # off unless named
    copy = model.with_name("renamed.gguf")
    model.rename(copy)
    result = typed(f"profile get {copy} {folder}")
    assert result.exit_code == 0 and len(result.stdout.splitlines()) == 2, result.output
    after = profiles.find(str(copy))
    assert np.array_equal(after.shares, before.shares) and after.model == before.model
    assert profiles.find(str(copy), kind="lukv").score == "snapkv"


def test_a_profile_that_is_there_stays_unless_told(model, tmp_path):
    folder = packed(model, tmp_path)
    mine = places.cached(profiles.identify(str(model)))
    profiles.write(make(profiles.identify(str(model)), seed=5), mine)
    before = mine.read_bytes()
    assert "--replace" in refused(typed(f"profile get {model} {folder}"))
    assert mine.read_bytes() == before and len(list(mine.parent.iterdir())) == 1
    assert typed(f"profile get {model} {folder} --replace").exit_code == 0
    assert mine.read_bytes() != before


def foreign(identity, folder, **changes):
    """A file in a shared folder under the model's name, of somebody who means harm."""
    path = folder / f"kvbudget-{identity.digest}.gguf"
    profiles.write(make(replace(identity, **changes)), path)


def test_what_is_not_this_models_is_not_taken(model, tmp_path):
    folder, identity = packed(model, tmp_path), profiles.identify(str(model))
    plain = folder / f"kvbudget-{identity.digest}.gguf"
    whole = plain.read_bytes()
    spoiled = {"attention": "cd" * 32, "embedding": "cd" * 32, "arch": "qwen2"}
    for name, value in spoiled.items():
        foreign(identity, folder, **{name: value})
        assert "another model" in refused(typed(f"profile get {model} {folder}"))
    foreign(identity, folder, attention="")
    assert "no attention weights" in refused(typed(f"profile get {model} {folder}"))
    for data in (whole[:-9], whole[:200], b"GGUF", b"x" * 100):
        plain.write_bytes(data)
        assert "edgekv: " in refused(typed(f"profile get {model} {folder}"))
    plain.unlink()
    plain.symlink_to("/dev/zero")
    refused(typed(f"profile get {model} {folder}"))
    assert not list(places.cached(identity).parent.iterdir())


def test_values_that_no_profile_has_are_not_taken(model, tmp_path):
    folder, identity = packed(model, tmp_path), profiles.identify(str(model))
    shape = (identity.n_layer, max(identity.n_head_kv), n_features(64, 64) + 1)
    for value, taken in ((1e9, False), (3.0, True)):
        maps = Surrogate(np.full(shape, value, np.float32), "halves")
        path = folder / f"kvbudget-{identity.digest}.gguf"
        profiles.write(replace(make(identity), surrogate=maps), path)
        result = typed(f"profile get {model} {folder} --replace")
        assert (result.exit_code == 0) is taken, result.output
    assert profiles.find(str(model), predicts=True) is not None


def test_mistakes_are_one_line(model, tmp_path):
    other = models.write("qwen2", tmp_path)
    folder = packed(model, tmp_path)
    assert "no profile of this model" in refused(typed(f"profile get {other} {folder}"))
    assert "cannot be read" in refused(typed(f"profile get {model} {tmp_path / 'none'}"))
    assert "is not here" in refused(typed(f"profile pack {other} -o {folder}"))
    assert "hf upload" in refused(typed(f"profile pack {other} -o hf:{REPO}"))
    assert "Name the models" in refused(typed(f"profile pack -o {folder}"))
    assert "downloads are off" in refused(typed(f"profile get {model} hf:{REPO}"))


def test_what_stands_in_the_way_of_a_pack_stays(model, tmp_path):
    file = stores.put(tmp_path / "file", b"mine")
    assert "cannot be made" in refused(typed(f"profile pack {model} -o {file}"))
    digest = profiles.identify(str(model)).digest
    other = stores.put(tmp_path / "share" / f"kvbudget-{digest}.gguf", b"mine")
    assert "is no profile" in refused(typed(f"profile pack {model} -o {other.parent}"))
    assert file.read_bytes() == other.read_bytes() == b"mine"


def test_a_repository_serves_too(model, tmp_path, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    folder = packed(model, tmp_path)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    identity = profiles.identify(str(model))
    with hub_server.serving() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.files |= {(REPO, path.name): path.read_bytes() for path in folder.iterdir()}
        hub.files[REPO, f"kvbudget-{'0' * 32}.gguf"] = b"another model's"
        result = typed(f"profile get {model} hf:{REPO}")
        assert result.exit_code == 0 and len(hub.ranges) == 2, result.output
        assert Path(places.cached(identity)).is_file()
        hub.files[REPO, f"kvbudget-{identity.digest}.big.gguf"] = bytes(shared.SIZE_MAX + 1)
        assert "too much" in refused(typed(f"profile get {model} hf:{REPO} --replace"))
