"""Saved conversations: they go on as if nothing had happened, and no file does any harm."""

from __future__ import annotations

import hashlib
import json
import os
import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgekv import BadInput, EdgeKVError
from edgekv.conversation import session
from edgekv.methods import REGISTRY
from edgekv.methods.budget.profile import ProfileBudget
from edgekv.model.fingerprint import fingerprint
from tests import models, recurrent
from tests.engine import TYPES, feed, load, logits, random_profile

N_PROMPT, TAIL = 400, 80
WAYS = {
    "compressed": ("llama-gqa", dict(kv_ratio=0.3, kv_tail=TAIL)),
    "merging": ("llama-gqa", dict(kv_ratio=0.3, kv_tail=TAIL, kv_method="score=h2o,merge=d2o")),
    "summing": (
        "gemma3",
        dict(kv_ratio=0.3, kv_tail=TAIL, kv_method="score=snapkv,merge=summary,worst=5"),
    ),
    "fast": ("llama-gqa", dict(kv_fast_prefill=True, kv_tail=TAIL)),
    "whole": ("llama-gqa", dict()),
    "whole, no flash": ("llama-gqa", dict(flash_attn=False)),
    "whole, windows": ("gemma3", dict()),
}


def conversation(
    tiny: Any, text: Any, way: str = "compressed", kind: str = "f16", seed: int = 0, **more: Any
) -> Any:
    """A prompt, and a few tokens behind it."""
    name, options = WAYS[way]
    llm = load(tiny(name), kind, **{**options, **more})
    llm.eval(list(text(N_PROMPT, seed)))
    llm.eval(list(text(9, seed + 1)))
    return llm


def empty(tiny: Any, way: str, kind: str = "f16", **more: Any) -> Any:
    name, options = WAYS[way]
    return load(tiny(name), kind, **{**options, **more})


# ---- going on


WITHOUT_PROFILE = sorted(
    name
    for name, preset in REGISTRY.items()
    if not isinstance(preset.budget, ProfileBudget) and not preset.keeps_all
)


@pytest.mark.parametrize(
    "method",
    [
        *WITHOUT_PROFILE,
        "kvzap-summary",
        "kvzap",
        "score=snapkv,merge=summary,worst=5",
        "score=random,budget=adakv,merge=d2o",
    ],
)
def test_a_loaded_conversation_goes_on_as_the_uninterrupted_one_whose_tail_is_compressed(
    tiny, text, tmp_path, method
):
    options = dict(kv_method=method, kv_ratio=0.3, kv_tail=TAIL)
    if method in ("kvzap-summary", "kvzap"):
        random_profile(tiny("llama-gqa"), tmp_path / "profile.gguf")
        options["kv_profile"] = str(tmp_path / "profile.gguf")
    first, second = load(tiny("llama-gqa"), **options), load(tiny("llama-gqa"), **options)
    first.eval(list(text(N_PROMPT)))
    feed(first, text(TAIL + 20, 1))  # compressed once before it is saved
    first.kv_save(str(tmp_path / "talk"))
    second.kv_load(str(tmp_path / "talk"))
    began = first.engine.turn.past.compressed_at
    assert np.array_equal(feed(second, text(2 * TAIL, 2)), feed(first, text(2 * TAIL, 2)))
    assert second.engine.turn.past.compressed_at == first.engine.turn.past.compressed_at > began
    assert (second.kv_stats().kept == first.kv_stats().kept).all()
    first.eval(list(text(N_PROMPT, 3)))
    second.eval(list(text(N_PROMPT, 3)))
    assert np.array_equal(logits(second), logits(first))


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("way", WAYS)
def test_every_kind_of_cache_goes_on(tiny, text, tmp_path, nmse, way, kind):
    if kind != "f16" and way == "whole, no flash":
        kind = f"{kind},f16"
    first, second = conversation(tiny, text, way, kind), empty(tiny, way, kind)
    first.kv_save(str(tmp_path / "talk"))
    second.kv_load(str(tmp_path / "talk"))
    assert second.kv_stats().n_seen == first.kv_stats().n_seen == N_PROMPT + 9
    got, expected = feed(second, text(20, 5)), feed(first, text(20, 5))
    if (
        way == "summing"
    ):  # rows that no window sees any more may be gone, and sums are cut elsewhere
        assert nmse(got, expected) < 1e-6
    else:
        assert np.array_equal(got, expected)


def test_a_recurrent_model_goes_on_too(text, tmp_path):
    first, second = (load(recurrent.write(tmp_path / "model.gguf"), kv_ratio=0.3) for _ in range(2))
    first.eval(list(text(100)))
    first.kv_save(str(tmp_path / "talk"), "a note")
    assert second.kv_load(str(tmp_path / "talk")) == "a note"
    assert np.array_equal(feed(second, text(5, 1)), feed(first, text(5, 1)))
    header, body = parts(tmp_path / "talk")
    header["n_state"] += 1
    put_together(tmp_path / "talk", header, body + b"x")
    before, tokens = second.n_tokens, second.input_ids[: second.n_tokens].tolist()
    with pytest.raises(BadInput):
        second.kv_load(str(tmp_path / "talk"))
    assert second.n_tokens == before and second.input_ids[:before].tolist() == tokens
    assert np.array_equal(feed(second, text(5, 2)), feed(first, text(5, 2)))


@pytest.mark.parametrize("way", WAYS)
def test_a_conversation_in_the_middle_of_a_compressed_prompt_is_not_saved(
    tiny, text, tmp_path, way
):
    llm = conversation(tiny, text, way)
    llm.n_tokens = 100
    if llm.kv_stats().ratio == 1:
        llm.kv_save(str(tmp_path / "talk"))
    else:
        with pytest.raises(EdgeKVError, match="taken back"):
            llm.kv_save(str(tmp_path / "talk"))
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("way", WAYS)
def test_an_empty_conversation_is_one_too(tiny, text, tmp_path, way):
    empty(tiny, way).kv_save(str(tmp_path / "talk"))
    llm = conversation(tiny, text, way)
    llm.kv_load(str(tmp_path / "talk"))
    assert llm.n_tokens == 0
    assert np.array_equal(feed(llm, text(5)), feed(empty(tiny, way), text(5)))


@pytest.mark.parametrize("way", ["compressed", "fast", "whole"])
def test_what_was_taken_back_is_not_saved(tiny, text, tmp_path, way):
    llm, again = conversation(tiny, text, way), empty(tiny, way)
    llm.n_tokens -= 3  # as the parent does before the next prompt is read
    llm.kv_save(str(tmp_path / "talk"))
    again.kv_load(str(tmp_path / "talk"))
    assert again.n_tokens == N_PROMPT + 6
    assert np.array_equal(feed(again, text(5, 7)), feed(llm, text(5, 7)))


@pytest.mark.parametrize("way", ["whole", "whole, windows"])
@pytest.mark.parametrize("n_left", [N_PROMPT + 8, N_PROMPT - 20, 70, 20])
def test_a_loaded_conversation_can_be_taken_back(tiny, text, tmp_path, nmse, way, n_left):
    """An early question is edited: the windows that its answer needs are not in the file."""
    first, second = conversation(tiny, text, way), empty(tiny, way)
    first.kv_save(str(tmp_path / "talk"))
    second.kv_load(str(tmp_path / "talk"))
    for llm in (first, second):
        llm.n_tokens = n_left  # as the parent does when the next prompt shares that much
        llm.eval(list(text(30, 7)))
    assert second.n_tokens == first.n_tokens == n_left + 30
    assert (
        nmse(logits(second), logits(first)) < 1e-4
    )  # in batches of other sizes; 0.2 with a window that misses tokens


def test_what_could_not_be_loaded_is_not_saved(tiny, text, tmp_path):
    llm = conversation(tiny, text, "whole, windows")
    llm.kv_save(str(tmp_path / "talk"))
    before = (tmp_path / "talk").read_bytes()
    llm.kv_load(str(tmp_path / "talk"))
    llm.n_tokens = 100
    with pytest.raises(BadInput, match="cannot be saved"):
        llm.kv_save(str(tmp_path / "talk"))
    assert (tmp_path / "talk").read_bytes() == before
    llm.eval(list(text(5)))
    llm.kv_save(str(tmp_path / "talk"))
    llm.kv_load(str(tmp_path / "talk"))
    assert llm.n_tokens == 105


# ---- notes


@pytest.mark.parametrize(
    "note",
    [None, {}, [], "", "ä\ud800\n", 5, {"messages": [{"role": "user", "content": "x\0" * 1000}]}],
)
def test_a_note_comes_back(tiny, tmp_path, note):
    llm = empty(tiny, "compressed")
    llm.kv_save(str(tmp_path / "talk"), note)
    assert llm.kv_load(str(tmp_path / "talk")) == note


def deep() -> list[Any]:
    found: list[Any] = []
    for _ in range(100_000):
        found = [found]
    return found


@pytest.mark.parametrize("note", [{1, 2}, float("nan"), deep()], ids=["a set", "no number", "deep"])
def test_a_note_that_is_no_json_is_refused(tiny, tmp_path, note):
    with pytest.raises(BadInput, match="note"):
        empty(tiny, "compressed").kv_save(str(tmp_path / "talk"), note)
    assert not list(tmp_path.iterdir())


def test_a_note_is_looked_at_before_anything_changes(tiny, text, tmp_path):
    conversation(tiny, text).kv_save(str(tmp_path / "talk"), {"for": "another program"})
    llm = conversation(tiny, text, seed=5)
    before = everything(llm)

    def check(note: Any) -> None:
        assert note == {"for": "another program"} and everything(llm) == before
        raise BadInput("not for me")

    with pytest.raises(BadInput, match="not for me"):
        llm.kv_load(str(tmp_path / "talk"), check)
    assert everything(llm) == before


# ---- files that do not fit


def everything(llm: Any) -> tuple[Any, ...]:
    """What a file that is refused must not change."""
    from edgekv.conversation import state

    now = state.take(llm)
    more = now.past and (now.past.compressed_at, now.past.ratio, sorted(now.past.queries))
    return (
        llm.n_tokens,
        now.tokens.tolist(),
        hashlib.sha256(now.data).hexdigest(),
        more,
        llm._requires_eval,
    )


def parts(path: Path) -> tuple[dict[str, Any], bytearray]:
    """Header and what stands behind it, without the checksum."""
    data = path.read_bytes()
    line, _, body = data[len(session.MAGIC) : -32].partition(b"\n")
    return json.loads(line), bytearray(body)


def put_together(path: Path, header: Any, body: bytes) -> None:
    """A file whose checksum is right, whatever else is not."""
    line = header if isinstance(header, bytes) else json.dumps(header).encode()
    data = session.MAGIC + line + b"\n" + body
    path.write_bytes(data + hashlib.sha256(data).digest())


def refused(llm: Any, path: Path) -> str:
    before = everything(llm)
    with pytest.raises(BadInput) as error:
        llm.kv_load(str(path))
    assert everything(llm) == before
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("way", WAYS)
def test_a_token_outside_the_vocabulary_is_refused(tiny, text, tmp_path, way):
    llm, path = conversation(tiny, text, way), tmp_path / "talk"
    llm.kv_save(str(path))
    header, body = parts(path)
    for token in (models.N_VOCAB, -1, 2**31 - 1, -(2**31)):
        struct.pack_into("<i", body, header["n_note"] + 40, token)
        put_together(path, header, body)
        assert "vocabulary" in refused(llm, path)


HEADERS = [
    b"",
    b"{}",
    b"[]",
    b"null",
    b"{",
    b"[" * 60_000,
    b'{"n_tokens": ' + b"9" * 5000 + b"}",
    b"\xff\xfe",
    b" " * 100_000,
    b"NaN",
]


@pytest.mark.parametrize("header", HEADERS, ids=range(len(HEADERS)))
def test_a_header_that_is_none_is_refused(tiny, text, tmp_path, header):
    llm, path = conversation(tiny, text), tmp_path / "talk"
    llm.kv_save(str(path))
    put_together(path, header, bytes(parts(path)[1]))
    assert "damaged" in refused(llm, path)


STRANGE = (True, False, None, 1.0, -1, 2**31, 2**63, 2**200, 1e400, "1", [], {}, [[]], "x" * 1000)


@pytest.mark.parametrize("way", ["merging", "summing", "whole"])
def test_strange_values_in_a_header_are_refused(tiny, text, tmp_path, way):
    llm, path = conversation(tiny, text, way), tmp_path / "talk"
    llm.kv_save(str(path), "a note")
    header, body = parts(path)
    for place in [(header, name) for name in header] + [
        (header["memory"] or {}, name) for name in header["memory"] or {}
    ]:
        where, name = place
        old = where.pop(name)
        put_together(path, header, body)
        refused(llm, path)
        for value in STRANGE:
            same = type(value) is type(old) and value == old
            fine = (
                name in ("ratio", "beta") and value == 1 or name == "compressed_at" and value == 1
            )
            if not same and not (fine and type(value) in (int, float)):
                where[name] = value
                put_together(path, header, body)
                refused(llm, path)
        where[name] = old
    header["more"] = 1
    put_together(path, header, body)
    refused(llm, path)


@pytest.mark.parametrize("way", WAYS)
def test_sizes_that_do_not_add_up_are_refused(tiny, text, tmp_path, way):
    """Among them bytes that llama.cpp would not read, and a count of tokens that is too small."""
    llm, path = conversation(tiny, text, way), tmp_path / "talk"
    llm.kv_save(str(path), "a note")
    header, body = parts(path)
    n_front = header["n_note"] + 4 * header["n_tokens"]
    shorter = {**header, "n_tokens": header["n_tokens"] - 1}
    for changed, rest in (
        (header, body + b"x"),
        (header, body[:-1]),
        (header, b""),
        (shorter, body),
        ({**header, "n_state": header["n_state"] + 3}, body + b"xyz"),
        ({**header, "n_state": header["n_state"] - 3}, body[:-3]),
        ({**header, "n_state": 0}, body[: -header["n_state"]]),
        (shorter, body[: n_front - 4] + body[n_front:]),
        ({**shorter, "n_tokens": header["n_tokens"] + 1}, body[:n_front] + body[n_front - 4 :]),
    ):
        put_together(path, changed, rest)
        refused(llm, path)
    feed(llm, text(5))


def test_flash_attention_is_part_of_what_a_file_is_for(tiny, text, tmp_path):
    conversation(tiny, text, "whole, no flash").kv_save(str(tmp_path / "talk"))
    assert "flash attention" in refused(
        conversation(tiny, text, "whole", seed=3), tmp_path / "talk"
    )


def test_rope_settings_and_caches_are_part_of_what_a_file_is_for(tiny, text, tmp_path):
    conversation(tiny, text, "whole").kv_save(str(tmp_path / "talk"))
    assert "RoPE" in refused(
        conversation(tiny, text, "whole", rope_freq_base=500.0), tmp_path / "talk"
    )
    assert "uncompressed" in refused(conversation(tiny, text), tmp_path / "talk")


def test_an_older_format_is_said_in_one_line(tiny, text, tmp_path):
    llm = conversation(tiny, text)
    (tmp_path / "talk").write_bytes(b"edgekv session 1\n{}\n" + bytes(100))
    assert "another version" in refused(llm, tmp_path / "talk")
    llm.kv_save(str(tmp_path / "talk"))  # it is one of ours
    llm.kv_load(str(tmp_path / "talk"))


@pytest.mark.parametrize(
    ("way", "kind"),
    [("whole, no flash", "f16"), ("whole", "q8_0"), ("whole, windows", "bf16"), ("whole", "q4_1")],
)
def test_values_that_are_no_numbers_are_refused(tiny, text, tmp_path, way, kind):
    """Without flash attention they would stay in rows that nothing clears."""
    llm, path = conversation(tiny, text, way, kind), tmp_path / "talk"
    llm.kv_save(str(path))
    header, body = parts(path)
    first_key = len(body) - header["n_state"] + 16 + 12 * header["n_tokens"] + 8 + 12
    struct.pack_into("<H", body, first_key, 0x7FFF)
    put_together(path, header, body)
    assert "no numbers" in refused(llm, path)
    assert np.isfinite(feed(llm, text(3))).all()


def test_positions_of_llama_cpps_own_cache_are_looked_at(tiny, text, tmp_path):
    llm, path = conversation(tiny, text, "whole"), tmp_path / "talk"
    llm.kv_save(str(path))
    header, body = parts(path)
    first_cell = len(body) - header["n_state"] + 16
    for pos in (-1, -2, 1, 2**31 - 1, header["n_tokens"]):
        struct.pack_into("<i", body, first_cell, pos)
        put_together(path, header, body)
        assert "positions" in refused(llm, path)


def test_a_state_that_llama_cpp_refuses_leaves_the_conversation(tiny, text, tmp_path):
    """Another type of as many bytes, which it notices when its cache is empty already."""
    llm, path = conversation(tiny, text, "whole"), tmp_path / "talk"
    same = conversation(tiny, text, "whole")
    llm.kv_save(str(path))
    header, body = parts(path)
    first_type = len(body) - header["n_state"] + 16 + 12 * header["n_tokens"] + 8
    struct.pack_into("<i", body, first_type, TYPES["bf16"])
    put_together(path, header, body)
    assert "does not fit" in refused(llm, path)
    assert np.array_equal(feed(llm, text(5)), feed(same, text(5)))


@pytest.mark.parametrize("way", ["compressed", "merging", "whole", "whole, windows"])
def test_files_with_random_damage_are_refused_or_can_be_used(tiny, text, tmp_path, way):
    """100 files each, whose checksum is right: whatever is loaded, the model goes on answering."""
    rng, path = random.Random(way), tmp_path / "talk"
    saved, llm = conversation(tiny, text, way), conversation(tiny, text, way, seed=20)
    saved.kv_save(str(path), {"messages": []})
    header, body = parts(path)
    n_loaded, n_refused = 0, 0
    for _ in range(100):
        damaged = bytearray(body)
        begin = len(body) - header["n_state"] if rng.random() < 0.7 else 0
        width = rng.choice([64, 2000, len(body) - begin])  # mostly where sizes and positions are
        for _ in range(rng.choice([1, 1, 2, 50])):
            i = begin + rng.randrange(min(width, len(body) - begin - 4))
            damaged[i : i + 4] = rng.choice(
                [rng.randbytes(4), b"\xff\xff\xff\x7f", bytes(4), b"\xff" * 4]
            )
        if rng.random() < 0.2:
            cut = rng.randrange(len(body))
            damaged = damaged[:cut] + damaged[cut + rng.choice([0, 1, 4, 1000]) :]
        fits = {**header, "n_state": max(header["n_state"] + len(damaged) - len(body), 0)}
        put_together(path, fits, damaged)
        before = everything(llm)
        try:
            llm.kv_load(str(path))
            n_loaded += 1
        except BadInput as error:
            n_refused += 1
            assert "\n" not in str(error) and everything(llm) == before
        assert llm.kv_stats().n_seen == llm.n_tokens
        llm.eval(list(text(3)))
    assert n_refused > 20
    llm.reset()
    fresh = empty(tiny, way)
    assert np.array_equal(feed(llm, text(5)), feed(fresh, text(5)))


# ---- files in their folder


@pytest.mark.parametrize("content", [b"the only copy", b"GGUF", b"edgekv sessions", b"x"])
def test_what_is_no_conversation_is_not_replaced(tiny, tmp_path, content):
    path = tmp_path / "report.txt"
    path.write_bytes(content)
    with pytest.raises(BadInput, match="no saved conversation"):
        empty(tiny, "compressed").kv_save(str(path))
    assert path.read_bytes() == content and list(tmp_path.iterdir()) == [path]


def test_the_model_itself_and_pipes_are_not_replaced(tiny, tmp_path):
    model, pipe = tiny("llama-gqa"), tmp_path / "pipe"
    before = model.read_bytes()
    os.mkfifo(pipe)
    for path in (model, pipe):
        with pytest.raises(BadInput):
            empty(tiny, "compressed").kv_save(str(path))
    with pytest.raises(BadInput):
        empty(tiny, "compressed").kv_load(str(pipe))
    assert model.read_bytes() == before and pipe.is_fifo()


def test_a_model_whose_weights_were_permuted_is_another_one(tmp_path):
    path = tmp_path / "model.gguf"
    data = np.random.default_rng(0).integers(0, 256, 40 << 20, np.uint8)
    data.tofile(path)
    before = fingerprint(str(path))
    assert fingerprint(str(path)) == before
    heads = data[20 << 20 : 24 << 20].reshape(4, -1).copy()
    data[20 << 20 : 24 << 20] = heads[[1, 0, 3, 2]].ravel()
    data.tofile(path)
    permuted = fingerprint(str(path))
    data[-1] ^= 1
    data.tofile(path)
    assert len({before, permuted, fingerprint(str(path))}) == 3


@pytest.mark.parametrize("way", ["compressed", "whole"])
def test_loading_takes_the_file_once(tiny, text, tmp_path, way):
    name, options = WAYS[way]
    options = {**options, "kv_ratio": 0.9} if way == "compressed" else options
    llm, again = load(tiny(name), **options), load(tiny(name), **options)
    llm.eval(list(text(2000)))
    llm.kv_save(str(tmp_path / "talk"))
    n_bytes = (tmp_path / "talk").stat().st_size
    assert n_bytes > 2 << 20
    tracemalloc.start()
    again.kv_load(str(tmp_path / "talk"))
    loading = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    again.kv_save(str(tmp_path / "talk"))
    saving = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert loading < 1.2 * n_bytes and saving < 1.2 * n_bytes
