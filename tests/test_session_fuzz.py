"""Saved conversations and packs with damage that the checksum does not show: each is refused in
one line, or can be used, and no process ends.

Seeded: a file that fails is named by its number, and is the same every time. EDGEKV_FUZZ is how
many there are of each kind, EDGEKV_FUZZ_FROM the first one's number; `tests/fuzz.py` makes many.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from typing import Any

import numpy as np
import pytest

from edgekv import Conversations, EdgeKVError
from edgekv.conversation import session
from edgekv.llama import pack as packs
from tests.engine import load
from tests.test_pack import RAIN, make

N_FILES = int(os.environ.get("EDGEKV_FUZZ", "40"))
FIRST = int(os.environ.get("EDGEKV_FUZZ_FROM", "0"))
N_PROMPT = 300
CACHES: dict[str, dict[str, Any]] = {
    "compressed": dict(kv_ratio=0.3, kv_tail=80),
    "merging": dict(kv_ratio=0.3, kv_tail=80, kv_method="score=h2o,merge=d2o"),
    "whole": {},
}
NUMBERS = (0, -1, 1, 2, 7, 2**31 - 1, 2**31, 2**32, 2**63, 2**64, 0.5, 1e308, True, None, "1", [])


def signed(data: bytes) -> bytes:
    return data + hashlib.sha256(data).digest()


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key or index) in some JSON."""
    if not isinstance(value, (dict, list)):
        return []
    keys = list(value) if isinstance(value, dict) else range(len(value))
    return [one for key in keys for one in [(value, key), *places(value[key])]]


def with_other_json(value: Any, rng: random.Random) -> None:
    """One place of it changes."""
    where, key = rng.choice(places(value))
    kind = rng.randrange(4)
    if kind == 0 and isinstance(where, dict):
        del where[key]
    elif kind == 1 and type(where[key]) is int:
        where[key] += rng.choice([-1, 1, 4, 1000])
    else:
        where[key] = rng.choice([*NUMBERS, {}, "x" * 500, [[]], "\ud800"])


def changed(data: bytes, rng: random.Random) -> bytes:
    """A file of a conversation, with damage in its header, its note or anything behind them."""
    line, _, rest = data[len(session.MAGIC) : -32].partition(b"\n")
    header, body = json.loads(line), bytearray(rest)
    note = json.loads(body[: header["n_note"]])
    del body[: header["n_note"]]
    match rng.randrange(4):
        case 0:
            with_other_json(header, rng)
        case 1 if isinstance(note, dict):
            with_other_json(note, rng)
        case 2:  # bytes more or fewer, with sizes that fit again
            cut, n = rng.randrange(len(body)), rng.choice([1, 4, 16, 1000])
            before = len(body)
            body[cut : cut + n] = rng.randbytes(rng.choice([0, n, 2 * n]))
            header["n_state"] = max(header["n_state"] + len(body) - before, 0)
        case _:
            begin = rng.choice([0, len(body) - header["n_state"]])
            width = min(rng.choice([64, 2000, len(body)]), len(body) - begin - 8)
            for _ in range(rng.choice([1, 2, 30])):
                at = begin + rng.randrange(width)
                value = rng.choice([rng.randbytes(4), b"\xff" * 4, bytes(4), b"\xff\xff\xff\x7f"])
                body[at : at + 4] = value
    said = json.dumps(note).encode()
    if type(header.get("n_note")) is int and rng.random() < 0.9:
        header["n_note"] = len(said)
    return signed(session.MAGIC + json.dumps(header).encode() + b"\n" + said + body)


def goes_on(llm: Any, tokens: Any, name: str) -> None:
    """The model holds what it says it holds, and answers."""
    assert llm.kv_stats().n_seen == llm.n_tokens, name
    assert llm.input_ids[: llm.n_tokens].min(initial=0) >= 0, name
    assert llm.input_ids[: llm.n_tokens].max(initial=0) < llm.n_vocab(), name
    llm.eval(list(tokens))


@pytest.mark.parametrize("cache", CACHES)
def test_damaged_files_of_a_folder_are_read_again_or_can_be_used(tiny, text, tmp_path, cache):
    """Through a pool: what `edgekv serve --cache-disk` does with what it finds."""
    llm, tokens = load(tiny("llama-gqa"), **CACHES[cache]), [*text(N_PROMPT), 9]
    with Conversations(llm, cache_disk=str(tmp_path)) as pool:
        pool.use(tokens)
        llm.eval(tokens)
    (path,) = tmp_path.glob("*.kvtalk")
    data, n_used = path.read_bytes(), 0
    for number in range(FIRST, FIRST + N_FILES):
        path.write_bytes(changed(data, random.Random(number)))
        llm.reset()
        with Conversations(llm, cache_disk=str(tmp_path)) as pool:
            prompt = [*tokens, *text(3, number)]
            n = pool.use(prompt, cuts=[N_PROMPT])
            assert 0 <= n <= len(prompt) and n == llm.n_tokens, f"file {number}"
            assert llm.input_ids[:n].tolist() == prompt[:n], f"file {number}"
            goes_on(llm, prompt[n:], f"file {number}")
            n_used += n > 0
            for talk in pool.list():
                pool.erase(talk.id)
        for other in tmp_path.iterdir():
            other.unlink()
    assert 0 < n_used < N_FILES


def test_a_file_that_says_it_has_no_tokens_is_no_conversation(tiny, text, tmp_path):
    llm = load(tiny("llama-gqa"))
    with Conversations(llm, cache_disk=str(tmp_path)) as pool:
        pool.use(text(50))
        llm.eval(text(50))
    (path,) = tmp_path.glob("*.kvtalk")
    line, _, rest = path.read_bytes()[len(session.MAGIC) : -32].partition(b"\n")
    header = json.dumps({**json.loads(line), "n_tokens": 0}).encode()
    path.write_bytes(signed(session.MAGIC + header + b"\n" + rest))
    with Conversations(load(tiny("llama-gqa")), cache_disk=str(tmp_path)) as pool:
        assert pool.list() == []


def test_damaged_packs_are_refused_or_can_be_used(tiny, text, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "rain.txt").write_text(RAIN)
    path = make(tiny("llama-gqa"), [str(tmp_path / "rain.txt")], tmp_path / "pack")
    llm = load(tiny("llama-gqa"), n_ctx=2048, kv_ratio=0.3, kv_min_tokens=128)
    data, n_refused = path.read_bytes(), 0
    for number in range(FIRST, FIRST + N_FILES):
        path.write_bytes(changed(data, random.Random(number)))
        before = llm.n_tokens, llm.input_ids[: llm.n_tokens].copy()
        try:
            packs.load(llm, str(path))
        except EdgeKVError as error:
            n_refused += 1
            assert "\n" not in str(error), f"file {number}"
            assert llm.n_tokens == before[0], f"file {number}"
            assert np.array_equal(llm.input_ids[: llm.n_tokens], before[1]), f"file {number}"
        goes_on(llm, text(3, number), f"file {number}")
        if llm.n_tokens > 1500:
            llm.reset()
    assert n_refused > N_FILES / 4
