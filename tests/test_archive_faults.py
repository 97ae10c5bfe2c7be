"""What becomes of an archive where the disk or the system fails: one line, and no wrong answer."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgekv import BadInput, Conversations, EdgeKVError
from edgekv.base.machine import lies_in_memory
from tests.engine import load, logits
from tests.lib import ROOT

LIMITS: dict[str, Any] = {"kv_ratio": 0.2, "kv_method": "snapkv", "kv_tail": 64}


def files() -> set[str]:
    """Archives that this process has open, by the names under which the system shows them."""
    gc.collect()
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if "/edgekv-" in os.readlink(f"/proc/self/fd/{name}"):
                found.add(f"/proc/self/fd/{name}")
        except OSError:
            continue
    return found


def lost(caplog: Any) -> list[str]:
    return [x.getMessage() for x in caplog.records if "has no archive" in x.getMessage()]


def test_a_folder_that_takes_no_files_is_one_line(tiny):
    with pytest.raises(BadInput, match="no file for the archive in /proc: .*name another") as error:
        load(tiny("llama-gqa"), kv_archive="/proc", **LIMITS)
    assert "\n" not in str(error.value)


def test_a_file_that_became_shorter_costs_the_archive_alone(tiny, text, tmp_path, caplog):
    before = files()
    llm, plain = (
        load(tiny("llama-gqa"), after=text(300), **LIMITS, **more)
        for more in ({"kv_archive": str(tmp_path)}, {})
    )
    (file,) = files() - before
    os.truncate(file, 1000)
    with caplog.at_level(logging.WARNING, "edgekv"):
        for one in (llm, plain):
            one.eval(text(70, seed=1))
            one.eval(text(70, seed=2))
    (line,) = lost(caplog)
    assert "the archive cannot be read: " in line and "\n" not in line
    assert np.array_equal(logits(llm), logits(plain))


def test_a_conversation_with_nothing_in_memory_ends_with_its_archive(tiny, text, tmp_path):
    """It went back to a token before all that memory has kept."""
    before = files()
    llm = load(tiny("llama-gqa"), after=text(300), kv_archive=str(tmp_path), **LIMITS)
    (file,) = files() - before
    for il in llm.engine.full_layers:
        n = llm.engine.store.layers[il].n_head_kv
        llm.engine.store.evict(il, [np.zeros(0, np.int32)] * n)
    os.truncate(file, 1000)
    with pytest.raises(EdgeKVError, match="cannot be read: .* the conversation is lost: send it"):
        llm.eval(text(70, seed=1))
    assert llm.n_tokens == 0
    llm.eval(text(300))
    assert np.array_equal(logits(llm), logits(load(tiny("llama-gqa"), after=text(300), **LIMITS)))


def test_without_its_folder_a_conversation_goes_on_and_the_next_has_none(
    tiny, text, tmp_path, caplog
):
    folder = tmp_path / "gone"
    llm = load(tiny("llama-gqa"), after=text(200), kv_archive=str(folder), **LIMITS)
    folder.rmdir()
    with Conversations(llm) as pool, caplog.at_level(logging.WARNING, "edgekv"):
        prompt = [*text(200), *text(70, seed=1)]
        llm.eval(prompt[pool.use(prompt) :])
        assert not lost(caplog)
        llm.eval(text(200, seed=2)[pool.use(text(200, seed=2)) :])
        (line,) = lost(caplog)
        assert "no file for the archive in" in line and "\n" not in line
        folder.mkdir()
        llm.eval(text(200, seed=3)[pool.use(text(200, seed=3)) :])
        assert len(lost(caplog)) == 1 and llm.kv_stats().n_bytes_archive > 0


@pytest.mark.skipif(not lies_in_memory("/dev/shm"), reason="/dev/shm is no tmpfs here")
def test_a_folder_in_memory_is_said(tiny, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "edgekv"):
        load(tiny("llama-gqa"), kv_archive=str(tmp_path), **LIMITS)
        assert ("takes memory" in caplog.text) == lies_in_memory(tmp_path)
        caplog.clear()
        load(tiny("llama-gqa"), kv_archive="/dev/shm", **LIMITS)
    (line,) = caplog.messages
    assert "archive takes memory, because /dev/shm is a tmpfs" in line


def test_nothing_is_left_of_a_process_that_was_killed(tiny, tmp_path):
    code = f"""
from tests.engine import load
llm = load({str(tiny("llama-gqa"))!r}, kv_archive={str(tmp_path)!r}, kv_ratio=0.2)
tokens = [7 + i * i % 90 for i in range(500)]
while True:
    llm.reset()
    llm.eval(tokens)
    llm.kv_save({str(tmp_path / "chat")!r})
"""
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as child:
        while not (tmp_path / "chat").exists():
            assert child.poll() is None
            time.sleep(0.01)
        child.send_signal(signal.SIGKILL)
    assert {x.name for x in tmp_path.iterdir()} == {"chat"}
    llm = load(tiny("llama-gqa"), kv_archive=str(tmp_path), kv_ratio=0.2)
    llm.kv_load(str(tmp_path / "chat"))
    assert llm.n_tokens == 500 and llm.kv_stats().n_bytes_archive > 0


def test_nobody_else_can_read_the_files(tiny, text, tmp_path):
    before = files()
    llm = load(tiny("llama-gqa"), after=text(200), kv_archive=str(tmp_path), **LIMITS)
    opened = files() - before
    assert opened and {os.stat(x).st_mode & 0o777 for x in opened} == {0o600}
    llm.kv_save(str(tmp_path / "chat"))
    assert (tmp_path / "chat").stat().st_mode & 0o777 == 0o600
    assert Path(tmp_path / "chat").stat().st_size > llm.kv_stats().n_bytes_archive
