"""Archives of conversations that wait, that were saved, and that part from each other."""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgekv import BadInput, Conversations
from edgekv.conversation import session
from tests.engine import feed, load, logits

LIMITS: dict[str, Any] = {"kv_ratio": 0.2, "kv_method": "snapkv", "kv_tail": 64}
WAYS = [
    ("f16", {"kv_archive": "temporary"}),
    ("q8_0", {"kv_archive": "temporary"}),
    ("q5_1,q4_0", {"kv_recall": 0.05}),
]


@pytest.fixture(params=WAYS, ids=["f16", "rounded", "recalled"])
def make(request, tiny):
    """make(**options): a model with an archive."""
    kind, options = request.param
    return lambda **more: load(tiny("llama-gqa"), kind, **{**LIMITS, **options, **more})


def archives() -> int:
    """Files without a name that this process has open."""
    gc.collect()
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        found += "/edgekv-" in target and target.endswith("(deleted)")
    return found


def answer(llm: Any, pool: Any, prompt: list[int], n: int = 5) -> np.ndarray:
    """Logits of the prompt's end and of n tokens behind it."""
    found = pool.use(prompt)
    if found < len(prompt):
        llm.eval(prompt[found:])
    return np.concatenate([logits(llm)[None], feed(llm, range(20, 20 + n))])


# ---- conversations that take turns


def test_a_request_has_one_answer_whatever_was_asked_in_between(make, text, tmp_path):
    llm = make()
    first, other = text(300), text(200, seed=3)
    with Conversations(llm) as pool:
        said = answer(llm, pool, first)
        assert np.array_equal(answer(llm, pool, first), said)
        answer(llm, pool, other)  # first waits
        assert np.array_equal(answer(llm, pool, first), said)
        answer(llm, pool, [*first[:280], *text(50, seed=4)])  # a branch
        assert np.array_equal(answer(llm, pool, first), said)


def test_each_conversation_is_read_behind_all_of_its_own_tokens(make, text, nmse, tiny):
    llm, texts = make(), [text(300), text(250, seed=3)]
    questions = [text(20, seed=5), text(20, seed=6)]
    with Conversations(llm) as pool:
        for turn in range(2):
            for i in range(2):
                texts[i] = [*texts[i], *questions[turn]] if turn else list(texts[i])
                found = pool.use(texts[i])
                llm.eval(texts[i][found:])
                full = load(tiny("llama-gqa"), after=texts[i])
                assert nmse(logits(full), logits(llm)) < 2e-4
                assert turn == 0 or found > 200


def test_a_branch_and_its_trunk_have_their_own_tokens(make, text, nmse, tiny):
    llm, trunk = make(), text(300)
    with Conversations(llm) as pool:
        llm.eval(trunk[pool.use(trunk) :])
        for seed in (7, 8):
            branch = [*trunk[:270], *text(60, seed=seed)]
            found = pool.use(branch)
            assert found == 270
            llm.eval(branch[found:])
            assert nmse(logits(load(tiny("llama-gqa"), after=branch)), logits(llm)) < 2e-4
        more = [*trunk, *text(20, seed=9)]
        found = pool.use(more)
        assert found == len(trunk)
        llm.eval(more[found:])
        assert nmse(logits(load(tiny("llama-gqa"), after=more)), logits(llm)) < 2e-4


def test_a_conversation_that_is_forgotten_takes_its_file_along(make, text):
    llm, before = make(), archives()
    n_each = 2 if llm.settings.recall else 1  # the rows, and which group each is of
    with Conversations(llm) as pool:
        for seed in range(3):
            prompt = text(200, seed=seed)
            llm.eval(prompt[pool.use(prompt) :])
            assert archives() == before + (seed + 1) * n_each
        assert pool.n_bytes_archive > 0
        for talk in pool.list():
            pool.erase(talk.id)
        assert archives() == before and pool.n_bytes_archive == 0


def test_archives_of_those_that_wait_stay_within_their_limit(make, text):
    llm = make()
    one = 2 * llm.engine.bytes_full(200)
    with Conversations(llm, cache_disk_size=one) as pool:
        for seed in range(4):
            prompt = text(200, seed=seed)
            llm.eval(prompt[pool.use(prompt) :])
            assert pool.n_bytes_archive <= one
        assert len(pool.list()) == 3


def test_what_goes_back_chooses_as_a_fresh_reading_does(make, text, nmse):
    """Logits of tokens behind the prompt, which see what stayed."""
    first = text(400)
    for prompt in (first[:250], [*first[:350], *text(10, seed=1)], [*first, *text(5, seed=2)]):
        llm, fresh = make(after=first), make(after=prompt)
        next(llm.generate(prompt, temp=0))
        assert llm.kv_stats().n_kept == fresh.kv_stats().n_kept
        most = 0.1 if llm.settings.recall else 1e-3  # codes were learned from other tokens
        assert nmse(feed(fresh, range(20, 30)), feed(llm, range(20, 30))) < most


# ---- saved


def test_a_saved_conversation_goes_on_with_all_tokens(make, text, nmse, tiny, tmp_path):
    first, second = text(300), text(40, seed=1)
    llm, path = make(after=first), str(tmp_path / "chat")
    feed(llm, range(20, 30))
    llm.kv_save(path)
    other = make()
    other.kv_load(path)
    assert other.kv_stats().n_bytes_archive == llm.kv_stats().n_bytes_archive > 0
    assert np.array_equal(feed(other, range(30, 40)), feed(llm, range(30, 40)))
    for one in (llm, other):
        one.eval(list(second))
    assert np.array_equal(logits(other), logits(llm))
    assert np.array_equal(feed(other, range(30, 40)), feed(llm, range(30, 40)))
    next(other.generate(first[:123], temp=0))  # anywhere
    assert nmse(logits(load(tiny("llama-gqa"), after=first[:123])), logits(other)) < 2e-4


def test_a_restart_goes_on_with_all_tokens(make, text, tmp_path, nmse, tiny):
    first, second = text(300), text(40, seed=1)
    said = []
    for _ in range(2):
        llm = make()
        with Conversations(llm, cache_disk=str(tmp_path)) as pool:
            said.append(answer(llm, pool, first))
    assert np.array_equal(*said)
    llm = make()
    with Conversations(llm, cache_disk=str(tmp_path)) as pool:
        prompt = [*first, *second]
        found = pool.use(prompt)
        assert found == len(first)
        llm.eval(prompt[found:])
        assert nmse(logits(load(tiny("llama-gqa"), after=prompt)), logits(llm)) < 2e-4


def test_a_file_without_an_archive_opens_and_says_so(tiny, text, tmp_path, caplog):
    first, second, path = text(300), text(100, seed=1), str(tmp_path / "chat")
    plain = load(tiny("llama-gqa"), after=first, **LIMITS)
    plain.kv_save(path)
    assert Path(path).read_bytes().startswith(session.MAGIC)
    llm = load(tiny("llama-gqa"), kv_archive="temporary", **LIMITS)
    llm.kv_load(path)
    with caplog.at_level(logging.WARNING, "edgekv"):
        llm.eval(list(second))
    assert "has no archive (it was saved without one); it goes on" in caplog.text
    plain.eval(list(second))
    assert np.array_equal(logits(plain), logits(llm))


def test_a_file_with_an_archive_opens_where_there_is_none(tiny, text, tmp_path):
    first, second, path = text(300), text(100, seed=1), str(tmp_path / "chat")
    load(tiny("llama-gqa"), after=first, kv_archive="temporary", **LIMITS).kv_save(path)
    llm = load(tiny("llama-gqa"), **LIMITS)
    llm.kv_load(path)
    plain = load(tiny("llama-gqa"), after=first, **LIMITS)
    for one in (llm, plain):
        one.eval(list(second))
    assert np.array_equal(logits(plain), logits(llm))


@pytest.mark.parametrize("other", [{"kv_ratio": 0.5}, {"kv_method": "keydiff"}, {"kv_tail": 128}])
def test_a_restart_may_have_another_ratio_and_method(make, text, tmp_path, nmse, tiny, other):
    first, second = text(300), text(100, seed=1)
    for i, options in enumerate([{}, other]):
        llm = make(**options)
        with Conversations(llm, cache_disk=str(tmp_path)) as pool:
            prompt = [*first, *second] if i else first
            found = pool.use(prompt)
            assert found == i * len(first)
            llm.eval(prompt[found:])
            plain = make(**options)
            plain.eval(prompt)
            assert llm.kv_stats().n_kept == plain.kv_stats().n_kept
            assert nmse(logits(load(tiny("llama-gqa"), after=prompt)), logits(llm)) < 2e-4


# ---- files that nobody should trust


def saved(tiny: Any, text: Any, folder: Path) -> tuple[Path, Any]:
    path = folder / "chat"
    load(tiny("llama-gqa"), after=text(200), kv_recall=0.05, **LIMITS).kv_save(str(path))
    return path, load(tiny("llama-gqa"), after=text(100), kv_recall=0.05, **LIMITS)


def refused(llm: Any, path: Path, says: str) -> None:
    """The file is, in one line, and the conversation of `llm` keeps its archive."""
    before = archives(), llm.n_tokens, llm.kv_stats().n_bytes_archive
    with pytest.raises(BadInput, match=says) as error:
        llm.kv_load(str(path))
    assert "\n" not in str(error.value)
    del error  # its frames hold what was read
    assert before == (archives(), llm.n_tokens, llm.kv_stats().n_bytes_archive)


@pytest.mark.parametrize("where", [-40, -5_000, -100_000])
def test_a_damaged_archive_is_refused(tiny, text, tmp_path, where):
    path, llm = saved(tiny, text, tmp_path)
    data = bytearray(path.read_bytes())
    data[where] ^= 1
    path.write_bytes(data)
    refused(llm, path, "is damaged .its checksum does not match")
    path.write_bytes(data[:where])
    refused(llm, path, "is damaged")


def forged(path: Path, change: Any, rows: Any = None) -> None:
    """Change what the header says, or the last row, and make the checksum fit."""
    data = path.read_bytes()
    magic, line, rest = data.split(b"\n", 2)
    header = json.loads(line)
    change(header["archive"])
    body = bytearray(rest[:-32])
    if rows:
        body[-2:] = rows
    whole = magic + b"\n" + json.dumps(header).encode() + b"\n" + bytes(body)
    path.write_bytes(whole + hashlib.sha256(whole).digest())


@pytest.mark.parametrize(
    "change",
    [
        {"n_tokens": 199},
        {"n_tokens": 0},
        {"n_tokens": -1},
        {"n_tokens": 1 << 40},
        {"n_tokens": 200.0},
        {"n_known": 201},
        {"n_judged": 201},
        {"n_judged": None},
        {"n_bytes": 0},
        {"n_bytes": 1 << 62},
        {"more": 1},
    ],
)
def test_an_archive_that_says_other_sizes_is_refused(tiny, text, tmp_path, change):
    path, llm = saved(tiny, text, tmp_path)
    forged(path, lambda archive: archive.update(change))
    refused(llm, path, "is damaged")


def test_rows_that_are_no_numbers_are_refused(tiny, text, tmp_path):
    path, llm = saved(tiny, text, tmp_path)
    forged(path, lambda archive: None, b"\xff\x7f")
    refused(llm, path, "is damaged .*no numbers")
