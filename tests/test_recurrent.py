"""Recurrent layers in llama.cpp's own cache: what has been read cannot be taken back token by
token, and a conversation is saved and loaded all the same.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgekv import EdgeKVError, llama_cpp, native
from edgekv.llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from tests import archs, recurrent
from tests.engine import feed, load, logits
from tests.lib import nmse
from tests.test_archs import ALL, MAX_NMSE, SMALL, cancelled, tokens
from tests.test_session import parts, put_together, refused

HYBRIDS = ("qwen35", "falcon-h1", "lfm2")
"""Layers that attend beside recurrent ones, layers that are both, and sliding windows."""
MODELS = ("mamba", *HYBRIDS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = archs.write(tmp_path_factory.mktemp("recurrent"), *HYBRIDS)
    recurrent.write(path / "mamba-dense.gguf")
    return path


def whole(folder: Path, name: str, **more: Any) -> Any:
    """The model in llama.cpp's own cache."""
    return load(folder / f"{name}-dense.gguf", **{**SMALL, **more})


def conversation(folder: Path, name: str, seed: int = 1, **more: Any) -> Any:
    llm = whole(folder, name, **more)
    llm.eval(tokens(llm, 100, seed))
    return llm


@pytest.mark.parametrize("n_before", [0, 100])
@pytest.mark.parametrize("name", MODELS)
def test_a_turn_that_is_cancelled_leaves_the_conversation(folder, name, n_before):
    llm, other = (whole(folder, name) for _ in range(2))
    for model in (llm, other):
        model.eval(tokens(model, n_before, 1))
    assert cancelled(llm, tokens(llm, 100, 2))
    assert llm.n_tokens == n_before
    for model in (llm, other):
        model.eval(tokens(model, 40, 3))
    more = tokens(llm, 5, 4)
    assert nmse(feed(llm, more), feed(other, more)) < MAX_NMSE


@pytest.mark.parametrize("name", MODELS)
def test_what_was_taken_back_is_read_again(folder, name):
    """The parent takes tokens back by counting them less, as after drafts that were refused."""
    llm, other = conversation(folder, name), whole(folder, name)
    llm.n_tokens = 60
    assert cancelled(llm, tokens(llm, 100, 2)) and llm.n_tokens == 60
    llm.eval(tokens(llm, 40, 3))
    assert llm.n_tokens == 100
    other.eval([*tokens(llm, 100, 1)[:60], *tokens(llm, 40, 3)])
    more = tokens(llm, 5, 4)
    assert nmse(feed(llm, more), feed(other, more)) < MAX_NMSE


@pytest.mark.parametrize("turn", [[5], [5] * 100])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_that_fails_leaves_the_conversation(folder, name, turn):
    llm, other = (conversation(folder, name) for _ in range(2))
    stops = llama_cpp.ggml_abort_callback(lambda _: True)
    llama_cpp.llama_set_abort_callback(llm.ctx, stops, None)
    with pytest.raises(EdgeKVError, match="conversation is as before"):
        llm.eval(turn)
    llama_cpp.llama_set_abort_callback(llm.ctx, llama_cpp.ggml_abort_callback(), None)
    assert llm.n_tokens == 100
    more = tokens(llm, 5, 4)
    assert nmse(feed(llm, more), feed(other, more)) < MAX_NMSE


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_conversation_goes_on(folder, name, tmp_path):
    first, second = conversation(folder, name), whole(folder, name)
    whole(folder, name).kv_save(str(tmp_path / "empty"))
    first.kv_save(str(tmp_path / "talk"), "a note")
    assert second.kv_load(str(tmp_path / "talk")) == "a note"
    more = tokens(first, 5, 2)
    assert np.array_equal(feed(second, more), feed(first, more))
    second.kv_load(str(tmp_path / "empty"))
    fresh = whole(folder, name)
    assert second.n_tokens == 0 and np.array_equal(feed(second, more), feed(fresh, more))


@pytest.mark.parametrize("name", ["mamba", "qwen35", "falcon-h1"])
def test_a_recurrent_state_that_is_none_is_refused(folder, name, tmp_path):
    llm, path = conversation(folder, name), tmp_path / "talk"
    llm.kv_save(str(path))
    header, body = parts(path)
    damaged = bytearray(body)
    struct.pack_into("<f", damaged, len(body) - 4, float("nan"))
    put_together(path, header, damaged)
    assert "no numbers" in refused(llm, path)
    for change, rest in ((1, body + b"x"), (-1, body[:-1])):
        put_together(path, {**header, "n_state": header["n_state"] + change}, rest)
        refused(llm, path)
    feed(llm, tokens(llm, 3, 2))


def test_a_recurrent_state_of_another_place_is_refused(folder, tmp_path):
    llm, path = conversation(folder, "mamba"), tmp_path / "talk"
    llm.kv_save(str(path))
    header, body = parts(path)
    place = len(body) - header["n_state"] + 12  # behind a magic number, a sequence and a count
    assert struct.unpack_from("<i", body, place) == (99,)
    for pos in (98, 100, -1, 2**31 - 1):
        struct.pack_into("<i", body, place, pos)
        put_together(path, header, body)
        refused(llm, path)


@pytest.mark.parametrize("ratio", [1.0, 0.3])
def test_drafts_of_a_source_of_ones_own_are_taken_back(folder, ratio):
    class Source(LlamaPromptLookupDecoding):
        n_drafted = 0

        def __call__(self, *args, **more):
            draft = super().__call__(*args, **more)
            self.n_drafted += len(draft)
            return draft

    def answer(**more):
        llm = whole(folder, "qwen35", kv_ratio=ratio, **more)
        said = tokens(llm, 20, 1) * 4
        return [token for token, _ in zip(llm.generate(said, temp=0), range(60), strict=False)]

    source = Source(num_pred_tokens=4)
    assert answer(draft_model=source) == answer() and source.n_drafted > 0


@pytest.mark.parametrize("name", HYBRIDS)
def test_statistics_tell_the_recurrent_state_from_the_cache(folder, name):
    llm, compressed = conversation(folder, name), conversation(folder, name, kv_ratio=0.5)
    stats = llm.kv_stats()
    assert stats.n_bytes_recurrent == compressed.kv_stats().n_bytes_recurrent > 0
    assert stats.n_bytes + stats.n_bytes_recurrent == native.context_bytes(llm.ctx)[0]


def test_a_model_without_a_cache_has_a_state(folder):
    stats = conversation(folder, "mamba").kv_stats()
    assert stats.n_bytes == stats.n_bytes_full == 0 < stats.n_bytes_recurrent


def test_a_short_turn_with_another_answer_is_read_from_its_beginning(folder):
    llm, other = conversation(folder, "qwen35", kv_budget=ALL), whole(folder, "qwen35")
    said = [*tokens(llm, 100, 1), *tokens(llm, 20, 2)]
    answer = [token for token, _ in zip(llm.generate(said, temp=0), range(9), strict=False)]
    before = llm.n_evaluated
    said = [*said, *answer[:4], 7, *tokens(llm, 20, 3)]
    next(llm.generate(said, temp=0))
    assert llm.n_evaluated - before < 50
    other.eval(said)
    assert nmse(logits(llm), logits(other)) < MAX_NMSE
