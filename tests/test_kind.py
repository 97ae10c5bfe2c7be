"""Files that are no model to chat with: each says in one line what it is and what to do."""

from __future__ import annotations

import gguf
import pytest

from tests import embedders, models
from tests.cli import refused, typed


def write(path, kind="model", arch="llama", **more):
    """A GGUF file without tensors, by what it says of itself."""
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_type(kind)
    for key, value in more.items():
        writer.add_uint32(key.replace("__", "."), value)
    models.add_tokenizer(writer)
    models.finish(writer)
    return path


@pytest.mark.parametrize("command", ["chat", "run", "fit", "info"])
@pytest.mark.parametrize(
    "kind, arch, expected",
    [
        ("mmproj", "clip", "mmproj"),
        ("model", "clip", "mmproj"),
        ("imatrix", "imatrix", "importance matrix"),
        ("model", "llama", "no weights"),
    ],
)
def test_a_file_that_is_no_model_says_what_it_is(tmp_path, command, kind, arch, expected):
    path = write(tmp_path / "x.gguf", kind, arch)
    line = refused(typed(f"{command} {path}" + " hello" * (command == "run")))
    assert expected in line and "name" in line and str(path) in line


@pytest.mark.parametrize("command", ["chat", "fit", "profile probe -o {folder}/p.gguf"])
def test_a_lora_is_sent_to_its_option(tmp_path, command):
    path = models.write_adapter(tmp_path / "lora.gguf", "llama-gqa")
    line = refused(typed(f"{command.format(folder=tmp_path)} -m {path}"))
    assert "LoRA adapter" in line and "--lora" in line


@pytest.mark.parametrize("command", ["chat", "run {} hello", "serve"])
@pytest.mark.parametrize("name", ["llama-embed", "t5encoder"])
def test_an_embedding_model_is_refused_before_it_is_loaded(tmp_path, command, name):
    path = embedders.write(name, tmp_path)
    words = command.format(path) if "{}" in command else f"{command} {path}"
    assert "embedding model" in refused(typed(words))


def test_a_model_that_pools_is_an_embedding_model(tmp_path):
    path = write(tmp_path / "x.gguf", arch="qwen3", qwen3__pooling_type=3)
    assert "no weights" in refused(typed(f"info {path}"))
    from edgekv.model.kind import gives_embeddings

    assert gives_embeddings(path)
    assert not gives_embeddings(write(tmp_path / "y.gguf", arch="qwen3", qwen3__pooling_type=0))
