"""What is kept of a profile that was stopped: it is distrusted, and two processes may write it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from edgekv.learn import probe_profile
from edgekv.learn.work import Work
from edgekv.profiles.partial import Partial
from edgekv_lab.makers.evolkv import Scores
from edgekv_lab.saved import Saved, save_json

ROOT = Path(__file__).resolve().parent.parent
SHAPE, SUMMAND = (4, 3, 2), (3, 2, 5, 4)
TEXT, OTHER = (1, 2, 3), (4, 5)


def opened(path: Path, key: str = "key") -> Partial:
    return Partial(path, key, SHAPE, SUMMAND)


def filled(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """A file with two texts: what is kept of the first, and the sum."""
    rng, partial = np.random.default_rng(0), opened(path)
    shares = [rng.random(SHAPE) for _ in range(2)]
    summands = [rng.standard_normal(SUMMAND).astype(np.float32) for _ in range(2)]
    for text, found, summand in zip((TEXT, OTHER), shares, summands, strict=True):
        partial.add(text, found, summand)
    return shares[0], summands[0] + summands[1]


def test_it_goes_on_from_the_file(tmp_path):
    path = tmp_path / "p.partial"
    first, total = filled(path)
    again = opened(path)
    assert TEXT in again and OTHER in again and (9,) not in again
    assert np.array_equal(again[TEXT], first) and np.array_equal(again.sum, total)
    assert TEXT not in opened(path, "another model")
    assert TEXT not in Partial(path, "key", (4, 3, 3), SUMMAND)
    assert [p.name for p in tmp_path.iterdir()] == ["p.partial"]
    again.remove()
    assert not path.exists() and not opened(path).sum.any()


def test_damage_counts_for_nothing(tmp_path):
    path, rng = tmp_path / "p.partial", np.random.default_rng(1)
    filled(path)
    data = path.read_bytes()
    for case in range(200):
        broken = bytearray(data)
        match case % 3:
            case 0:
                del broken[rng.integers(len(data)) :]
            case 1:
                broken[rng.integers(len(data))] ^= 1 << rng.integers(8)
            case _:
                broken += bytes(int(rng.integers(1, 2000)))
        path.write_bytes(broken)
        partial = opened(path)
        assert TEXT not in partial and not partial.sum.any(), f"case {case}"
    path.unlink()
    path.mkdir()
    assert TEXT not in opened(path)


def test_numbers_that_make_no_sense_count_for_nothing(tmp_path):
    for value in (np.nan, 1.5, -0.1, np.inf):
        opened(tmp_path / "p").add(TEXT, np.full(SHAPE, value), np.zeros(SUMMAND, np.float32))
        assert TEXT not in opened(tmp_path / "p")
    opened(tmp_path / "p").add(TEXT, np.zeros(SHAPE), np.full(SUMMAND, np.nan, np.float32))
    assert TEXT not in opened(tmp_path / "p")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[1]",
        b'"x"',
        b"{",
        b"[" * 100_000,
        b"\xff\xfe",
        b'{"key": "k"}',
        b'{"key": "k", "scores": {"1": "x"}}',
        b'{"key": "other", "scores": {"1": 0.5}}',
    ],
)
def test_other_json_counts_for_nothing(tmp_path, content):
    path = tmp_path / "p.partial"
    path.write_bytes(content)
    assert "1" not in Saved(path)
    assert Scores(lambda rows: 0.25, path, "k")(np.array([1])) == 0.25


def test_two_at_once_do_not_disturb_each_other(tmp_path):
    raised: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            partial = opened(tmp_path / "p.partial")
            for i in range(20):
                partial.add((seed, i), np.zeros(SHAPE), np.zeros(SUMMAND, np.float32))
                save_json(tmp_path / "q.partial", {"key": seed})
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not raised, raised
    partial = opened(tmp_path / "p.partial")
    assert sum((seed, i) in partial for seed in range(4) for i in range(20)) > 0
    assert json.loads((tmp_path / "q.partial").read_text())["key"] in range(4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.partial", "q.partial"]


def test_two_first_uses_at_once(tiny, tmp_path):
    line = f"run -m {tiny('llama-gqa')} -n 1 --raw -c 1024 -t 1 --kv-ratio 0.3 --json"
    words = [*line.split(), "-p", "x " * 200]
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    both = [
        subprocess.Popen(
            [sys.executable, "-m", "edgekv", *words],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in both:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0 and "cannot be written" not in err, err
        assert json.loads(out)["kv_method"] != "snapkv"  # which needs no profile
    assert len(list((tmp_path / "edgekv" / "profiles").iterdir())) == 1


def test_work_that_was_done_before_is_said_at_once():
    steps = []
    work = Work([100, 300, 200], [1], lambda *step: steps.append(step))
    work.piece(0)(1, 4)
    work.end(0)
    work.piece(2)(1, 2)
    work.end(2)
    assert steps == [(300, 600), (325, 600), (400, 600), (500, 600), (600, 600)]
    Work([1], [], None).end(0)


def test_long_texts_count_for_more_than_short_ones(tiny):
    steps = []
    llm = probe_profile.load(str(tiny("llama-gqa")), 400, n_threads=1)
    texts = ["word " * 70, "another word and more " * 100]
    probe_profile.make(llm, texts, (0.2,), n_tokens=400, progress=lambda *step: steps.append(step))
    short = min(400, len(llm.tokenize(texts[0].encode())))
    assert steps[-1] == (short + 400, short + 400) and (short, short + 400) in steps
