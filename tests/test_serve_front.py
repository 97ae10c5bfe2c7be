"""Text at the front of the first message that changes from request to request."""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import patch

import pytest

from edgekv import Llama
from edgekv.chat.template import Chat
from edgekv.serve.options import ServeOptions
from edgekv.serve.pattern import Pattern
from edgekv.serve.prompts import Prompts
from tests.cli import refused, typed
from tests.serving import post, serving

DATE = r"Date: [^\n]*\n"
RULES = "be an ant and tell of the rain in the air " * 12
CACHES: dict[str, dict[str, Any]] = {
    "compressed": dict(kv_ratio=0.3, kv_method="snapkv", n_ubatch=64),
    "whole": {},
}


def ask(url: str, system: Any, *turns: str) -> tuple[str, int, int]:
    """(the answer, tokens of the prompt, those that were not read again)."""
    messages = [{"role": "system", "content": system}]
    messages += [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(turns)]
    body = {"messages": messages, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    done = post(f"{url}/v1/chat/completions", json=body).json()
    usage = done["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return done["choices"][0]["message"]["content"], usage["prompt_tokens"], cached


@pytest.mark.parametrize("name", ["llama-gqa", "gemma3"])
@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
def test_what_changes_at_the_front_is_not_compared(tiny, name, cache):
    with serving(tiny(name), ServeOptions(ignore_prefix=DATE), **cache) as (url, _):
        answer, n, cached = ask(url, f"Date: 1 May\n{RULES}", "who is it?")
        assert cached == 0
        # the text of the first request stands in, so the answer is the one to it
        again, n_again, cached = ask(url, f"Date: 22 November 2026\n{RULES}", "who is it?")
        assert (again, n_again) == (answer, n) and cached > n - 60
        _, n, cached = ask(url, f"Date: 3\n{RULES}", "who is it?", answer, "and the sun?")
        assert cached > n - 60
        _, n, cached = ask(url, f"Date: 4\n{RULES}", "what is on the island?")
        assert cached > n - 60


def test_without_the_option_it_is_compared(tiny):
    with serving(tiny("llama-gqa"), **CACHES["whole"]) as (url, _):
        ask(url, f"Date: 1 May\n{RULES}", "who is it?")
        assert ask(url, f"Date: 22 November 2026\n{RULES}", "who is it?")[2] < 20


@pytest.fixture(scope="module")
def url(tiny):
    with serving(tiny("llama-gqa"), ServeOptions(ignore_prefix=DATE)) as (url, _):
        yield url


def test_only_the_front_of_the_first_message_is_left_out(url):
    ask(url, f"hear. Date: 1 May\n{RULES}", "who is it?")
    assert ask(url, f"hear. Date: 22 June 2026\n{RULES}", "who is it?")[2] < 20
    ask(url, "a", f"Date: 1 May\n{RULES}")
    assert ask(url, "a", f"Date: 22 June 2026\n{RULES}")[2] < 20


def test_another_text_behind_it_is_read(url):
    first = ask(url, f"Date: 5 May\n{RULES}", "who is it?")[0]
    other = ask(url, f"Date: 6 May\nan inn on the island {RULES}", "who is it?")
    assert other[2] < 20 and other[0] != first


def test_the_first_part_of_several_is_the_front(url):
    def parts(date: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": x} for x in (f"Date: {date}\nthe sun {RULES}", RULES)]

    _, n, _ = ask(url, parts("7 May"), "who is it?")
    assert ask(url, parts("a day in June"), "who is it?")[1:] == (n, n - 1)


@pytest.mark.parametrize("as_list", [False, True])
def test_anthropics_system_message_is_the_first(url, as_list):
    def cached(date: str) -> int:
        system: Any = [f"Date: {date}\n", f"the tale {as_list} {RULES}"]
        blocks = [{"type": "text", "text": text} for text in system]
        body = {
            "system": blocks if as_list else "".join(system),
            "messages": [{"role": "user", "content": "who is it?"}],
            "max_tokens": 2,
        }
        return post(f"{url}/v1/messages", json=body).json()["usage"]["cache_read_input_tokens"]

    assert cached("8 May") < 20
    assert cached("9 November 2026") > 100


def test_the_worker_makes_no_prompt_of_a_text_that_is_known(tiny):
    with Llama(str(tiny("llama-gqa")), n_ctx=2048, verbose=False) as llm:
        prompts = Prompts(llm, changing=Pattern(DATE))
        for day in ("1 May", "2 June"):
            messages = [{"role": "system", "content": f"Date: {day}\n{RULES}"}]
            front = prompts.of(Chat([*messages, {"role": "user", "content": "hi"}])).front
        with patch.object(prompts.template, "prompt", side_effect=AssertionError):
            assert front.again("Date: 1 May\n").front.text == "Date: 1 May\n"


def test_an_expression_for_everything_takes_nothing_of_others(tiny):
    with serving(tiny("llama-gqa"), ServeOptions(ignore_prefix=r"[\s\S]*")) as (url, _):
        ask(url, "the secret of the island is an ant", "who is it?")
        tokens = ask(url, "the air", "who is it?")[1]
    with serving(tiny("llama-gqa")) as (url, _):
        assert ask(url, "the air", "who is it?")[1] == tokens


def test_an_expression_that_takes_for_ever_is_given_up(tiny):
    with serving(tiny("llama-gqa"), ServeOptions(ignore_prefix=r"(a|aa)+$")) as (url, _):
        begin = time.monotonic()
        for _ in range(2):
            assert ask(url, "a" * 900 + "b", "who is it?")[0]
        assert time.monotonic() - begin < 20


@pytest.mark.parametrize("text", ["(", "a{2,1}", "(?P<x", "[z-a]"])
def test_what_is_no_expression_is_refused_in_one_line(text):
    said = refused(typed("serve -m /no/model --port 0 --ignore-prefix", text))
    assert "regular expression" in said and "/no/model" not in said
