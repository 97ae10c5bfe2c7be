"""Packs that the server opens when it starts."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgekv import BadInput
from edgekv.serve.options import ServeOptions
from tests.cli import refused, typed
from tests.serving import PATIENCE, get, post, serving, started
from tests.test_pack import CACHE, RAIN, TALE, make

COMPRESSED: dict[str, Any] = dict(kv_ratio=0.3, kv_method="snapkv", kv_min_tokens=128)


@pytest.fixture(autouse=True)
def _folders(tmp_path, monkeypatch):
    for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))


def packed(model: Path, folder: Path, name: str, text: str, *more: str, cache=CACHE) -> str:
    (folder / f"{name}.txt").write_text(text)
    return str(make(model, [str(folder / f"{name}.txt")], folder / name, *more, cache=cache))


def ask(url: str, document: str, question: str, system: str = "") -> tuple[str, int, int]:
    """(the answer, tokens of the prompt, those that were not read)."""
    parts = [{"type": "text", "text": text} for text in (document, question)]
    messages: list[dict[str, Any]] = [{"role": "user", "content": parts}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    body = {"messages": messages, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    done = post(f"{url}/v1/chat/completions", json=body).json()
    usage = done["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return done["choices"][0]["message"]["content"], usage["prompt_tokens"], cached


@pytest.mark.parametrize("cache", [CACHE, ["-fa", "off"]], ids=["compressed", "whole"])
@pytest.mark.parametrize("name", ["llama-gqa", "gemma3"])
def test_questions_about_packs_read_only_the_questions(tiny, tmp_path, name, cache):
    arguments = COMPRESSED if cache is CACHE else {}
    packs = [
        packed(tiny(name), tmp_path, "rain", RAIN, cache=cache),
        packed(tiny(name), tmp_path, "tale", TALE, "-sys", "be an ant", cache=cache),
    ]
    asked = [(RAIN, "who is it?", ""), (TALE, "and there?", "be an ant"), (RAIN, "the sun?", "")]
    with serving(tiny(name), ServeOptions(packs=tuple(packs)), **arguments) as (url, _):
        assert len(get(f"{url}/conversations").json()["data"]) == 2
        found = [ask(url, *one) for one in asked]
    assert all(0 < n - cached < 40 for _, n, cached in found), found
    with serving(tiny(name), **arguments) as (url, _):
        assert [ask(url, *one)[0] for one in asked] == [answer for answer, *_ in found]


def test_a_pack_is_one_conversation_however_often_it_is_opened(tiny, tmp_path):
    options = ServeOptions(
        packs=(packed(tiny("llama-gqa"), tmp_path, "rain", RAIN),), cache_disk=str(tmp_path / "f")
    )
    for _ in range(3):
        options = replace(options, packs=(*options.packs, options.packs[0]))
        with serving(tiny("llama-gqa"), options, **COMPRESSED) as (url, _):
            assert len(get(f"{url}/conversations").json()["data"]) == 1
    assert len(list((tmp_path / "f").iterdir())) == 1


def test_packs_that_do_not_fit_are_refused(tiny, tmp_path):
    packs = tuple(
        packed(tiny("llama-gqa"), tmp_path, name, text)
        for name, text in (("rain", RAIN), ("tale", TALE))
    )
    with pytest.raises(BadInput, match="--cache-ram"):
        with serving(tiny("llama-gqa"), ServeOptions(packs=packs, cache_ram=0), **COMPRESSED):
            pass


def test_the_command_takes_over_the_settings_of_its_packs(tiny, tmp_path):
    model = tiny("llama-gqa")
    pack = packed(model, tmp_path, "rain", RAIN)
    other = packed(model, tmp_path, "tale", TALE, cache=[*CACHE[:1], "0.5", *CACHE[2:]])
    serve = f"serve -m {model} --port 0 -c 2048 -t 1"
    assert "--kv-ratio" in refused(typed(serve, "--pack", pack, "--kv-ratio", "0.5"))
    assert "different options" in refused(typed(serve, "--pack", pack, "--pack", other))
    assert "is no pack" in refused(typed(serve, "--pack", str(tmp_path / "rain.txt")))
    wrong = f"serve -m {tiny('llama-mha')} --port 0 -c 2048 -t 1"
    assert "another model" in refused(typed(wrong, "--pack", pack))
    assert "another model" in refused(typed(wrong, "--pack", pack, "--pack", pack))
    assert "larger" in refused(typed(serve, "--pack", pack, "-c", "256"))
    with started(tiny, tmp_path, "-c", "2048", "--pack", pack) as child:
        assert pack in child.said
        _, n, cached = ask(child.url, RAIN, "who is it?")
        child.send_signal(signal.SIGTERM)
        assert child.wait(PATIENCE) == 143 and 0 < n - cached < 40
