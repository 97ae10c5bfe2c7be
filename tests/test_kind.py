"""GGUF files that are no models, given as one."""

from __future__ import annotations

import pytest

from edgekv.errors import BadInput
from edgekv.model import kind
from tests import embedders, gguf_files, models
from tests.cli import refused, typed


@pytest.mark.parametrize("what", ["mmproj", "--lora", "importance", "--kv-profile", "vocabulary"])
def test_a_file_beside_models_is_said_to_be_one(tmp_path, what):
    path = gguf_files.others(tmp_path)[what]
    for line in ("info", "fit", "chat", "bench -m"):
        assert what in refused(typed(f"{line} {path}"))


@pytest.mark.parametrize("line", ["profile probe -o {0}/p.gguf", "profile get {0}"])
def test_it_is_said_of_a_model_for_a_profile_too(tmp_path, line):
    path = gguf_files.others(tmp_path)["--lora"]
    assert "--lora" in refused(typed(f"{line.format(tmp_path)} -m {path}"))


@pytest.mark.parametrize("arch", ["bert", "gemma-embedding"])
def test_an_embedding_model_writes_no_text(tmp_path, arch):
    path = gguf_files.write(tmp_path / "e.gguf", arch, ("a",))
    assert "embedding=True" in refused(typed(f"chat {path}"))
    assert "embedding=True" in refused(typed(f"run {path} hi"))


def test_a_ranker_by_its_pooling_writes_no_text(tmp_path):
    path = gguf_files.write(tmp_path / "r.gguf", "qwen3", ("a",), qwen3__pooling_type=4)
    assert "writes no text" in refused(typed(f"run {path} hi"))


def test_an_embedding_model_makes_no_profile_before_it_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("edgekv.commands.first_use.make_profile", lambda *_: pytest.fail("made"))
    path = embedders.write("llama-embed", tmp_path)
    assert "writes no text" in refused(typed(f"chat {path} --kv-ratio 0.5"))


def test_models_are_let_pass(tmp_path):
    kind.check(str(models.write("llama-gqa", tmp_path)), writes=True)
    first = models.write_in_parts("llama-gqa", tmp_path)
    kind.check(str(first), writes=True)
    with pytest.raises(BadInput, match="vocabulary"):
        kind.check(str(gguf_files.write(tmp_path / "v.gguf", "llama")))
