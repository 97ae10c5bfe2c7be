"""profile pack and get: a folder, or a repository on a loopback server."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace

import pytest

from edgekv import profiles
from edgekv.profiles import places, shared
from tests import models
from tests.cli import refused, typed
from tests.hub import Hub, served
from tests.test_profiles import make


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return tmp_path


@pytest.fixture
def model(tmp_path, tiny):
    """A model's file that no other test puts profiles beside."""
    return shutil.copy(tiny("llama-gqa"), tmp_path / "model.gguf")


@pytest.fixture
def packed(tmp_path, model):
    """A folder with a model's profiles, two kinds; there are none elsewhere."""
    identity = profiles.identify(model)
    places.cached(identity).parent.mkdir(parents=True)
    profiles.write(make(identity), places.cached(identity))
    other = replace(make(identity, seed=1), kind="lukv", score="snapkv")
    profiles.write(other, places.beside(model, "lukv-snapkv"))
    folder = tmp_path / "shared"
    result = typed(f"profile pack {model} {folder}")
    assert result.exit_code == 0, result.output
    assert result.stdout.split() == [str(folder / name) for name in names(identity)]
    places.cached(identity).unlink()
    places.beside(model, "lukv-snapkv").unlink()
    assert profiles.find(model) is None
    return folder


def names(identity):
    """Of the two files."""
    stem = f"kvbudget-{identity.digest}"
    # what lies beside a model comes first
    return [f"{stem}.lukv-snapkv.gguf", f"{stem}.gguf"]


def test_another_users_profiles_are_found_from_then_on(model, packed):
    assert typed(f"profile get {model} {packed}").exit_code == 0
    found = profiles.find(model)
    assert (found.kind, found.shares.tolist()) == (
        "probe",
        make(profiles.identify(model)).shares.tolist(),
    )
    assert profiles.find(model, kind="lukv", score="snapkv").kind == "lukv"


def test_nothing_looks_there_unless_it_is_named(model, packed):
    assert profiles.find(model) is None


def test_what_is_here_stays_unless_it_may_be_replaced(model, packed):
    identity = profiles.identify(model)
    mine = make(identity, seed=9)
    profiles.write(mine, places.cached(identity))
    result = typed(f"profile get {model} {packed}")
    assert result.exit_code == 0 and "--replace" in result.stderr
    assert profiles.find(model).shares.tolist() == mine.shares.tolist()
    assert typed(f"profile get {model} {packed} --replace").exit_code == 0
    assert profiles.find(model).shares.tolist() == make(identity).shares.tolist()


def test_a_repository_serves_too(model, packed, monkeypatch):
    files = {f"profiles/{path.name}": path.read_bytes() for path in packed.iterdir()}
    files["profiles/kvbudget-" + "0" * 32 + ".gguf"] = b"another model's"
    with served(Hub({"who/profiles": files}, small=set(files))) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        assert typed(f"profile get {model} hf:who/profiles").exit_code == 0
        assert len(hub.ranges) == 2
    assert profiles.find(model).kind == "probe"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE" in refused(typed(f"profile get {model} hf:who/profiles"))


def test_a_file_too_large_for_a_profile_is_not_fetched(model, packed, monkeypatch):
    name = places.cached(profiles.identify(model)).name
    with served(Hub({"who/profiles": {name: bytes(shared.MAX_BYTES + 1)}})) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        assert "larger than any profile" in refused(typed(f"profile get {model} hf:who/profiles"))
        assert not hub.ranges


def damage(path, identity):
    path.write_bytes(path.read_bytes()[:-100])


def of_another(path, identity):
    path.unlink()
    profiles.write(make(replace(identity, embedding="f" * 64)), path)


def of_any_attention(path, identity):
    path.unlink()
    profiles.write(make(identity.older), path)


def not_numbers(path, identity):
    data = bytearray(path.read_bytes())
    data[-4:] = b"\xff\xff\xff\xff"
    path.write_bytes(data)


def no_profile(path, identity):
    path.write_bytes(b"hello")


@pytest.mark.parametrize("harm", [damage, of_another, of_any_attention, not_numbers, no_profile])
def test_what_is_wrong_is_refused_and_nothing_is_taken(model, packed, harm):
    identity = profiles.identify(model)
    harm(packed / places.cached(identity).name, identity)
    assert places.cached(identity).name in refused(typed(f"profile get {model} {packed}"))
    assert profiles.find(model) is None and not list(places.cached(identity).parent.iterdir())


@pytest.mark.parametrize(
    "line, expected",
    [
        ("profile get {model} {folder}/nowhere", "hf:USER/REPO"),
        ("profile get {model} {folder}", "no profile of this model"),
        ("profile pack {model} {folder}/x", "profile probe"),
        ("profile pack {model} hf:who/profiles", "hf upload who/profiles"),
        ("profile get {model}", "Missing"),
    ],
)
def test_what_cannot_be_done_is_one_line(tmp_path, model, line, expected):
    assert expected in refused(typed(line.format(model=model, folder=tmp_path)))


def test_another_model_has_none_there(tmp_path, packed):
    other = models.write("llama-mha", tmp_path)
    assert "no profile of this model" in refused(typed(f"profile get {other} {packed}"))
    assert os.listdir(packed)
