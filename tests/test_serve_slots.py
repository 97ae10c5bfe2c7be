"""Conversations that clients save to files and restore, as llama-server's slots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from edgekv.serve.options import ServeOptions
from tests.cli import refused, typed
from tests.serving import get, post, serving

CACHES: dict[str, dict[str, Any]] = {
    "compressed": dict(kv_ratio=0.3, kv_method="snapkv"),
    "whole": {},
}
BODY = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}


def ask(url: str, text: str, **more: str) -> tuple[str, int]:
    """(the answer, tokens of the prompt that were not read again)."""
    body = {**BODY, "messages": [{"role": "user", "content": text}], **more}
    done = post(f"{url}/v1/chat/completions", json=body).json()
    cached = done["usage"]["prompt_tokens_details"]["cached_tokens"]
    return done["choices"][0]["message"]["content"], cached


def go_on(url: str, text: str, answer: str) -> int:
    """Tokens that are not read again where the next message follows."""
    turns = [("user", text), ("assistant", answer), ("user", "an")]
    messages = [{"role": role, "content": content} for role, content in turns]
    usage = post(f"{url}/v1/chat/completions", json={**BODY, "messages": messages}).json()["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"]


def act(url: str, slot: Any, action: str, name: str | None = "a.bin") -> httpx.Response:
    body = {} if name is None else {"json": {"filename": name}}
    return post(f"{url}/slots/{slot}?action={action}", **body)


def options(folder: Path, **more: Any) -> ServeOptions:
    return ServeOptions(slot_save_path=str(folder), **more)


@pytest.mark.parametrize("name", ["llama-gqa", "gemma3"])
@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
def test_a_conversation_goes_on_in_another_process(tiny, tmp_path, name, cache):
    with serving(tiny(name), options(tmp_path), **cache) as (url, _):
        first, _ = ask(url, "the rain " * 150)
        saved = act(url, 0, "save").json()
        again = ask(url, "the rain " * 150)
    n = (tmp_path / "a.bin").stat().st_size
    assert saved["id_slot"] == 0 and saved["filename"] == "a.bin" and saved["n_written"] == n
    assert saved["n_saved"] > 150 and saved["timings"]["save_ms"] > 0
    with serving(tiny(name), options(tmp_path), **cache) as (url, _):
        restored = act(url, 1, "restore").json()
        assert restored == {
            "id_slot": 1,
            "filename": "a.bin",
            "n_restored": saved["n_saved"],
            "n_read": n,
            "timings": {"restore_ms": restored["timings"]["restore_ms"]},
        }
        assert go_on(url, "the rain " * 150, first) > 150
    assert again[0] == first


def test_a_slot_is_a_place_in_the_order_of_use(tiny, tmp_path):
    with serving(tiny("llama-gqa"), options(tmp_path), **CACHES["compressed"]) as (url, _):
        answer, _ = ask(url, "abc " * 90, grammar="root ::= [a-z ]+")  # bytes that are text
        ask(url, "the " * 120)
        older, newer = (act(url, slot, "save", f"{slot}.bin").json()["n_saved"] for slot in (1, 0))
        assert older > newer + 20
        assert act(url, 0, "erase", None).json() == {"id_slot": 0, "n_erased": newer}
        assert [x["n_tokens"] for x in get(f"{url}/conversations").json()["data"]] == [older]
        assert act(url, 0, "erase").json() == {"id_slot": 0, "n_erased": older}
        assert act(url, 0, "erase").json() == {"id_slot": 0, "n_erased": 0}
        assert act(url, 0, "save").status_code == 400
        act(url, 0, "restore", "1.bin")
        assert go_on(url, "abc " * 90, answer) > 80
        assert ask(url, "the " * 120)[1] < 5


def test_the_same_file_is_one_conversation_however_often_it_is_restored(tiny, tmp_path):
    with serving(tiny("llama-gqa"), options(tmp_path), **CACHES["compressed"]) as (url, _):
        ask(url, "abc " * 90)
        act(url, 0, "save")
        ask(url, "the " * 120)
        for _ in range(3):
            assert act(url, 0, "restore").status_code == 200
        assert len(get(f"{url}/conversations").json()["data"]) == 2
        assert ask(url, "the " * 120)[1] > 100


def test_without_a_folder_there_are_no_files(tiny):
    with serving(tiny("llama-gqa")) as (url, _):
        for action in ("save", "restore", "erase"):
            reply = act(url, 0, action)
            assert reply.status_code == 501 and "--slot-save-path" in reply.text
            assert reply.json()["error"]["type"] == "not_supported_error"


NAMES = ["", ".", "..", "../a", "/tmp/a", "a/b", "a\\b", "a\0b", "a\nb", " a", "a.", "a..b", "a:b"]
NAMES += ["a*", "é" * 200, "\uff0e", "\ufffd", "\u202e", "\ufeff", "link"]


@pytest.fixture(scope="module")
def place(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("slots")
    (folder / "link").symlink_to(folder.parent / "outside")
    with serving(tiny("llama-gqa"), options(folder), **CACHES["compressed"]) as (url, _):
        ask(url, "abc " * 90)
        act(url, 0, "save", "fine")
        yield url, folder


@pytest.mark.parametrize("action", ["save", "restore"])
@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_one_of_the_folder_itself(place, name, action):
    url, folder = place
    reply = act(url, 0, action, name)
    assert reply.status_code == 400 and "filename" in reply.json()["error"]["message"]
    assert {one.name for one in folder.iterdir()} == {"fine", "link"}
    assert not (folder.parent / "outside").exists()


def test_half_a_pair_of_surrogates_names_no_file(place):
    reply = post(f"{place[0]}/slots/0?action=save", content='{"filename": "a\\ud800"}')
    assert reply.status_code == 400 and "filename" in reply.text


@pytest.mark.parametrize(
    ("slot", "action", "name", "word"),
    [
        ("4", "save", "fine", "slot ID"),
        ("-1", "save", "fine", "slot ID"),
        ("x", "save", "fine", "slot ID"),
        ("9" * 5000, "save", "fine", "slot ID"),
        ("0", "", "fine", "action"),
        ("0", "delete", "fine", "action"),
        ("0", "save", None, "filename"),
        ("0", "restore", "missing", "no such file"),
    ],
)
def test_what_cannot_be_done_is_said(place, slot, action, name, word):
    url, folder = place
    reply = act(url, slot, action, name)
    assert reply.status_code == 400, reply.text
    message = reply.json()["error"]["message"]
    assert word in message and str(folder) not in message and "\n" not in message


def test_a_file_that_is_none_of_ours_is_neither_written_nor_read(place):
    url, folder = place
    (folder / "notes.txt").write_text("mine")
    for action in ("save", "restore"):
        assert act(url, 0, action, "notes.txt").status_code == 400
    assert (folder / "notes.txt").read_text() == "mine"
    (folder / "notes.txt").unlink()


def test_a_damaged_file_and_one_of_other_settings_change_nothing(tiny, tmp_path):
    with serving(tiny("llama-gqa"), options(tmp_path), kv_ratio=0.5, kv_method="snapkv") as (
        url,
        _,
    ):
        ask(url, "abc " * 90)
        act(url, 0, "save", "other")
    with serving(tiny("llama-gqa"), options(tmp_path), **CACHES["compressed"]) as (url, _):
        ask(url, "abc " * 90)
        act(url, 0, "save", "fine")
        data = bytearray((tmp_path / "fine").read_bytes())
        data[len(data) // 2] ^= 1
        (tmp_path / "damaged").write_bytes(data)
        for name, word in (("other", "another method"), ("damaged", "damaged")):
            reply = act(url, 0, "restore", name)
            assert reply.status_code == 400 and word in reply.text, reply.text
        assert ask(url, "abc " * 90)[1] > 80


def test_the_command_wants_a_folder_that_exists(tmp_path):
    said = refused(typed("serve -m /no/model --port 0 --slot-save-path", str(tmp_path / "missing")))
    assert "--slot-save-path" in said and "/no/model" not in said
