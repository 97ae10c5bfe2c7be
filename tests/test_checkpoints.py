"""Messages in parts, and saved states: the last turn is taken again without reading its prompt
again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgekv import BadInput, Cancelled
from edgekv.chat import parts
from tests import lib, models
from tests.engine import MAX_NMSE, load, logits, positions

DOCUMENT = "the rain in the air is an art and the sun is on the ear " * 20
LONG = (
    "what is in the text that stands above this line and who has been there before it was so " * 2
)
SHORT = "who?"


def talker(path: Any, **options: Any) -> Any:
    return load(path, **{"kv_ratio": 0.3, "n_ctx": 4096, "kv_tail": 128, **options})


def message(*texts: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": text} for text in texts]}


def said(llm: Any, messages: list[dict[str, Any]], n: int = 6) -> tuple[str, int]:
    """The reply, and how many tokens of the prompt were evaluated for it."""
    before = llm.n_evaluated
    done = llm.create_chat_completion(
        messages, max_tokens=n, temperature=0, logit_bias={models.EOS: -100.0, 5: -100.0}
    )
    n_reply = done["usage"]["completion_tokens"]
    return done["choices"][0]["message"]["content"], llm.n_evaluated - before - max(n_reply - 1, 0)


def assert_same_document(llm: Any, other: Any) -> None:
    """The same rows are kept, and those of the compressed part have the same bits."""
    store, n = llm.engine.store, llm.engine.store.memory().boundary
    assert n == other.engine.store.memory().boundary > 500
    for il, heads in enumerate(zip(positions(llm), positions(other), strict=True)):
        for k, (pos, expected) in enumerate(zip(*heads, strict=True)):
            assert np.array_equal(pos, expected)
            for x, y in zip(store.rows(il, k), other.engine.store.rows(il, k), strict=True):
                assert np.array_equal(x[pos < n], y[pos < n])


def n_tokens(llm: Any, text: str) -> int:
    return len(llm.tokenize(text.encode(), add_bos=False))


# ---- parts


def test_text_parts_are_one_text_with_line_breaks():
    assert parts.joined([message("a", "b"), {"role": "assistant", "content": "c"}]) == (
        [{"role": "user", "content": "a\nb"}, {"role": "assistant", "content": "c"}],
        ["a"],
    )


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": "x"},
        "text",
        None,
        {"type": "text"},
        {"type": "text", "text": 5},
    ],
)
def test_a_part_that_is_no_text_is_refused(tiny, part):
    with pytest.raises(BadInput, match="no text"):
        talker(tiny("llama-gqa")).create_chat_completion([{"role": "user", "content": [part]}])


@given(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=6), st.data())
def test_cuts_lie_at_the_last_token_that_ends_within_a_part(texts, data):
    text = "\n".join(texts)
    ends = sorted(
        data.draw(st.sets(st.integers(1, len(text.encode())), max_size=10)) | {len(text.encode())}
    )
    pieces = [text.encode()[a:b] for a, b in zip([0, *ends], ends)]
    for n in parts.positions(texts[:-1], range(len(pieces)), pieces.__getitem__):
        assert 0 < n < len(pieces)
        assert any(
            len(b"".join(pieces[:n])) <= len("\n".join(texts[:i]).encode())
            for i in range(1, len(texts))
        )


def test_the_text_of_each_token_is_looked_up_once():
    asked = []
    found = parts.positions(
        ["ab" * 500], [0, 1] * 600, lambda t: asked.append(t) or b"ab"[t : t + 1]
    )
    assert found == [1000] and sorted(asked) == [0, 1]


# ---- turns that are taken again


@pytest.mark.parametrize("question", [SHORT, LONG])
@pytest.mark.parametrize("model", ["llama-gqa", "gemma3"])
def test_another_question_about_a_document_reads_only_the_question(tiny, model, question):
    llm, other = talker(tiny(model)), talker(tiny(model))
    first, n_first = said(llm, [message(DOCUMENT, question)])
    again, n_again = said(llm, [message(DOCUMENT, question)])
    assert again == first
    assert n_first > 500 and n_again <= n_tokens(llm, question) + 8
    third, n_third = said(llm, [message(DOCUMENT, "is it so? " + question)])
    assert n_third <= n_tokens(llm, question) + 20
    assert third == said(other, [message(DOCUMENT, "is it so? " + question)])[0], (
        "as if it had been the first question"
    )
    assert_same_document(llm, other)
    # the question's sums have another order, and then a rounding to f16 may fall the other way
    assert lib.nmse(logits(llm), logits(other)) < MAX_NMSE["f16"]


@pytest.mark.parametrize(
    "method", ["snapkv", "h2o", "d2o", "cake", "score=keydiff,budget=pooled,merge=summary"]
)
def test_a_later_turn_is_taken_again_with_the_same_result(tiny, method):
    llm = talker(tiny("llama-gqa"), kv_method=method)
    talk = [message(DOCUMENT, SHORT)]
    reply, _ = said(llm, talk)
    talk += [{"role": "assistant", "content": reply}, message(LONG)]
    once, _ = said(llm, talk)
    one = logits(llm)
    twice, n_twice = said(llm, talk)
    assert once == twice and lib.nmse(logits(llm), one) < 1e-9
    assert n_twice <= n_tokens(llm, LONG) + n_tokens(llm, reply) + 8


def test_an_answer_so_long_that_it_was_compressed_is_written_again(tiny):
    llm = talker(tiny("llama-gqa"))
    talk = [message(DOCUMENT, SHORT)]
    once, _ = said(llm, talk, 400)
    assert llm.kv_stats().n_seen > 900
    twice, n_twice = said(llm, talk, 400)
    assert once == twice and n_twice <= n_tokens(llm, SHORT) + 8


def test_states_cost_what_is_shown_and_can_be_switched_off(tiny):
    llm, off = talker(tiny("llama-gqa")), talker(tiny("llama-gqa"), kv_checkpoints=False)
    for x in (llm, off):
        said(x, [message(DOCUMENT, LONG)])
    stats = llm.kv_stats()
    assert (
        0 < stats.n_bytes_checkpoints < 3 * stats.n_bytes_used
        and off.kv_stats().n_bytes_checkpoints == 0
    )
    assert said(off, [message(DOCUMENT, LONG)])[1] > 500
    llm.reset()
    assert llm.kv_stats().n_bytes_checkpoints == 0


def test_a_limit_for_the_memory_holds_with_them(tiny):
    llm = talker(tiny("llama-gqa"), kv_ratio=1.0, kv_memory="400KiB", kv_tail=64)
    for i in range(3):
        said(llm, [message(DOCUMENT, LONG * (i + 1))], 80)
        stats = llm.kv_stats()
        assert stats.n_bytes + stats.n_bytes_checkpoints <= 400 * 1024


def test_new_tokens_that_stay_whole_leave_room_for_them(tiny, text):
    limit = 4000000
    llm = talker(tiny("llama-gqa"), kv_ratio=1.0, kv_memory=limit, kv_tail=64)
    said(llm, [message(DOCUMENT, LONG)])
    assert llm.kv_stats().n_bytes_checkpoints > 0
    most = 0
    for token in text(2500, seed=1):
        llm.eval([token])
        stats = llm.kv_stats()
        most = max(most, stats.n_bytes + stats.n_bytes_checkpoints)
    assert 0.7 * limit < most <= limit


@pytest.mark.parametrize("history", [False, True])
def test_a_prompt_that_is_cancelled_in_its_second_part_leaves_no_trace(tiny, history):
    llm, other = talker(tiny("llama-gqa")), talker(tiny("llama-gqa"))
    talk = []
    for x in (llm, other):
        talk = [message(LONG)]
        if history:
            reply, _ = said(x, talk)
            talk += [{"role": "assistant", "content": reply}]
    before = llm.n_tokens if history else 0
    seen = []

    def progress(done: int, total: int) -> None:
        seen.append(done)
        assert done <= total and seen == sorted(seen)
        if done > 0.9 * total:
            llm.kv_cancel()

    llm.kv_progress = progress
    with pytest.raises(Cancelled):
        said(llm, [*talk, message(DOCUMENT, LONG)])
    llm.kv_progress = None
    assert before - 8 <= llm.n_tokens <= before, "less what is cut into other tokens"
    assert llm.n_tokens == llm.kv_stats().n_seen
    talk += [message(DOCUMENT, LONG)]
    assert said(llm, talk)[0] == said(other, talk)[0]
    assert lib.nmse(logits(llm), logits(other)) < 1e-9
