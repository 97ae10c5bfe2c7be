"""Conversations that cannot stay say why, and are counted; files of others stay."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import stat
from typing import Any

import pytest

from edgekv import Conversations
from edgekv.conversation import session
from edgekv.errors import BadInput
from edgekv.model import fingerprint as pieces
from edgekv.serve.options import ServeOptions
from tests.engine import load
from tests.serving import get, post, serving

CACHE: dict[str, Any] = dict(kv_ratio=0.5, kv_method="snapkv")


@pytest.fixture
def open_pool(tiny):
    """open_pool(options of Conversations, **options of Llama): a pool, which is closed."""
    pools, models = [], []

    def new(more: dict[str, Any], **options: Any) -> Conversations:
        models.append(load(tiny("llama-gqa"), **{**CACHE, **options}))
        pools.append(Conversations(models[-1], **more))
        return pools[-1]

    yield new
    for pool, llm in zip(pools, models):
        pool.close()
        llm.close()


def read(pool: Conversations, tokens: Any) -> int:
    """Read a prompt. Returns how much of it was there."""
    n = pool.use(tokens)
    pool._llm.eval(tokens[n:])
    return n


def lines(caplog: Any) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name == "edgekv"]


@pytest.fixture(autouse=True)
def _all_levels(caplog):
    caplog.set_level(logging.INFO, "edgekv")


def test_what_the_memory_has_no_room_for_is_said_and_counted(open_pool, text, caplog):
    pool = open_pool({"cache_ram": 500_000})
    for i in range(4):
        read(pool, text(300, i))
    said = lines(caplog)
    assert said and pool.losses.counts["dropped"] == len(said)
    assert all(re.match(r"edgekv: conversation \w+ \(300 tokens\) is forgotten: ", x) for x in said)
    assert "cache_ram is full, and there is no cache_disk" in said[0]


def test_a_conversation_above_the_memory_is_said(open_pool, text, caplog):
    pool = open_pool({"cache_ram": 1000})
    read(pool, text(300))
    read(pool, text(300, 1))
    assert "more than cache_ram" in lines(caplog)[0]


def test_where_nothing_is_to_be_kept_nothing_is_said(open_pool, text, caplog):
    pool = open_pool({"cache_ram": 0})
    read(pool, text(300))
    read(pool, text(300, 1))
    assert not lines(caplog) and pool.losses.counts["dropped"] == 1


def test_a_folder_that_cannot_be_written_is_said(open_pool, text, caplog, tmp_path):
    folder = tmp_path / "talks"
    pool = open_pool({"cache_ram": 0, "cache_disk": str(folder)})
    shutil.rmtree(folder)
    read(pool, text(300))
    read(pool, text(300, 1))
    (line,) = lines(caplog)
    assert "is forgotten" in line and "no such folder" in line
    pool.flush()
    assert "is not on disk" in lines(caplog)[-1] and pool.losses.counts["unwritten"] == 1


def test_a_damaged_file_is_said(open_pool, text, caplog, tmp_path):
    pool = open_pool({"cache_ram": 0, "cache_disk": str(tmp_path)})
    read(pool, text(300))
    read(pool, text(300, 1))
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-40] + b"x" * 40)
    assert read(pool, [*text(300), *text(20, 2)]) == 0
    (line,) = lines(caplog)
    assert "is read again" in line and "damaged" in line
    assert pool.losses.counts["read_again"] == 1


def test_a_file_that_is_cut_off_is_said_at_the_start(open_pool, text, caplog, tmp_path):
    pool = open_pool({"cache_disk": str(tmp_path)})
    read(pool, text(300))
    pool.close()
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:600])
    assert not open_pool({"cache_disk": str(tmp_path)}).list()
    assert "damaged" in lines(caplog)[-1]


def test_files_of_other_settings_stay_where_the_folder_is_full(open_pool, text, caplog, tmp_path):
    other = open_pool({"cache_disk": str(tmp_path)}, kv_ratio=0.4)
    read(other, text(600))
    other.close()
    (foreign,) = tmp_path.iterdir()
    size = foreign.stat().st_size
    pool = open_pool({"cache_disk": str(tmp_path), "cache_ram": 0, "cache_disk_size": size + 1000})
    read(pool, text(300))
    read(pool, text(300, 1))
    assert foreign.exists() and list(tmp_path.iterdir()) == [foreign]
    assert "files of other settings" in lines(caplog)[-1]


def test_one_model_is_hashed_once_for_many_files(open_pool, text, tmp_path, monkeypatch):
    pool = open_pool({"cache_disk": str(tmp_path)})
    for i in range(5):
        read(pool, text(100, i))
    model = pool._llm.model_path
    pool.close()
    assert len(list(tmp_path.iterdir())) == 5
    hashed = list[str]()
    of = pieces.of
    monkeypatch.setattr(pieces, "of", lambda f, *a: hashed.append(f.name) or of(f, *a))
    again = open_pool({"cache_disk": str(tmp_path)})
    assert len(again.list()) == 5
    assert hashed.count(model) <= 1


def test_a_full_disk_is_said(open_pool, text, caplog, tmp_path, monkeypatch):
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(session, "_write", full)
    pool = open_pool({"cache_ram": 0, "cache_disk": str(tmp_path)})
    read(pool, text(300))
    read(pool, text(300, 1))
    (line,) = lines(caplog)
    assert "is forgotten" in line and "No space left" in line and not list(tmp_path.iterdir())
    pool.flush()
    assert "is not on disk" in lines(caplog)[-1]
    assert (pool.losses.counts["dropped"], pool.losses.counts["unwritten"]) == (1, 1)


def test_a_file_that_makes_room_or_is_gone_is_said(open_pool, text, caplog, tmp_path):
    pool = open_pool({"cache_ram": 0, "cache_disk": str(tmp_path)})
    read(pool, text(300))
    read(pool, text(300, 1))
    (path,) = tmp_path.iterdir()
    pool._shelf._limit = 500_000  # there is room for one
    read(pool, text(300, 2))
    assert not path.exists() and "cache_disk is full" in lines(caplog)[-1]
    for path in tmp_path.iterdir():
        path.unlink()
    pool._shelf._looked = 0  # as after a second
    read(pool, text(300, 3))
    assert "its file is gone" in lines(caplog)[-1] and pool.losses.counts["dropped"] == 2


def test_a_file_that_holds_another_conversation_is_said(open_pool, text, caplog, tmp_path):
    pool = open_pool({"cache_ram": 0, "cache_disk": str(tmp_path)})
    for seed in range(3):
        read(pool, text(300, seed))
    one, other = sorted(tmp_path.iterdir())
    shutil.copy(one, other)
    assert {read(pool, [*text(300, seed), *text(20, 3)]) for seed in range(2)} == {0, 300}
    (line,) = lines(caplog)
    assert "is read again" in line and "another conversation" in line


def test_files_that_are_left_out_at_the_start_are_said(open_pool, text, caplog, tmp_path, tiny):
    """Each with its reason, and none is touched."""
    pool = open_pool({"cache_disk": str(tmp_path)})
    read(pool, text(600))
    pool.close()
    (path,) = tmp_path.iterdir()
    before = path.read_bytes()
    others: list[tuple[dict[str, Any], str]] = [
        (dict(kv_ratio=0.4), "another method"),
        (dict(kv_ratio=1.0), "compressed"),
        (dict(n_ctx=512), "larger -c"),
        (dict(model=tiny("gemma3")), "another model"),
    ]
    for i, (more, why) in enumerate(others):
        llm = load(more.pop("model", tiny("llama-gqa")), **{**CACHE, **more})
        with Conversations(llm, cache_disk=str(tmp_path)) as other:
            assert not other.list() and other.losses.counts["refused"] == 1
        llm.close()
        assert len(lines(caplog)) == i + 1
        assert "is left out" in lines(caplog)[-1] and why in lines(caplog)[-1]
    assert path.read_bytes() == before
    path.write_bytes(before[:600])
    assert open_pool({"cache_disk": str(tmp_path)}).losses.counts["refused"] == 1


def test_a_conversation_that_cannot_be_looked_up_is_said(open_pool, text, caplog, tmp_path):
    pool = open_pool({"cache_ram": 0, "cache_disk": str(tmp_path)})
    read(pool, text(300))
    id = pool.list()[0].id
    read(pool, text(300, 1))
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-40] + b"x" * 40)
    with pytest.raises(BadInput, match="forgotten"):
        pool.make_current(id)
    (line,) = lines(caplog)
    assert "damaged" in line and pool.losses.counts["dropped"] == 1


def test_a_conversation_of_several_settings_is_said(open_pool, text, caplog):
    pool = open_pool({})
    read(pool, text(300))
    pool._llm.kv_set(ratio=0.3)
    read(pool, text(300, 1))
    (line,) = lines(caplog)
    assert "several settings" in line and pool.losses.counts["dropped"] == 1


def test_a_conversation_that_the_model_lost_is_said(open_pool, text, caplog):
    pool = open_pool({})
    read(pool, text(300))
    read(pool, [*text(300), *text(20, 1)])
    pool._llm.reset()
    read(pool, text(300, 1))
    (line,) = lines(caplog)
    assert "a step failed" in line and pool.losses.counts["dropped"] == 1


def test_a_slot_that_cannot_be_restored_is_said(tiny, tmp_path, caplog):
    options = ServeOptions(metrics=True, slot_save_path=str(tmp_path))
    (tmp_path / "a.bin").write_text("no conversation")
    with serving(tiny("llama-gqa"), options, **CACHE) as (url, _):
        for name in ("a.bin", "missing"):
            reply = post(f"{url}/slots/0?action=restore", json={"filename": name})
            assert reply.status_code == 400
        assert "edgekv:conversations_refused_total 2.0" in get(f"{url}/metrics").text
    assert len(lines(caplog)) == 2 and all("is left out" in line for line in lines(caplog))


@pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX'")
def test_nobody_else_reads_what_people_wrote(open_pool, text, tmp_path):
    pool = open_pool({"cache_disk": str(tmp_path / "talks")})
    read(pool, text(300))
    pool.save_as(pool.current_id, str(tmp_path / "slot"))
    pool._llm.kv_save(str(tmp_path / "session"))
    pool.close()
    saved = [tmp_path / "slot", tmp_path / "session", *(tmp_path / "talks").iterdir()]
    assert len(saved) == 3
    assert {stat.S_IMODE(path.stat().st_mode) for path in saved} == {0o600}


def test_metrics_count_what_was_lost(tiny):
    options = ServeOptions(metrics=True, cache_ram=1000, parallel=1)
    with serving(tiny("llama-gqa"), options, **CACHE) as (url, _):
        for words in ("the rain ", "in the air "):
            post(f"{url}/v1/completions", json={"prompt": words * 80, "max_tokens": 2})
        said = get(f"{url}/metrics").text
    assert "edgekv:conversations_dropped_total 1.0" in said
    assert "edgekv:conversations_read_again_total 0.0" in said


def test_an_answer_that_is_written_again_is_counted_and_not_said(tiny, caplog):
    options = ServeOptions(metrics=True, parallel=1)
    body = {"prompt": "the rain " * 80, "max_tokens": 4, "temperature": 0, "cache_prompt": False}
    with serving(tiny("llama-gqa"), options, **CACHE) as (url, _):
        for _ in range(6):
            assert post(f"{url}/v1/completions", json=body).status_code == 200
        said = get(f"{url}/metrics").text
    assert not lines(caplog)
    assert "edgekv:conversations_replaced_total 5.0" in said


def test_each_file_is_looked_at_a_few_times_at_the_end(open_pool, text, tmp_path, monkeypatch):
    n_files, n_looks = 30, 0
    pool = open_pool({"cache_disk": str(tmp_path)})
    for i in range(n_files):
        read(pool, text(100, i))
    look = os.stat

    def counted(*arguments, **more):
        nonlocal n_looks
        n_looks += str(arguments[0]).endswith(".kvtalk")
        return look(*arguments, **more)

    monkeypatch.setattr(os, "stat", counted)
    pool.close()
    assert len(list(tmp_path.iterdir())) == n_files
    assert n_looks < 8 * n_files


def test_a_file_that_somebody_removed_is_written_again(open_pool, text, tmp_path):
    pool = open_pool({"cache_disk": str(tmp_path)})
    read(pool, text(100))
    read(pool, text(100, 1))
    pool.flush()
    for path in tmp_path.iterdir():
        path.unlink()
    pool.close()
    assert len(list(tmp_path.iterdir())) == 2


def answer(pool: Conversations, prompt: Any, n: int = 12) -> None:
    """A greedy answer to a prompt, to its end."""
    read(pool, prompt)
    for _ in range(n):
        pool._llm.eval([int(pool._llm.logits().argmax())])
    pool.end_answer()


@pytest.mark.parametrize("n_answer", [20, 100])
def test_a_prompt_that_is_asked_again_leaves_one_conversation(
    open_pool, text, caplog, tmp_path, n_answer
):
    """Be it read again from the beginning or behind a document, in memory and on disk. Of each id
    that was listed and is gone there is one line, which only who looks for it sees, and a count.
    """
    caplog.set_level(logging.DEBUG, "edgekv")
    prompts = [text(30), text(200, 1), text(300, 2), [*text(300, 2), *text(80, 3)]]
    for ram in (0, 1 << 30):
        pool, gone = open_pool({"cache_ram": ram, "cache_disk": str(tmp_path / str(ram))}), set()
        caplog.clear()
        for _ in range(3):
            for prompt in prompts:
                read(pool, prompt)
                seen = {x.id for x in pool.list()}
                answer(pool, prompt, n_answer)
                gone |= seen - {x.id for x in pool.list()}
                assert len(gone) == pool.losses.counts["replaced"]
        said = [
            re.match(r"edgekv: conversation (\w+) \(\d+ tokens\) is part", x) for x in lines(caplog)
        ]
        assert gone and sorted(x[1] for x in said if x) == sorted(gone)
        assert all(one.levelno == logging.DEBUG for one in caplog.records)
        ids = {x.id for x in pool.list()}
        answer(pool, text(70, 4))
        assert ids < {x.id for x in pool.list()} and len(pool.list()) == len(prompts) + 1
        pool.close()
        files = [x for x in (tmp_path / str(ram)).iterdir()]
        again = open_pool({"cache_ram": ram, "cache_disk": str(tmp_path / str(ram))})
        assert len(again.list()) == len(prompts) + 1 <= len(files)


def test_what_somebody_named_or_writes_stays(open_pool, text):
    pool = open_pool({})
    pool._llm.eval(text(200)[pool.use(text(200), "mine") :])
    pool.end_answer()
    read(pool, text(300, 1))  # its answer is not complete
    for prompt in (text(200), text(300, 1)):
        pool.use(prompt, is_fresh=True)
        pool._llm.eval(prompt)
        pool.end_answer()
    assert len(pool.list()) == 4


def test_an_answer_that_was_stopped_goes_where_another_one_has_it_all(open_pool, text):
    pool = open_pool({})
    answer(pool, text(200))
    for more in ([], text(5, 1)):
        pool.use(text(200), is_fresh=True)
        pool._llm.eval([*text(200), *more])
        stopped = pool.current_id
        answer(pool, text(100, 2))
        pool.give_up(stopped)
        assert (stopped in {x.id for x in pool.list()}) == bool(more)


def test_files_stay_where_the_folder_cannot_be_read_for_now(open_pool, text, tmp_path, monkeypatch):
    pool = open_pool({"cache_ram": 0, "cache_disk": str(tmp_path)})
    for seed in range(3):
        read(pool, text(300, seed))
    (pool._shelf._looked, files) = (0, set(tmp_path.iterdir()))

    def refused(_: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refused)
        read(pool, text(300, 3))
    assert files < set(tmp_path.iterdir()) and len(pool.list()) == 4
