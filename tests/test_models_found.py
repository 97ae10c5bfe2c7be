"""Names of models that other programs keep on this computer, from made-up stores."""

from __future__ import annotations

import json
import os

import pytest

from edgekv.errors import BadInput
from edgekv.models_found.names import path_of
from tests.cli import refused, typed

DIGEST = "a" * 64


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """An empty home folder."""
    for name in list(os.environ):
        if name.startswith(("HF_", "HUGGINGFACE_", "XDG_", "OLLAMA_", "LLAMA_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def put(path, data=b"GGUF"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def ollama(home, digest=f"sha256:{DIGEST}"):
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": digest}
    top = home / ".ollama/models"
    put(
        top / "manifests/registry.ollama.ai/library/llama3.2/latest",
        json.dumps({"layers": [layer]}).encode(),
    )
    return put(top / f"blobs/sha256-{DIGEST}")


@pytest.mark.parametrize("name", ["ollama:llama3.2", "ollama:llama3.2:latest", "llama3.2"])
def test_a_model_of_ollamas_is_its_blob(home, name):
    blob = ollama(home)
    assert path_of(name) == str(blob)


@pytest.mark.parametrize("digest", ["sha256:../../etc/passwd", "sha256:" + "A" * 64, 7])
def test_a_digest_that_is_none_is_refused(home, digest):
    ollama(home, digest)
    with pytest.raises(BadInput, match="manifest is damaged"):
        path_of("ollama:llama3.2")


def test_a_link_out_of_the_store_is_refused(home):
    ollama(home).unlink()
    os.symlink("/etc/passwd", home / f".ollama/models/blobs/sha256-{DIGEST}")
    with pytest.raises(BadInput, match="leads out"):
        path_of("ollama:llama3.2")


def test_a_model_of_lm_studios_has_its_files_name(home):
    file = put(home / ".lmstudio/models/who/Repo-GGUF/Tiny-Q4_K_M.gguf")
    assert path_of("tiny-q4_k_m") == path_of("lmstudio:who/Repo-GGUF/Tiny-Q4_K_M") == str(file)


def test_a_model_of_hugging_faces_cache(home):
    top = home / ".cache/huggingface/hub/models--who--Tiny-GGUF/snapshots" / ("0" * 40)
    file = put(top / "Tiny-Q8_0.gguf")
    assert path_of("who/Tiny-GGUF") == path_of("hf:who/Tiny-GGUF:Q8_0") == str(file)
    assert path_of("hf:who/Tiny-GGUF") == path_of("hf:who/Tiny-GGUF/Tiny-Q8_0.gguf") == str(file)
    assert "leave out" in refused(typed("info -m demo -hff Tiny-Q8_0.gguf"))


def test_an_unknown_name_is_one_line_with_the_nearest(home):
    ollama(home)
    assert "ollama:llama3.2:latest" in refused(typed("info lama3.2"))
    assert "twice" in refused(typed("info -m a b"))
