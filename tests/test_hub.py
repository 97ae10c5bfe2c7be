"""Downloads, from a server on this computer."""

from __future__ import annotations

import os
import sys

import pytest

from edgekv.errors import BadInput
from edgekv.models.hub import wanted as names
from edgekv.models.names import path_of
from tests import hub_server, models, stores
from tests.cli import refused, typed

constants = pytest.importorskip("huggingface_hub.constants")
REPO = "who/Tiny-GGUF"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Hugging Face's cache in an empty home, and no download forbidden."""
    home = stores.empty_home(monkeypatch, tmp_path)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 2**16)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    return home / ".cache/huggingface/hub"


@pytest.fixture
def hub(cache, monkeypatch):
    with hub_server.serving() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def give(hub, *files, repo=REPO):
    for name in files:
        hub.files[repo, name] = b"GGUF" + os.urandom(300_000)


@pytest.mark.parametrize(
    ("word", "file"),
    [
        (REPO, "tiny-Q4_K_M.gguf"),
        (f"hf:{REPO}:q8_0", "tiny-Q8_0.gguf"),
        (f"hf.co/{REPO}:Q4_K_M", "tiny-Q4_K_M.gguf"),
        (f"https://huggingface.co/{REPO}", "tiny-Q4_K_M.gguf"),
        (f"{REPO}/sub/tiny-IQ2.gguf", "sub/tiny-IQ2.gguf"),
    ],
)
def test_a_model_is_pulled_into_the_cache(hub, cache, word, file):
    there = ("README.md", "mmproj-a-Q4_K_M.gguf", "sub/tiny-IQ2.gguf")
    give(hub, *there, "tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf")
    result = typed(f"pull {word}")
    assert result.exit_code == 0, result.output
    path = cache / f"models--who--Tiny-GGUF/snapshots/{hub_server.COMMIT}/{file}"
    assert result.stdout.splitlines() == [str(path)]
    assert path.read_bytes() == hub.files[REPO, file]
    assert f"downloading {REPO}/{file}" in result.stderr
    assert len(hub.ranges) == 1
    assert typed(f"pull {word}").stdout.splitlines() == [str(path)]
    assert len(hub.ranges) == 1


def test_without_the_usual_quantisations_it_is_the_first_file(hub):
    give(hub, "b-IQ3_M.gguf", "a-Q2_K.gguf")
    assert typed(f"pull {REPO}").stdout.endswith("a-Q2_K.gguf\n")


def test_a_name_for_a_command_downloads_once_and_then_asks_nobody(hub, tmp_path):
    hub.files[REPO, "t-Q4_K_M.gguf"] = models.write("llama-gqa", tmp_path).read_bytes()
    assert f"edgekv pull {REPO}" in refused(typed(f"info {REPO}"))
    assert not hub.asked
    result = typed(f"info -hf {REPO}")
    assert result.exit_code == 0 and "llama" in result.stdout, result.output
    n_asked = len(hub.asked)
    assert typed(f"info hf:{REPO}:Q4_K_M").exit_code == 0
    assert typed(f"info {REPO}").exit_code == 0
    assert len(hub.asked) == n_asked


@pytest.mark.parametrize("site", ["hf.co", "huggingface.co", "https://huggingface.co"])
def test_an_address_is_the_repository(hub, site):
    give(hub, "t-Q4_K_M.gguf")
    path = path_of(f"{site}/{REPO}")
    n_asked = len(hub.asked)
    assert path_of(f"{site}/{REPO}:Q4_K_M") == path == path_of(f"hf:{REPO}")
    assert len(hub.asked) == n_asked


def test_a_line_that_breaks_again_and_again_is_taken_up(hub, monkeypatch):
    """With a huggingface_hub that gives up at the first time, too."""
    give(hub, "t-Q4_K_M.gguf")
    data, begins = hub.files[REPO, "t-Q4_K_M.gguf"], []

    def broken(url, file, resume_size=0, **_):
        begins.append(resume_size)
        file.write(data[resume_size : resume_size + 100_000])
        if resume_size + 100_000 < len(data):
            raise ConnectionError("the line broke")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", broken)
    assert typed(f"pull {REPO}").exit_code == 0
    assert begins == [0, 100_000, 200_000, 300_000]


def test_a_broken_line_is_taken_up_within_one_command(hub):
    give(hub, "t-Q4_K_M.gguf")
    hub.budget = 100_000
    handler = hub_server.Handler._send

    def send(self, *args, **kwargs):
        handler(self, *args, **kwargs)
        if self.server.budget == 0:
            self.server.budget = None

    hub_server.Handler._send = send
    try:
        assert typed(f"pull {REPO}").exit_code == 0
    finally:
        hub_server.Handler._send = handler
    assert hub.ranges[0] is None and hub.ranges[1].startswith("bytes=")


def test_an_interrupted_download_goes_on_where_it_stopped(hub, cache):
    give(hub, "t-Q4_K_M.gguf")
    hub.budget = 200_000
    assert "goes on" in refused_download(f"pull {REPO}")
    assert path_or_none() is None
    partial = next((cache / "models--who--Tiny-GGUF/blobs").glob("*.incomplete"))
    n_bytes = partial.stat().st_size
    assert 0 < n_bytes <= 200_000
    hub.budget, hub.ranges = None, []
    result = typed(f"pull {REPO}")
    assert result.exit_code == 0, result.output
    assert hub.ranges == [f"bytes={n_bytes}-"]
    with open(result.stdout.strip(), "rb") as f:
        assert f.read() == hub.files[REPO, "t-Q4_K_M.gguf"]
    assert not partial.exists()


def test_ctrl_c_keeps_what_came(hub, cache, monkeypatch):
    def interrupted(url, temp_file, **_):
        temp_file.write(b"x" * 2048)
        raise KeyboardInterrupt

    give(hub, "t-Q4_K_M.gguf")
    monkeypatch.setattr("huggingface_hub.file_download.http_get", interrupted)
    result = typed(f"pull {REPO}")
    assert result.exit_code == 130
    assert "stopped at 2.0 KiB; the same command goes on" in result.stderr
    assert len(list(cache.rglob("*.incomplete"))) == 1


def path_or_none():
    """The path of the model by its name, where nothing may be downloaded."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        return path_of(f"hf:{REPO}")
    except BadInput:
        return None
    finally:
        del os.environ["HF_HUB_OFFLINE"]


def refused_download(line):
    """The last line of a download that was begun and failed."""
    result = typed(line)
    assert result.exit_code == 2, result.output
    return result.stderr.splitlines()[-1]


def test_a_wrong_checksum_is_refused_and_nothing_is_left(hub, cache):
    give(hub, "t-Q4_K_M.gguf")
    hub.lies = True
    assert "checksum" in refused_download(f"pull {REPO}")
    assert not [x for x in cache.rglob("*") if x.is_file() and x.suffix != ".lock"]
    hub.lies = False
    assert typed(f"pull {REPO}").exit_code == 0


def test_bytes_that_changed_in_what_was_left_are_noticed(hub, cache):
    give(hub, "t-Q4_K_M.gguf")
    hub.budget = 200_000
    refused_download(f"pull {REPO}")
    partial = next((cache / "models--who--Tiny-GGUF/blobs").glob("*.incomplete"))
    partial.write_bytes(b"x" * partial.stat().st_size)
    hub.budget = None
    assert "checksum" in refused_download(f"pull {REPO}")
    assert not partial.exists()


def test_all_parts_come_and_an_unfinished_one_is_no_model(hub):
    give(hub, *(f"Q4_K_M/big-Q4_K_M-0000{i}-of-00003.gguf" for i in (1, 2, 3)))
    hub.budget = 700_000
    refused_download(f"pull {REPO}")
    assert path_or_none() is None
    hub.budget = None
    path = path_of(f"hf:{REPO}")
    assert path.endswith("big-Q4_K_M-00001-of-00003.gguf")
    assert sorted(os.listdir(os.path.dirname(path)))[2].endswith("00003-of-00003.gguf")
    del hub.files[REPO, "Q4_K_M/big-Q4_K_M-00002-of-00003.gguf"]
    assert "lacks" in refused(typed(f"pull {REPO}"))


def test_offline_is_as_before(hub, monkeypatch):
    give(hub, "t-Q4_K_M.gguf")
    for name in ("HF_HUB_OFFLINE", "LLAMA_OFFLINE"):
        monkeypatch.setenv(name, "1")
        assert "no model" in refused(typed(f"info hf:{REPO}"))
        assert "downloads are off" in refused(typed(f"pull {REPO}"))
        monkeypatch.delenv(name)
    assert not hub.asked


def test_mistakes_are_one_line(hub, monkeypatch):
    give(hub, "t-Q5_K_M.gguf", "t-Q8_0.gguf")
    assert "there are Q5_K_M, Q8_0" in refused(typed(f"pull {REPO}:Q4_0"))
    assert "has no file u.gguf" in refused(typed(f"pull {REPO}/u.gguf"))
    assert "check the name" in refused(typed("pull who/Nothing"))
    give(hub, "model.safetensors", repo="who/plain")
    assert "-GGUF" in refused(typed("pull who/plain"))
    hub.gated = {REPO}
    assert "agree" in refused(typed(f"pull {REPO}"))
    for word in ("demo", "ollama:x", "tiny", "a/b/../c.gguf", "a/..:Q4", "a//b"):
        refused(typed(f"pull {word}"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "cannot be reached" in refused(typed(f"pull {REPO}"))


def test_a_token_is_sent(hub, monkeypatch):
    give(hub, "t-Q4_K_M.gguf")
    hub.token = "hf_secret"
    assert "HF_TOKEN" in refused(typed(f"pull {REPO}"))
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert typed(f"pull {REPO}").exit_code == 0


def test_a_full_disk_is_said_before_anything_is_fetched(hub, monkeypatch):
    give(hub, "t-Q4_K_M.gguf")
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("edgekv.models.hub.transfer.shutil.disk_usage", lambda _: usage)
    assert "make room" in refused(typed(f"pull {REPO}"))
    assert not hub.ranges


def test_a_missing_package_is_said_with_the_command(hub, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "pip install 'edgekv[hub]'" in refused(typed(f"pull {REPO}"))


@pytest.mark.parametrize(
    "name", ["../x.gguf", "/x.gguf", "a/../../x.gguf", "a\\..\\x.gguf", "a\x1b"]
)
def test_a_name_that_leads_out_of_the_cache_is_no_file(name):
    assert not names.is_safe(name)
    with pytest.raises(BadInput, match="-GGUF"):
        names.wanted(REPO).files([name])
