"""Names of models that other programs keep on this computer, from made-up stores."""

from __future__ import annotations

import json
import os

import pytest

from edgekv.errors import BadInput
from edgekv.models.names import path_of
from tests import stores
from tests.cli import refused, typed
from tests.stores import put

DIGEST = "a" * 64


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """An empty home folder."""
    return stores.empty_home(monkeypatch, tmp_path)


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


@pytest.mark.parametrize("folder", [".local/share/nomic.ai/GPT4All", ".cache/gpt4all"])
def test_a_model_of_gpt4alls(home, folder):
    file = put(home / folder / "Tiny-Instruct.Q4_0.gguf")
    assert path_of("tiny-instruct.q4_0") == path_of("gpt4all:Tiny-Instruct.Q4_0") == str(file)
    # GPT4All's own name
    assert path_of("Tiny-Instruct.Q4_0.gguf") == path_of("gpt4all:Tiny-Instruct.Q4_0.gguf")


def test_a_file_that_there_is_not_stays_a_file(home):
    assert path_of("nowhere.gguf") == "nowhere.gguf"
    put(home / ".cache/gpt4all/tiny.gguf")
    assert path_of("./tiny.gguf") == "./tiny.gguf"


@pytest.mark.parametrize(
    "folder", [".local/share/Jan/data/llamacpp/models", ".config/Jan/data/models", "jan/models"]
)
def test_a_model_of_jans_is_called_by_its_folder(home, folder):
    file = put(home / folder / "tiny-3b/model.gguf")
    assert path_of("tiny-3b") == path_of("jan:tiny-3b") == str(file)


def test_a_model_that_llama_cpp_downloaded(home, monkeypatch):
    usual = put(home / ".cache/llama.cpp/who_Tiny-GGUF_tiny-q4_k_m.gguf")
    assert path_of("who_tiny-gguf_tiny-q4_k_m") == str(usual)
    monkeypatch.setenv("LLAMA_CACHE", str(home / "elsewhere"))
    with pytest.raises(BadInput, match="no model"):
        path_of("who_tiny-gguf_tiny-q4_k_m")
    commit = home / "elsewhere/models--who--New-GGUF/snapshots" / ("1" * 40)
    newer = put(commit / "new-Q4_K_M.gguf")
    assert path_of("llama.cpp:who/New-GGUF:Q4_K_M") == path_of("who/new-gguf") == str(newer)


def test_only_the_first_part_and_no_projector_is_a_model(home):
    folder = home / ".cache/llama.cpp"
    first = put(folder / "big-00001-of-00002.gguf")
    put(folder / "big-00002-of-00002.gguf")
    put(folder / "mmproj-big.gguf")
    assert path_of("big") == str(first)
    with pytest.raises(BadInput, match="no model"):
        path_of("mmproj-big")


def test_an_unknown_name_is_one_line_with_the_nearest(home):
    ollama(home)
    assert "ollama:llama3.2:latest" in refused(typed("info lama3.2"))
    assert "twice" in refused(typed("info -m a b"))
