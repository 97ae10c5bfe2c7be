"""Damaged and hostile profiles and model headers end at once, in little memory, in one line.

Seeded: a case that fails is named by its number, and is the same every time.
"""

from __future__ import annotations

import os
import shutil
import struct
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgekv import profiles
from edgekv.errors import BadInput
from edgekv.model.header import Header
from tests.test_contest import FOUND
from tests.test_profiles import MAPS, make

N_CASES = 150
LIMIT_S, LIMIT_BYTES = 1.0, 32 << 20
HUGE = (2**12 + 1, 2**16, 2**31 - 1, 2**32, 2**40, 2**62, 2**63, 2**64 - 1)
STRING, ARRAY = 8, 9


def text(word: str) -> bytes:
    return struct.pack("<Q", len(word)) + word.encode()


def header(
    *entries: bytes, version: int = 3, n_keys: int | None = None, n_tensors: int = 0
) -> bytes:
    count = len(entries) if n_keys is None else n_keys
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, count) + b"".join(entries)


def array(kind: int, n: int, content: bytes = b"") -> bytes:
    return text("a") + struct.pack("<IIQ", ARRAY, kind, n) + content


KIND = text("general.type") + struct.pack("<I", STRING) + text("kvbudget")
DEEP = b"".join(struct.pack("<IQ", ARRAY, 1) for _ in range(100_000))


def hostile() -> Iterator[tuple[str, bytes]]:
    """Files that were made to take time or memory."""
    for n in HUGE:
        yield f"{n} arrays in an array", header(KIND, array(ARRAY, n), bytes(60))
        yield f"{n} words", header(KIND, array(STRING, n, bytes(5000)))
        yield f"{n} numbers", header(KIND, array(10, n, bytes(5000)))
        yield f"{n} keys", header(KIND, n_keys=n)
        yield f"{n} tensors", header(KIND, bytes(4096), n_tensors=n)
        yield f"a name of {n} bytes", header(struct.pack("<Q", n) + bytes(4096))
    yield "arrays of arrays of arrays", header(KIND, array(ARRAY, 1, DEEP))
    yield "big-endian", b"GGUF" + struct.pack(">IQQ", 3, 0, 1) + bytes(100)
    for version in (0, 1, 4, 2**31):
        yield f"version {version}", header(KIND, version=version)
    yield "an honest array of a megabyte", header(KIND, array(0, 1 << 20, bytes(1 << 20)))
    small = [
        text(f"k{i}") + struct.pack("<IIQ", ARRAY, 0, 16384) + bytes(16384) for i in range(700)
    ]
    yield "many arrays that are not long", header(KIND, *small)
    # one table, claimed again and again
    table = struct.pack("<IQIQ", 1, 1 << 21, 0, 0)
    tables = [text(f"t{i}") + table for i in range(16_000)]
    yield (
        "many tensors in one place",
        header(KIND, *tables, bytes(8 << 20), n_keys=1, n_tensors=16_000),
    )


def changed(data: bytes, n_header: int, seed: int) -> bytes:
    """`data` with damage in its first n_header bytes, or an end that is too early."""
    rng = np.random.default_rng(seed)
    out = bytearray(data)
    match seed % 5:
        case 0:
            for place in rng.integers(4, n_header, 1 + seed % 3):
                out[place] ^= 1 << rng.integers(8)
        case 1:
            del out[rng.integers(n_header) :]
        case 2:  # a count or a length
            place = rng.integers(4, n_header - 8)
            out[place : place + 8] = HUGE[rng.integers(len(HUGE))].to_bytes(8, "little")
        case 3:  # a type
            place = rng.integers(4, n_header - 4)
            out[place : place + 4] = int(rng.integers(16)).to_bytes(4, "little")
        case _:  # an array of arrays
            place = rng.integers(24, n_header - 16)
            out[place : place + 16] = struct.pack(
                "<IIQ", ARRAY, ARRAY, HUGE[rng.integers(len(HUGE))]
            )
    return bytes(out)


def ends(what, path: Path, data: bytes, name: str) -> object:
    """What `what(path)` gives for a file with these bytes, None for BadInput; within the limits."""
    path.write_bytes(data)
    begin = time.process_time()  # the machine may be busy
    found = attempt(what, path)
    seconds = time.process_time() - begin
    tracemalloc.start()
    attempt(what, path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert seconds < LIMIT_S and peak < LIMIT_BYTES + 2 * len(data), (
        f"{name}: {seconds:.2f} s, {peak} bytes"
    )
    return found


def attempt(what, path: Path) -> object:
    try:
        return what(str(path))
    except BadInput as error:
        assert str(error).isprintable(), path.read_bytes()
        return None


@pytest.mark.parametrize("what", [profiles.read, profiles.identify])
def test_hostile_files_are_refused(tmp_path, what):
    for name, data in hostile():
        assert ends(what, tmp_path / "p.gguf", data, name) is None, name


def test_a_hostile_profile_beside_a_model_is_passed_over(tmp_path, tiny, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # another test's profile is there
    model = tmp_path / "m.gguf"
    shutil.copy(tiny("llama-gqa"), model)
    for name, data in hostile():
        path = tmp_path / "kvbudget-m.gguf"
        assert ends(lambda _: profiles.find(str(model)), path, data, name) is None


@pytest.mark.parametrize("part", range(3))
def test_damaged_profiles_are_profiles_or_refused(tmp_path, part):
    path = tmp_path / "p.gguf"
    profiles.write(
        make(
            surrogate=MAPS,
            command="edgekv profile probe -m m.gguf",
            score="kvzap",
            seed=part,
            contest=FOUND,
        ),
        path,
    )
    data = path.read_bytes()
    n_header = Header(data).n_bytes
    refused = 0
    for seed in range(N_CASES * part, N_CASES * (part + 1)):
        found = ends(profiles.read, path, changed(data, n_header, seed), f"case {seed}")
        refused += found is None
        if isinstance(found, profiles.Profile):
            assert found.shares.shape == (
                len(found.ratios),
                found.model.n_layer,
                max(found.model.n_head_kv),
            )
            assert found.shares_at(0.2)[found.heads].mean() == pytest.approx(0.2)
            texts = (
                found.kind,
                found.score,
                found.command,
                found.made_by,
                found.calibration,
                found.model.arch,
            )
            lines = found.contest.lines() if found.contest else []
            assert all(word.isprintable() for word in (*texts, *lines)), f"case {seed}"
    assert refused > N_CASES / 2


def test_damaged_models_are_models_or_refused(tmp_path, tiny):
    data = tiny("llama-gqa").read_bytes()
    n_header = Header(data).n_bytes
    for seed in range(N_CASES):
        found = ends(
            profiles.identify, tmp_path / "m.gguf", changed(data, n_header, seed), f"case {seed}"
        )
        assert found is None or isinstance(found, profiles.Identity)


@pytest.mark.skipif(os.name == "nt", reason="no pipes in folders")
@pytest.mark.parametrize("what", [profiles.read, profiles.identify])
def test_a_pipe_is_not_waited_for(tmp_path, what):
    os.mkfifo(tmp_path / "p.gguf")
    with pytest.raises(BadInput, match="no regular file"):
        what(str(tmp_path / "p.gguf"))
    with pytest.raises(BadInput):
        what("/dev/zero")


def test_limits_are_far_above_an_honest_profile(tmp_path):
    """All KV heads of BLOOM-176B, more than any other model has, with maps and the finest grid."""
    from edgekv.methods.kvzap import Surrogate, n_features

    model = profiles.Identity("bloom", 70, (112,) * 70, 128, 128, "ab" * 32)
    grid = tuple(round(0.01 * i, 2) for i in range(1, 100))
    maps = Surrogate(np.zeros((70, 112, n_features(128, 128) + 1), np.float32), "halves")
    profiles.write(make(model, grid, surrogate=maps), tmp_path / "p.gguf")
    found = profiles.read(tmp_path / "p.gguf")
    assert found.shares.shape == (99, 70, 112) and found.surrogate is not None


def test_text_of_a_profile_cannot_steer_a_terminal(tmp_path):
    path = tmp_path / "p.gguf"
    profiles.write(make(command="edgekv profile probe -m 'a\x1b[2J\n\u202eb.gguf'"), path)
    assert profiles.read(path).command.isprintable()
    words = {"command": b"clear the screen", "made_by": b"edgekv of a friend", "kind": b"probe"}
    profiles.write(
        replace(make(command=words["command"].decode()), made_by=words["made_by"].decode()), path
    )
    data = path.read_bytes()
    for name, word in words.items():
        path.write_bytes(data.replace(word, b"\x1b[2J".ljust(len(word), b"x"), 1))
        try:
            assert getattr(profiles.read(path), name).isprintable(), name
        except BadInput as error:
            assert str(error).isprintable(), name
