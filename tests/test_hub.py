"""Downloads at a user's request, from a server on loopback."""

from __future__ import annotations

import os
import sys

import pytest

from edgekv.errors import BadInput
from edgekv.models_found.names import path_of
from tests.cli import refused, typed
from tests.hub import Hub, served

REPO = "who/Tiny-GGUF"
DATA = bytes(range(256)) * 4000


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """An empty home folder."""
    for name in list(os.environ):
        if name.startswith(("HF_", "HUGGINGFACE_", "XDG_", "OLLAMA_", "LLAMA_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def hub(home, monkeypatch):
    """A server with one repository."""
    files = {
        "README.md": b"hello",
        "mmproj-Tiny-Q4_K_M.gguf": b"GGUF mmproj",
        "Tiny-Q8_0.gguf": b"GGUF 8" + DATA,
        "Tiny-Q4_K_M.gguf": b"GGUF 4" + DATA,
        "F16/Tiny-F16-00001-of-00002.gguf": b"GGUF 16 1",
        "F16/Tiny-F16-00002-of-00002.gguf": b"GGUF 16 2",
    }
    with served(Hub({REPO: files}, small={"README.md"})) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 100_000)
        monkeypatch.setattr("time.sleep", lambda _: None)  # between tries
        yield hub


def read(path):
    with open(path, "rb") as f:
        return f.read()


@pytest.mark.parametrize(
    "name, file",
    [
        ("who/Tiny-GGUF", "Tiny-Q4_K_M.gguf"),
        ("hf:who/Tiny-GGUF", "Tiny-Q4_K_M.gguf"),
        ("hf.co/who/Tiny-GGUF:q8_0", "Tiny-Q8_0.gguf"),
        ("https://huggingface.co/who/Tiny-GGUF", "Tiny-Q4_K_M.gguf"),
        ("hf:who/Tiny-GGUF/Tiny-Q8_0.gguf", "Tiny-Q8_0.gguf"),
    ],
)
def test_pull_fetches_the_file_that_llama_cpp_would_take(hub, name, file):
    result = typed(f"pull {name}")
    assert result.exit_code == 0, result.output
    path = result.stdout.strip()
    assert path.endswith(file) and read(path) == hub.files[REPO][file]
    assert "downloading" in result.stderr and "edgekv chat hf:who/Tiny-GGUF" in result.stderr


def test_what_is_here_is_not_fetched_again(hub, monkeypatch):
    first = path_of("hf:who/Tiny-GGUF")
    n_asked = len(hub.asked)
    assert path_of("hf:who/Tiny-GGUF") == path_of("hf:who/Tiny-GGUF:Q4_K_M") == first
    assert len(hub.asked) == n_asked
    assert typed("pull who/Tiny-GGUF").stdout.strip() == first
    assert len(hub.ranges) == 1
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert path_of("who/Tiny-GGUF") == first


def test_the_cache_is_as_huggingface_hub_lays_it_out(hub):
    from huggingface_hub import try_to_load_from_cache

    path = path_of("hf:who/Tiny-GGUF:Q8_0")
    cache = os.path.join(os.environ["HOME"], ".cache/huggingface/hub")
    assert try_to_load_from_cache(REPO, "Tiny-Q8_0.gguf", cache_dir=cache) == path


def test_all_parts_of_a_model_are_fetched(hub):
    path = path_of("hf:who/Tiny-GGUF:F16")
    assert path.endswith("F16/Tiny-F16-00001-of-00002.gguf")
    other = path.replace("00001-of", "00002-of")
    assert read(other) == b"GGUF 16 2"
    os.unlink(other)
    assert path_of("hf:who/Tiny-GGUF:F16") == path and read(other) == b"GGUF 16 2"


def test_a_model_without_one_of_its_parts_is_refused(hub):
    del hub.files[REPO]["F16/Tiny-F16-00002-of-00002.gguf"]
    assert "00002-of-00002.gguf" in refused(typed("pull who/Tiny-GGUF:F16"))


def test_an_interrupted_download_goes_on(hub):
    hub.cut = 500_000
    result = typed("pull who/Tiny-GGUF")
    assert result.exit_code == 2 and "the same command goes on" in result.stderr
    with pytest.raises(BadInput):
        path_of("who/Tiny-GGUF")  # nothing has a name that is not whole
    hub.cut = hub.refuse = None
    result = typed("pull who/Tiny-GGUF")
    assert hub.ranges[-1] == "bytes=500000-"
    assert read(result.stdout.strip()) == b"GGUF 4" + DATA


def test_a_broken_connection_is_gone_on_with_at_once(hub):
    hub.cut, hub.heals = 500_000, True
    assert read(path_of("hf:who/Tiny-GGUF")) == b"GGUF 4" + DATA
    assert hub.ranges == ["", "bytes=500000-"]


@pytest.mark.parametrize("small", [False, True])
def test_a_wrong_checksum_is_refused(hub, home, small):
    hub.lie.add("Tiny-Q4_K_M.gguf")
    hub.small |= {"Tiny-Q4_K_M.gguf"} if small else set()
    result = typed("chat hf:who/Tiny-GGUF")
    assert result.exit_code == 2 and "wrong checksum" in result.stderr.splitlines()[-1]
    kept = [name for _, _, names in os.walk(home) for name in names if "gguf" in name.lower()]
    assert not kept
    hub.lie.clear()
    assert read(path_of("hf:who/Tiny-GGUF")) == b"GGUF 4" + DATA


def test_a_small_file_that_git_holds_is_checked_too(hub):
    hub.small.add("Tiny-Q4_K_M.gguf")
    assert read(path_of("hf:who/Tiny-GGUF")) == b"GGUF 4" + DATA


def test_hf_options_download_too(hub):
    result = typed("info -hf who/Tiny-GGUF -hff Tiny-Q8_0.gguf")
    assert "Tiny-Q8_0.gguf cannot be loaded" in result.stderr.splitlines()[-1]  # it is no model
    assert len(hub.ranges) == 1


@pytest.mark.parametrize("line", ["pull who/Tiny-GGUF", "info hf:who/Tiny-GGUF"])
def test_offline_nothing_is_asked(hub, monkeypatch, line):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "who/Tiny-GGUF" in refused(typed(line)) and not hub.asked


def test_no_server_is_one_line(home, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "http://127.0.0.1:9" in refused(typed("pull who/Tiny-GGUF"))


def test_a_token_is_shown(hub, monkeypatch):
    hub.token = "hf_secret"
    assert "HF_TOKEN" in refused(typed("pull who/Tiny-GGUF"))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert typed("pull who/Tiny-GGUF").exit_code == 0


@pytest.mark.parametrize(
    "name, expected",
    [
        ("who/Nothing", "has no who/Nothing"),
        ("who/Tiny-GGUF:Q9_9", "Q8_0"),
        ("who/Tiny-GGUF/other.gguf", "Tiny-Q8_0.gguf"),
        ("llama3.2", "ollama pull llama3.2"),
        ("../../etc", "USER/REPO"),
        ("who/..", "USER/REPO"),
    ],
)
def test_what_there_is_not_is_one_line(hub, name, expected):
    assert expected in refused(typed(f"pull {name}"))


def test_names_that_lead_out_of_the_cache_are_left_out(hub, home):
    hub.files[REPO] = {"../../../../evil-Q4_K_M.gguf": b"GGUF", "a\\b-Q4_K_M.gguf": b"GGUF"}
    assert "no GGUF file" in refused(typed("pull who/Tiny-GGUF"))


def test_without_the_extra_the_command_that_installs_it_is_named(hub, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "pip install 'edgekv[hub]'" in refused(typed("pull who/Tiny-GGUF"))


@pytest.mark.parametrize("site", ["hf.co", "huggingface.co", "https://huggingface.co"])
def test_an_address_is_the_repository(hub, site):
    path = path_of(f"{site}/who/Tiny-GGUF")
    n_asked = len(hub.asked)
    assert path_of(f"{site}/who/Tiny-GGUF:Q4_K_M") == path == path_of("hf:who/Tiny-GGUF")
    assert len(hub.asked) == n_asked


def test_one_process_at_a_time_fetches_a_file(hub, home):
    from filelock import FileLock

    from edgekv.hub.files import PARTIAL

    digest = hub.info(REPO)["siblings"][3]["lfs"]["sha256"]
    blobs = home / ".cache/huggingface/hub/models--who--Tiny-GGUF/blobs"
    blobs.mkdir(parents=True)
    with FileLock(blobs / f"{digest}{PARTIAL}.lock"):
        result = typed("pull who/Tiny-GGUF")
    assert result.exit_code == 2 and "another process" in result.stderr
    assert typed("pull who/Tiny-GGUF").exit_code == 0


def test_a_full_disk_is_seen_before(hub, monkeypatch):
    import shutil

    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    result = typed("pull who/Tiny-GGUF")
    assert result.exit_code == 2 and "make room" in result.stderr and not hub.ranges


def test_what_is_too_large_for_plain_http_names_another_way(hub, monkeypatch):
    monkeypatch.setattr("edgekv.hub.files.LARGEST", 1000)
    result = typed("pull who/Tiny-GGUF")
    assert "hf download who/Tiny-GGUF Tiny-Q4_K_M.gguf" in result.stderr and not hub.ranges


def test_ctrl_c_keeps_what_came(hub, monkeypatch):
    def stopped(url, file, **_):
        file.write(hub.files[REPO]["Tiny-Q4_K_M.gguf"][:500_000])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.file_download.http_get", stopped)
        result = typed("pull who/Tiny-GGUF")
    assert result.exit_code == 130 and "goes on where it was" in result.stderr
    assert read(typed("pull who/Tiny-GGUF").stdout.strip()) == b"GGUF 4" + DATA
    assert hub.ranges == ["bytes=500000-"]


def test_no_other_name_asks_the_server(hub):
    refused(typed("info who/Tiny-GGUF"))
    refused(typed("info ollama:who/Tiny-GGUF"))
    typed("models")
    assert not hub.asked
