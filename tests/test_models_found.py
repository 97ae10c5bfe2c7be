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
        if name.startswith(("HF_H", "HF_T", "HUGGINGFACE_", "XDG_", "OLLAMA_", "LLAMA_")):
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


@pytest.mark.parametrize(
    "folder", [".local/share/nomic.ai/GPT4All", ".cache/gpt4all"], ids=["window", "python"]
)
def test_a_model_of_gpt4alls(home, folder):
    file = put(home / folder / "Meta-Llama-3-8B-Instruct.Q4_0.gguf")
    put(home / folder / "nomic-embed.imatrix.txt")
    name = "Meta-Llama-3-8B-Instruct.Q4_0"
    assert path_of(name) == path_of(f"{name}.gguf") == path_of(f"gpt4all:{name}.gguf")
    assert path_of(name) == path_of(name.lower()) == str(file)


@pytest.mark.parametrize(
    "top", [".local/share/Jan/data", ".config/Jan/data", "jan"], ids=["now", "before", "first"]
)
@pytest.mark.parametrize("inner", ["llamacpp/models", "models"])
def test_a_model_of_jans_has_its_folders_name(home, top, inner):
    folder = home / top / inner / "who/Qwen3-4B-Q4_K_M"
    file = put(folder / "model.gguf")
    put(folder / "mmproj.gguf")
    assert path_of("jan:who/Qwen3-4B-Q4_K_M") == path_of("qwen3-4b-q4_k_m") == str(file)


def test_another_file_of_jans_keeps_its_name(home):
    file = put(home / "jan/models/tiny/Tiny-Q8_0.gguf")
    assert path_of("jan:tiny/Tiny-Q8_0") == str(file)


def test_a_model_of_llama_cpps_cache(home):
    file = put(home / ".cache/llama.cpp/ggml-org_gemma-3-270m_gemma-3-270m-Q8_0.gguf")
    put(home / ".cache/llama.cpp/ggml-org_gemma-3-270m_gemma-3-270m-Q8_0.gguf.etag", b"x")
    name = "ggml-org_gemma-3-270m_gemma-3-270m-Q8_0"
    assert path_of(name) == path_of(f"llama.cpp:{name}") == str(file)


def test_llama_cpps_folder_is_llama_cache_and_may_hold_repositories(home, monkeypatch):
    monkeypatch.setenv("LLAMA_CACHE", str(home / "there"))
    put(home / ".cache/llama.cpp/elsewhere.gguf")
    top = home / "there/models--who--Tiny-GGUF/snapshots" / ("0" * 40)
    file = put(top / "Tiny-Q4_K_M.gguf")
    put(top / "mmproj-Tiny-Q8_0.gguf")
    assert path_of("llama.cpp:who/Tiny-GGUF:Q4_K_M") == path_of("Tiny-Q4_K_M") == str(file)
    with pytest.raises(BadInput, match="no model 'elsewhere'"):
        path_of("elsewhere")


def test_a_split_model_is_its_first_part(home):
    first = put(home / ".cache/llama.cpp/Big-Q4_K_M-00001-of-00002.gguf")
    put(home / ".cache/llama.cpp/Big-Q4_K_M-00002-of-00002.gguf")
    assert path_of("big-q4_k_m") == str(first)


@pytest.mark.parametrize(
    "folder", [".cache/llama.cpp", "jan/models/x", ".cache/gpt4all", ".lmstudio/models/x/y"]
)
def test_links_out_of_any_store_are_refused(home, folder):
    outside = put(home / "outside.gguf")
    (home / folder).mkdir(parents=True)
    os.symlink(outside, home / folder / "Tiny-Q8_0.gguf")
    with pytest.raises(BadInput, match="leads out"):
        path_of("tiny-q8_0")


def test_two_models_of_one_name_are_told_apart(home):
    put(home / ".lmstudio/models/who/repo/Tiny-Q8_0.gguf", b"GGUF1")
    put(home / "jan/models/x/Tiny-Q8_0.gguf", b"GGUF2")
    line = refused(typed("info tiny-q8_0"))
    assert "lmstudio:who/repo/Tiny-Q8_0" in line and "jan:x/Tiny-Q8_0" in line
