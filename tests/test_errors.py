"""Errors: who catches what llama-cpp-python raises catches what edgekv raises in its place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import edgekv
from edgekv.conversation import session
from edgekv.errors import BadInput, EdgeKVError
from edgekv.llama_cpp import Llama as Parent

N_CTX = 512


def beyond_the_context(llm: Any) -> None:
    llm.create_completion([5] * (N_CTX + 1), max_tokens=1)


def more_than_the_context(llm: Any) -> None:
    llm.eval([5] * (N_CTX + 1))


def a_damaged_state(llm: Any) -> None:
    llm.eval([5] * 9)
    state = llm.save_state()
    state.llama_state, state.llama_state_size = b"no state" * 9, 72
    llm.load_state(state)


def error_of(call: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as raised:
        call()
    return raised.value


@pytest.fixture
def stray(tmp_path: Path) -> Path:
    path = tmp_path / "stray.gguf"
    path.write_bytes(b"GGUF, not really")
    return path


@pytest.mark.parametrize("ratio", [1.0, 0.5])
@pytest.mark.parametrize("act", [beyond_the_context, more_than_the_context, a_damaged_state])
def test_a_loaded_model_raises_what_the_parent_does(tiny, act, ratio):
    path = str(tiny("llama-gqa"))
    parent = error_of(lambda: act(Parent(path, n_ctx=N_CTX, verbose=False)))
    llm = edgekv.Llama(path, n_ctx=N_CTX, verbose=False, kv_ratio=ratio, kv_method="snapkv")
    mine = error_of(lambda: act(llm))
    assert isinstance(mine, EdgeKVError) and isinstance(mine, type(parent)), (mine, parent)


@pytest.mark.parametrize(
    "arguments",
    [
        {"model_path": "nowhere.gguf"},
        {"model_path": "{stray}"},
        {"model_path": "{model}", "kv_overrides": {"llama.context_length": None}},
        {"model_path": "{model}", "kv_overrides": {"general.name": "x" * 999}},
    ],
)
def test_loading_raises_what_the_parent_does(tiny, stray, arguments):
    places = {"{stray}": str(stray), "{model}": str(tiny("llama-gqa"))}
    arguments = {name: places.get(str(value), value) for name, value in arguments.items()}
    parent = error_of(lambda: Parent(verbose=False, **arguments))
    mine = error_of(lambda: edgekv.Llama(verbose=False, **arguments))
    assert isinstance(mine, EdgeKVError) and isinstance(mine, type(parent)), (mine, parent)


def test_what_is_wrong_with_a_file_is_said_once(tiny, tmp_path):
    """BadInput is a ValueError, but none of those that mean a damaged file."""
    from edgekv.documents.extract import document_text
    from edgekv.documents.plain import read_document
    from edgekv_lab.eval.files import text_of

    for read in (document_text, read_document, text_of):
        said = str(error_of(lambda read=read: read(str(tmp_path))))
        assert said.count(str(tmp_path)) == 1, said
    saved = tmp_path / "saved"
    made = edgekv.Llama(str(tiny("llama-gqa")), n_ctx=N_CTX, verbose=False)
    made.eval([5] * 9)
    made.kv_save(str(saved))
    other = edgekv.Llama(str(tiny("qwen2")), n_ctx=N_CTX, verbose=False)
    for look in (other.kv_load, lambda path: session.beginning(path, other)):
        error = error_of(lambda look=look: look(str(saved)))
        assert isinstance(error, BadInput) and not isinstance(error, session.Damaged), error
