"""The server's page in a real browser."""

from __future__ import annotations

import time

import pytest

from edgekv.chat.sampler import Sampling
from edgekv.commands.load import end_tokens
from edgekv.serve.answer import Answer
from edgekv.serve.options import ServeOptions
from tests.engine import load
from tests.serving import serving, until

pytest.importorskip("websockets")
from tests import browser  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser.browser() is None, reason="no browser is here"),
]
ANSWER = "[...document.querySelectorAll('article:not(.user)')].at(-1)"
IS_DONE = "document.querySelector('#send').textContent === 'Send'"
CACHE = dict(kv_ratio=0.3, kv_method="snapkv", kv_min_tokens=64)


@pytest.fixture(scope="module")
def endless(tiny) -> Sampling:
    """Answers go on to their limit."""
    with load(tiny("llama-gqa")) as llm:
        ends = end_tokens(llm)
    return Sampling(temperature=0, logit_bias=dict.fromkeys(ends, float("-inf")))


def test_a_message_is_answered_looked_at_and_stopped(tiny, endless, tmp_path):
    (tmp_path / "rain.txt").write_text("the rain in the air is an art " * 40)
    options = ServeOptions(sampling=endless, max_tokens=12)
    with serving(tiny("llama-gqa"), options, **CACHE) as (url, server):
        with browser.opened(url, tmp_path / "browser") as page:
            page.until("document.title.endsWith('.gguf')")
            page.give_file("#pick", tmp_path / "rain.txt")
            page.until("document.querySelector('#files').textContent.includes('tokens')")
            page.click("#text")
            page.type("who is it?")
            page.press("Enter", 13)
            page.until(f"{IS_DONE} && document.querySelector('.cost meter')")
            assert "rain.txt" in page.value("document.querySelector('.user').textContent")
            assert page.value(f"{ANSWER}.querySelector(':scope > div').textContent.length > 0")
            assert "MiB" in page.value(f"{ANSWER}.querySelector('.cost').textContent")

            page.click(".look")
            page.until("document.querySelectorAll('.kept div b').length > 300")
            whole = page.value("document.querySelector('.kept div').textContent")
            assert "the rain in the air" in whole and "who is it?" in whole
            colours = "new Set([...document.querySelectorAll('.kept div b')].map("
            colours += "(one) => getComputedStyle(one).backgroundColor)).size"
            assert page.value(colours) > 3
            page.value(
                "{const s = document.querySelector('.kept select'); s.value = '1';"
                " s.dispatchEvent(new Event('change'))}"
            )
            page.until("document.querySelector('.kept').textContent.includes('by all 2 heads')")
            assert page.value("document.querySelector('.kept div').textContent") == whole
            assert page.faults == []


@pytest.fixture
def slow_model(monkeypatch):
    """A tiny model fills its window in a second: before a busy machine's browser has clicked."""
    step = Answer.step

    def slowly(answer: Answer, is_current: bool) -> bool:
        time.sleep(0.03)
        return step(answer, is_current)

    monkeypatch.setattr(Answer, "step", slowly)


@pytest.mark.parametrize("how", ["button", "key"])
def test_an_answer_is_stopped(tiny, endless, slow_model, tmp_path, how):
    with serving(tiny("llama-gqa"), ServeOptions(sampling=endless)) as (url, server):
        with browser.opened(url, tmp_path) as page:
            page.click("#text")
            page.type("abc")
            page.click("#send")
            page.until(f"{ANSWER}?.querySelector(':scope > div').textContent.length > 3")
            assert page.value("document.querySelector('#send').textContent") == "Stop"
            assert page.value("document.querySelector('.look')") is None
            if how == "button":
                page.click("#send")
            else:
                page.press("Escape", 27)
            page.until(f"{IS_DONE} && {ANSWER}.textContent.endsWith('stopped')")
            until(lambda: not server.worker.active())
            page.type("def")
            page.press("Enter", 13)  # the next message is answered
            page.until("document.querySelectorAll('article').length === 4")
            page.click("#fresh")
            page.until(f"{IS_DONE} && document.querySelectorAll('article').length === 0")
            assert page.faults == []


def test_a_key_is_asked_for(tiny, endless, tmp_path):
    options = ServeOptions(api_keys=("secret",), sampling=endless, max_tokens=4)
    with serving(tiny("llama-gqa"), options) as (url, _), browser.opened(url, tmp_path) as page:
        page.click("#text")
        page.type("abc")
        page.press("Enter", 13)
        page.until("!document.querySelector('#lock').hidden")
        page.until(IS_DONE)
        assert page.value("document.querySelector('#text').value") == "abc", "nothing is lost"
        page.click("#key")
        page.type("secret")
        page.click("#enter")
        page.click("#send")
        page.until(f"{IS_DONE} && {ANSWER}.querySelector('.cost')")
        assert page.value("document.querySelector('#lock').hidden")
