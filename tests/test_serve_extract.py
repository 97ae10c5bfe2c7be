"""Files that the server turns into text."""

from __future__ import annotations

import threading

import pytest

from edgekv.errors import BadInput
from edgekv.serve import extract
from edgekv.serve.options import ServeOptions
from tests.serving import PATIENCE, post, serving
from tests.test_pack import pdf_of


@pytest.fixture(scope="module")
def url(tiny):
    options = ServeOptions(api_keys=("secret",), max_request=200_000)
    with serving(tiny("llama-gqa"), options, n_ctx=256) as (url, _):
        yield url


def given(url, name, data, key="secret"):
    headers = {"Authorization": f"Bearer {key}"}
    return post(f"{url}/extract", params={"name": name}, content=data, headers=headers)


@pytest.mark.parametrize(
    ("name", "data", "text"),
    [
        ("rain.txt", b"the rain\r\nin the air\n", "the rain\nin the air"),
        ("RAIN.HTML", b"<script>no</script><p>the <b>rain</b></p>", "the rain"),
        ("../no/name", "für den Ohrwurm".encode(), "für den Ohrwurm"),
        ("rain.tar.gz/..", b"the rain", "the rain"),
    ],
)
def test_a_file_is_read_by_the_end_of_its_name(url, name, data, text):
    said = given(url, name, data).json()
    assert (said["name"], said["content"]) == (name, text)
    auth = {"Authorization": "Bearer secret"}
    tokens = post(f"{url}/tokenize", json={"content": text}, headers=auth).json()["tokens"]
    assert said["n_tokens"] == len(tokens) > 0


def test_a_pdf_is_read(url):
    pytest.importorskip("pypdf")
    said = given(url, "report.pdf", pdf_of("the sun is on the ear")).json()
    assert said["content"] == "the sun is on the ear"


@pytest.mark.parametrize(
    ("name", "data", "status", "words"),
    [
        ("photo.png", b"\x89PNG\0\0\xff", 400, "'photo.png' is no text"),
        ("empty.txt", b"", 400, "'empty.txt' is empty"),
        ("report.pdf", b"%PDF-1.4 nothing", 400, "'report.pdf'"),
        ("long.txt", b"the rain in the air " * 200, 400, "'long.txt' has"),
        ("huge.txt", b"a" * 200_001, 413, "--max-request"),
    ],
)
def test_what_cannot_be_read_is_refused_by_its_name(url, name, data, status, words):
    reply = given(url, name, data)
    error = reply.json()["error"]
    assert reply.status_code == status and words in error["message"]
    if name == "long.txt":
        assert error["type"] == "exceed_context_size_error" and error["n_ctx"] == 256


def test_what_is_guessed_is_said_with_the_files_name(url, capfd):
    assert given(url, "\x1bnote.txt", "Der Bär".encode("latin-1")).json()["content"] == "Der Bär"
    assert "'note.txt' is no UTF-8 and is read as Latin-1" in capfd.readouterr().err


def test_a_key_is_needed(url):
    assert given(url, "rain.txt", b"the rain", key="wrong").status_code == 401


def test_a_file_that_takes_too_long_is_given_up_and_the_next_one_read(url, monkeypatch):
    ends, begun, names = threading.Event(), threading.Event(), []

    def slow(data, what, kind):
        names.append(what)
        begun.set()
        ends.wait(PATIENCE)
        raise BadInput(f"{what} was given up")

    with monkeypatch.context() as patch:
        patch.setattr(extract, "text_of", slow)
        patch.setattr(extract, "PATIENCE_S", 0.2)
        assert "after 0.2 seconds" in given(url, "endless.html", b"<!--").json()["error"]["message"]
        assert begun.is_set() and given(url, "next.txt", b"the rain").status_code == 400
        ends.set()
    assert given(url, "next.txt", b"the rain").json()["content"] == "the rain"
    assert len(names) == 1, "the second file waited for the first one"
