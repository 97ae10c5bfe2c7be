"""`edgekv.Llama` as a drop-in: mistakes, cancelling, saving, prefixes, and text that comes out as
in the parent.
"""

from __future__ import annotations

import os
import socket

import numpy as np
import pytest

from edgekv.commands.conversation import Conversation, Document, text_of
from edgekv.errors import BadInput, Cancelled, EdgeKVError
from tests.engine import attributes, feed, load, logits, positions
from tests.models import CHAT_TEMPLATE

N_PROMPT = 600
PROMPT = " the cat and the dog ran over the hill in the rain." * 12
OTHER = " a ship sailed past the bell on the reef at the end of the night." * 10


@pytest.fixture
def llm(tiny, text):
    """A conversation of one compressed prompt and a few tokens behind it."""
    found = load(tiny("llama-gqa"), kv_ratio=0.3)
    found.eval(list(text(N_PROMPT)))
    found.eval(list(text(5, seed=9)))
    return found


def state(llm) -> tuple:
    """Everything that a turn may change: tokens, rows by position and bytes."""
    store = llm.engine.store
    return (
        llm.n_tokens,
        llm.input_ids[: llm.n_tokens].tolist(),
        [
            (head.tolist(), store.row_bytes(il, k))
            for il, heads in enumerate(positions(llm))
            for k, head in enumerate(heads)
        ],
    )


# ---- mistakes


@pytest.mark.parametrize(
    "options",
    [
        dict(kv_ratio=20),
        dict(kv_ratio=0),
        dict(kv_ratio=-0.5),
        dict(kv_ratio=float("nan")),
        dict(kv_method="nonsense"),
        dict(kv_hidden="tape"),
        dict(kv_budget=0),
        dict(kv_budget_mb=-1),
        dict(kv_window=0),
        dict(kv_sink=-1),
        dict(kv_ratio=0.2, flash_attn=False),
        dict(kv_budget=np.ones((2, 2), np.int32)),
    ],
)
def test_wrong_settings_are_one_line(tiny, text, options):
    with pytest.raises(EdgeKVError) as error:
        load(tiny("llama-gqa"), **options).eval(list(text(N_PROMPT)))
    assert str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "content", [None, b"", b"GGUF", b"GGUF" + bytes(200), b"not a model at all"]
)
def test_a_file_that_is_no_model_is_one_line(tmp_path, content):
    path = tmp_path / "model.gguf"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(EdgeKVError) as error:
        load(path, kv_ratio=0.2)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.skipif(os.name == "nt", reason="needs named pipes")
@pytest.mark.parametrize("name", ["a" * 300, "pipe"])
def test_a_name_that_can_be_no_model_is_one_line(tmp_path, name):
    if name == "pipe":
        os.mkfifo(tmp_path / name)
    with pytest.raises(BadInput) as error:
        load(tmp_path / name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "options", [dict(kv_sink=2**31), dict(kv_window=2**31), dict(kv_budget_mb=float("inf"))]
)
def test_numbers_that_native_code_cannot_count_are_refused(tiny, options):
    with pytest.raises(BadInput):
        load(tiny("llama-gqa"), kv_ratio=0.3, **options)


def test_a_prompt_longer_than_the_context_changes_nothing(llm, text):
    before = state(llm)
    with pytest.raises(BadInput):
        llm.eval(list(text(2048)))
    assert state(llm) == before
    feed(llm, text(3))


# ---- cancelling


@pytest.mark.parametrize("at", [0.0, 0.3, 1.0])
def test_cancelling_leaves_the_conversation_as_it_was(tiny, text, llm, at):
    before = state(llm)

    def progress(done: int, total: int) -> None:
        if done >= at * total:
            llm.kv_cancel()

    llm.kv_progress = progress
    with pytest.raises(Cancelled):
        llm.eval(list(text(500, seed=3)))
    llm.kv_progress = None
    assert state(llm) == before
    same = load(tiny("llama-gqa"), kv_ratio=0.3)
    same.eval(list(text(N_PROMPT)))
    same.eval(list(text(5, seed=9)))
    assert np.array_equal(feed(llm, text(4, seed=5)), feed(same, text(4, seed=5)))


def test_an_error_in_the_progress_callback_comes_out_and_changes_nothing(llm, text):
    before = state(llm)

    def progress(done: int, total: int) -> None:
        raise KeyboardInterrupt

    llm.kv_progress = progress
    with pytest.raises(KeyboardInterrupt):
        llm.eval(list(text(500, seed=3)))
    assert state(llm) == before


def test_progress_rises_to_its_total(tiny, text):
    seen = []
    llm = load(
        tiny("llama-gqa"), kv_ratio=0.3, kv_progress=lambda done, total: seen.append((done, total))
    )
    llm.eval(list(text(N_PROMPT)))
    done = [step for step, _ in seen]
    assert (
        done == sorted(done) and len({total for _, total in seen}) == 1 and done[-1] == seen[-1][1]
    )


# ---- saving and loading


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("name", ["llama-gqa", "gemma3"])
def test_a_saved_conversation_goes_on_bit_for_bit(tiny, text, tmp_path, name, kind):
    first, second = (load(tiny(name), kind, kv_ratio=0.3) for _ in range(2))
    first.eval(list(text(N_PROMPT)))
    first.kv_save(str(tmp_path / "chat"))
    second.kv_load(str(tmp_path / "chat"))
    assert state(second) == state(first)
    assert np.array_equal(feed(second, text(8, seed=1)), feed(first, text(8, seed=1)))


@pytest.mark.parametrize(
    "other",
    [
        ("llama-mha", "f16", {}),
        ("llama-gqa", "q8_0", {}),
        ("llama-gqa", "f16", {"kv_ratio": 1.0}),
        ("llama-gqa", "f16", {"n_ctx": 512}),
    ],
)
def test_a_conversation_of_another_model_or_cache_type_is_refused(llm, tiny, text, tmp_path, other):
    name, kind, options = other
    llm.kv_save(str(tmp_path / "chat"))
    stranger = load(tiny(name), kind, **{"kv_ratio": 0.3, **options})
    stranger.eval(list(text(300)))
    n_tokens = stranger.n_tokens
    with pytest.raises(BadInput) as error:
        stranger.kv_load(str(tmp_path / "chat"))
    assert "\n" not in str(error.value) and stranger.n_tokens == n_tokens
    feed(stranger, text(2))


CACHES = [
    ("f16", dict(kv_ratio=0.6)),
    ("q8_0,q4_0", dict(kv_ratio=0.3, kv_method="h2o")),
    ("f16", dict(kv_ratio=1.0)),
    ("f16", dict(kv_ratio=1.0, flash_attn=False)),
]


@pytest.mark.parametrize(("kind", "options"), CACHES, ids=range(len(CACHES)))
def test_a_saved_conversation_brings_its_cache_along(tiny, text, tmp_path, kind, options):
    path = str(tmp_path / "chat")
    first = load(tiny("llama-gqa"), "q8_0", kv_ratio=0.3, kv_method="knorm")
    first.eval(list(text(N_PROMPT)))
    first.kv_save(path, "a note")
    other = load(tiny("llama-gqa"), kind, **options)
    other.eval(list(text(50, seed=5)))
    assert other.kv_load(path, taken_over=lambda note: first.kv_config()) == "a note"
    assert state(other) == state(first)
    stats = other.kv_stats()
    assert (stats.method, stats.ratio, stats.type_k) == ("knorm", 0.3, "q8_0")
    more = list(text(N_PROMPT, seed=2))
    for llm in (first, other):
        llm.eval(more)
    assert np.array_equal(feed(other, text(8, seed=1)), feed(first, text(8, seed=1)))


def test_an_uncompressed_conversation_brings_its_cache_along_too(llm, tiny, text, tmp_path):
    path = str(tmp_path / "chat")
    first = load(tiny("llama-gqa"), "q4_0")
    first.eval(list(text(100)))
    first.kv_save(path)
    llm.kv_load(path, taken_over=lambda note: first.kv_config())
    assert llm.kv_stats().mode == "uncompressed" and llm.kv_stats().type_v == "q4_0"
    assert np.array_equal(feed(llm, text(8, seed=1)), feed(first, text(8, seed=1)))


@pytest.mark.parametrize("damage", ["bytes", "type", "note", "model"])
def test_what_cannot_be_taken_over_leaves_conversation_and_cache(llm, tiny, text, tmp_path, damage):
    path = tmp_path / "chat"
    first = load(tiny("llama-mha" if damage == "model" else "llama-gqa"), "q8_0")
    first.eval(list(text(300)))
    first.kv_save(str(path))
    data = path.read_bytes()
    if damage == "bytes":
        path.write_bytes(data[:-200] + bytes([data[-200] ^ 1]) + data[-199:])
    if damage == "type":
        path.write_bytes(data.replace(b'"type_k": 8', b'"type_k": 7777', 1))

    def config(note):
        if damage == "note":
            raise BadInput("this note says nothing")
        return first.kv_config()

    before, options, whole = state(llm), llm.kv_config(), attributes(llm)
    with pytest.raises(BadInput) as error:
        llm.kv_load(str(path), taken_over=config)
    assert "\n" not in str(error.value) and attributes(llm) == whole
    assert state(llm) == before and llm.kv_config() == options and llm.kv_stats().ratio == 0.3
    twin = load(tiny("llama-gqa"), kv_ratio=0.3)
    twin.eval(list(text(N_PROMPT)))
    twin.eval(list(text(5, seed=9)))
    assert np.array_equal(feed(llm, text(3)), feed(twin, text(3)))


@pytest.mark.parametrize("damage", ["cut", "flip", "grow", "empty"])
def test_a_damaged_file_is_refused_and_changes_nothing(llm, tmp_path, damage):
    path = tmp_path / "chat"
    llm.kv_save(str(path))
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    path.write_bytes(
        {
            "cut": data[:middle],
            "flip": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
            "grow": data + b"x",
            "empty": b"",
        }[damage]
    )
    before = state(llm)
    with pytest.raises(BadInput):
        llm.kv_load(str(path))
    assert state(llm) == before


# ---- prefixes and text


def answer(llm, prompt: str) -> str:
    return llm.create_completion(prompt, max_tokens=12, temperature=0.0)["choices"][0]["text"]


def test_the_same_prompt_gives_the_same_text_again(tiny):
    llm = load(tiny("llama-gqa"), kv_ratio=0.3)
    assert answer(llm, PROMPT) == answer(llm, PROMPT)


def test_another_prompt_with_the_same_beginning_gives_the_text_of_a_fresh_start(tiny):
    used, fresh = (load(tiny("llama-gqa"), kv_ratio=0.3) for _ in range(2))
    answer(used, PROMPT + OTHER)
    assert answer(used, PROMPT + PROMPT) == answer(fresh, PROMPT + PROMPT)


def test_a_conversation_goes_on_where_its_reply_would_be_cut_into_other_tokens(tiny):
    """Here "t" ends the prompt and "h" begins the reply; in the next turn's text they are one
    token.
    """
    llm = load(tiny("llama-gqa"), kv_ratio=0.3)
    prompt, reply = llm.tokenize((PROMPT + " t").encode()), llm.tokenize(b"h", add_bos=False)
    llm.eval(prompt)
    llm.eval(reply)
    before, evaluated = state(llm)[2], llm.n_evaluated
    text = PROMPT + " the rain"
    assert llm.tokenize(text.encode())[: len(prompt)] != prompt
    answer(llm, text)
    assert llm.n_evaluated - evaluated < 30  # not the prompt
    assert all(
        now[: len(rows)] == rows for (now, _), (rows, _) in zip(state(llm)[2], before, strict=True)
    )


def test_after_a_reset_nothing_is_left(tiny):
    used, fresh = (load(tiny("llama-gqa"), kv_ratio=0.3) for _ in range(2))
    answer(used, OTHER)
    used.reset()
    assert used.kv_stats().n_seen == 0
    assert answer(used, PROMPT) == answer(fresh, PROMPT)


def test_a_ratio_may_change_between_prompts(tiny, text):
    llm, fresh = load(tiny("llama-gqa"), kv_ratio=0.5), load(tiny("llama-gqa"), kv_ratio=0.2)
    llm.eval(list(text(N_PROMPT)))
    llm.kv_set(ratio=0.2)
    llm.reset()
    for each in (llm, fresh):
        each.eval(list(text(N_PROMPT)))
    assert state(llm) == state(fresh)


@pytest.mark.parametrize("ratio", [1.0, 0.3])
def test_streaming_stop_words_grammar_and_logprobs_work(tiny, ratio):
    from edgekv.llama_cpp import LlamaGrammar

    llm = load(tiny("llama-gqa"), kv_ratio=ratio, logits_all=True)
    whole = answer(llm, PROMPT)
    streamed = "".join(
        part["choices"][0]["text"]
        for part in llm.create_completion(PROMPT, max_tokens=12, temperature=0.0, stream=True)
    )
    assert streamed == whole and len(whole) > 2
    stop = whole[len(whole) // 2]
    assert (
        llm.create_completion(PROMPT, max_tokens=12, temperature=0.0, stop=[stop])["choices"][0][
            "text"
        ]
        == whole.split(stop)[0]
    )
    grammar = LlamaGrammar.from_string('root ::= [0-9]+ "."', verbose=False)
    digits = llm.create_completion(PROMPT, max_tokens=12, temperature=0.0, grammar=grammar)[
        "choices"
    ][0]["text"]
    assert digits.rstrip(".").isdigit()
    logprobs = llm.create_completion(PROMPT, max_tokens=4, temperature=0.0, logprobs=3)["choices"][
        0
    ]["logprobs"]
    assert len(logprobs["tokens"]) >= 4 and all(value <= 0 for value in logprobs["token_logprobs"])


def test_chat_completion_uses_the_template(tiny):
    llm = load(tiny("llama-gqa"), kv_ratio=0.3)
    reply = llm.create_chat_completion(
        messages=[{"role": "user", "content": PROMPT}], max_tokens=8, temperature=0.0
    )
    assert reply["choices"][0]["message"]["role"] == "assistant"
    assert llm.kv_stats().n_kept < 0.5 * llm.kv_stats().n_seen


def test_nothing_is_fetched(tiny, monkeypatch):
    def refuse(*_: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    llm = load(tiny("llama-gqa"), kv_ratio=0.3)
    assert answer(llm, PROMPT) is not None and np.isfinite(logits(llm)).all()


def test_a_tail_that_could_not_be_compressed_is_as_before(tiny, text, monkeypatch):
    llm = load(tiny("llama-gqa"), kv_ratio=0.3, kv_tail=40)
    llm.eval(list(text(300)))
    feed(llm, text(40, seed=1))

    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine, "prefill", fail)
    with pytest.raises(KeyboardInterrupt):
        llm.eval([7])
    monkeypatch.undo()
    assert llm.engine.store.memory().n_past == llm.n_tokens == 340
    feed(llm, text(5, seed=2))
    assert llm.engine.store.memory().n_past == 345


# ---- a chat's turns


def chat_about(llm) -> tuple[Conversation, int]:
    """A conversation after one question about a document, and the tokens that were read until
    then.
    """
    talk = Conversation(llm, {"max_tokens": 8, "temperature": 0.0})
    list(talk.ask("who ran?", Document("doc", PROMPT, 0)))
    return talk, llm.n_evaluated


def test_another_question_about_a_document_reads_only_the_question(tiny):
    talk, n = chat_about(load(tiny("llama-gqa"), kv_ratio=0.3))
    assert n > 100
    list(talk.ask("what rang?"))
    assert talk.llm.n_evaluated - n < 60


@pytest.mark.parametrize("more", [[], ["what rang?"]])
def test_a_reply_is_written_anew_without_the_document_being_read_again(tiny, more):
    talk, _ = chat_about(load(tiny("llama-gqa"), kv_ratio=0.3))
    for question in more:
        list(talk.ask(question))
    reply, n = talk.messages[-1], talk.llm.n_evaluated
    list(talk.regenerate())
    assert (
        talk.llm.n_evaluated - n < 60
        and talk.messages[-1] == reply
        and len(talk.messages) == 2 + 2 * len(more)
    )


@pytest.mark.parametrize("ratio", [1.0, 0.3])
def test_a_cancelled_document_waits_and_is_read_once(tiny, ratio):
    llm = load(tiny("llama-gqa"), kv_ratio=ratio)
    talk = Conversation(llm, {"max_tokens": 8, "temperature": 0.0})
    llm.kv_progress = lambda done, total: talk.stop()
    with pytest.raises(Cancelled, match="begins with doc"):
        list(talk.ask("who ran?", Document("doc", PROMPT, 0)))
    llm.kv_progress = None
    assert (
        talk.messages == []
        and llm.n_tokens == 0
        and [str(d) for d in talk.documents] == ["doc (0 tokens)"]
    )
    list(talk.ask("who sang?"))
    assert talk.documents == [] and PROMPT in text_of(talk.messages[0])


def test_a_broken_template_leaves_plain_completion(tiny, tmp_path):
    data = tiny("llama-gqa").read_bytes()
    assert data.count(CHAT_TEMPLATE.encode()) == 1
    (tmp_path / "model.gguf").write_bytes(
        data.replace(CHAT_TEMPLATE.encode(), b"{% for".ljust(len(CHAT_TEMPLATE)))
    )
    llm = load(tmp_path / "model.gguf")
    assert llm.template_error and answer(llm, PROMPT)
    with pytest.raises(BadInput, match="template is broken"):
        llm.create_chat_completion(messages=[{"role": "user", "content": "a"}])
