"""llama-server's own path, field by field: prompts of all forms, chunks, probabilities."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edgekv.serve.options import ServeOptions
from tests.serving import get, post, serving


@pytest.fixture(scope="module")
def url(tiny):
    options = ServeOptions(alias="tiny", parallel=2)
    with serving(tiny("llama-gqa"), options, n_ctx=256) as (url, _):
        yield url


def said(url: str, **more: Any) -> Any:
    """The answer to a short greedy request."""
    body = {"prompt": "abc", "temperature": 0, "n_predict": 6, "ignore_eos": True, **more}
    reply = post(f"{url}/completion", json=body)
    assert reply.status_code == 200, reply.text
    if not body.get("stream"):
        return reply.json()
    lines = [line for line in reply.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def refusal(url: str, path: str = "/completion", **body: Any) -> str:
    reply = post(f"{url}{path}", json=body)
    assert reply.status_code == 400, reply.text
    return str(reply.json()["error"]["message"])


def tokens_of(url: str, text: str, add_special: bool = True) -> list[int]:
    body = {"content": text, "add_special": add_special}
    return list(post(f"{url}/tokenize", json=body).json()["tokens"])


# ---- prompts


def test_several_prompts_have_a_list_of_answers(url):
    alone = [said(url, prompt=prompt)["content"] for prompt in ("abc", "the")]
    both = said(url, prompt=["abc", tokens_of(url, "the")])
    assert [one["content"] for one in both] == alone
    assert [one["index"] for one in both] == [0, 1]


def test_several_prompts_are_streamed_with_their_index(url):
    events = said(url, prompt=["abc", "the"], stream=True)
    for i, prompt in enumerate(("abc", "the")):
        own = [event for event in events if event["index"] == i]
        assert "".join(x["content"] for x in own) == said(url, prompt=prompt)["content"]
        assert [x["stop"] for x in own] == [False] * (len(own) - 1) + [True]


@pytest.mark.parametrize("path", ["/completion", "/v1/completions"])
def test_a_prompt_may_mix_texts_and_tokens(url, path):
    begin, more = tokens_of(url, "abc"), tokens_of(url, " def", add_special=False)
    body = {"temperature": 0, "n_predict": 4}
    by_tokens = post(f"{url}{path}", json={**body, "prompt": [*begin, *more, *more]}).json()
    for mixed in ([*begin, " def", *more], ["abc", *more, " def"], [["abc", *more, " def"]]):
        by_mix = post(f"{url}{path}", json={**body, "prompt": mixed}).json()
        for one, other in ((by_tokens, by_mix), (by_mix, by_tokens)):
            assert one.get("content") == other.get("content") and one.keys() == other.keys()
        assert by_mix.get("choices") == by_tokens.get("choices")
        assert by_mix.get("tokens_evaluated") == by_tokens.get("tokens_evaluated")


def test_a_prompt_may_be_an_object_with_a_text(url):
    assert said(url, prompt={"prompt_string": "abc"})["content"] == said(url)["content"]
    both = said(url, prompt=[{"prompt_string": "abc"}, "the"])
    assert [one["tokens_evaluated"] for one in both] == [
        len(tokens_of(url, text)) for text in ("abc", "the")
    ]


@pytest.mark.parametrize(
    "prompt, reason",
    [
        (None, "prompt"),
        (7, "prompt"),
        ([], "1 to"),
        (["a", {}], "prompt"),
        ([1, [2]], "prompt"),
        ([1, True], "prompt"),
        ([10**30], "token"),
        ([-1, "a"], "token"),
        ([["a"], 1.5], "prompt"),
        ({"prompt_string": "a", "multimodal_data": ["aGk="]}, "pictures"),
    ],
)
def test_another_prompt_is_refused(url, prompt, reason):
    assert reason in refusal(url, prompt=prompt)


@pytest.mark.parametrize("name", ["n_indent", "t_max_predict_ms"])
@pytest.mark.parametrize("path", ["/completion", "/v1/chat/completions"])
def test_a_field_that_is_not_applied_is_refused_unless_it_is_off(url, name, path):
    body = {"prompt": "abc", "messages": [{"role": "user", "content": "abc"}], "n_predict": 1}
    assert name in refusal(url, path, **body, **{name: 5})
    assert post(f"{url}{path}", json={**body, name: -1}).status_code == 200
    assert "--lora" in refusal(url, path, **body, lora=[{"id": 0, "scale": 0.5}])


# ---- what an answer says


def test_a_whole_answer_says_what_llama_servers_does(url):
    answer = said(url, prompt="abc def")
    assert answer["prompt"].endswith("abc def") and answer["stop"] and not answer["truncated"]
    assert answer["id_slot"] == -1 and answer["tokens"] == []
    settings = answer["generation_settings"]
    assert settings["ignore_eos"] and not settings["stream"] and settings["n_keep"] == 0
    assert not settings["timings_per_token"] and not settings["post_sampling_probs"]
    assert {one["bias"] for one in settings["logit_bias"]} == {None}


def test_a_full_context_ends_an_answer_and_says_so(url):
    answer = said(url, n_predict=-1)
    assert answer["truncated"] and answer["stop_type"] == "limit"
    assert answer["tokens_evaluated"] + answer["tokens_predicted"] == 256


def test_each_token_is_a_chunk_with_its_number(url):
    tokens = said(url, return_tokens=True)["tokens"]
    *chunks, last = said(url, stream=True, n_probs=2)
    assert [token for chunk in chunks for token in chunk["tokens"]] == tokens
    assert [chunk["tokens_predicted"] for chunk in chunks] == [1, 2, 3, 4, 5, 6]
    for chunk in chunks:
        found = [one["id"] for one in chunk["completion_probabilities"]]
        assert found == chunk["tokens"]
        assert chunk["tokens_evaluated"] == last["tokens_evaluated"] and "timings" not in chunk
    assert last["tokens"] == [] and last["content"] == "" and last["generation_settings"]["stream"]


def test_tokens_of_a_text_that_ends_the_answer_are_streamed(url):
    whole = said(url, return_tokens=True, n_predict=8)
    stop = whole["content"][4:6]
    events = said(url, stream=True, n_predict=8, stop=[stop])
    text = "".join(event["content"] for event in events)
    assert text == whole["content"].partition(stop)[0]
    tokens = [token for event in events for token in event["tokens"]]
    assert tokens == whole["tokens"][: len(tokens)]
    assert len(tokens) == events[-1]["tokens_predicted"]


def test_a_request_may_name_the_fields_that_it_wants(url):
    wanted = ["content", "generation_settings/n_predict", "prompt", "nothing/such"]
    answer = said(url, response_fields=wanted)
    assert list(answer) == ["content", "generation_settings/n_predict", "prompt"]
    assert answer["generation_settings/n_predict"] == 6
    assert "generation_settings" in said(url, response_fields=[])
    assert list(said(url, stream=True, response_fields=["stop"])[-1]) == ["stop"]


@pytest.mark.parametrize("stream", [False, True])
def test_probabilities_may_be_those_behind_the_samplers(url, stream):
    more = {"n_probs": 5, "post_sampling_probs": True, "temperature": 1, "top_k": 3, "min_p": 0}
    answer = said(url, **more, stream=stream, seed=2)
    chunks = [one for one in answer if not one["stop"]] if stream else [answer]
    tokens = [token for one in chunks for token in one["completion_probabilities"]]
    assert len(tokens) == 6
    for token in tokens:
        best = token["top_probs"]
        assert 0 < token["prob"] <= 1 and "logprob" not in token
        assert len(best) == 3 and sum(one["prob"] for one in best) == pytest.approx(1)
        assert [one["prob"] for one in best] == sorted([one["prob"] for one in best])[::-1]
        assert token["id"] in [one["id"] for one in best]


def test_probabilities_of_a_chat_may_be_those_behind_the_samplers(url):
    body = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 3, "logprobs": True}
    body |= {"top_logprobs": 2, "post_sampling_probs": True, "temperature": 0}
    said = post(f"{url}/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]["content"]
    assert said and all(one["prob"] == 1.0 and len(one["top_probs"]) == 1 for one in said)


def test_the_adaptive_sampler_is_applied(url):
    usual = said(url, temperature=1, seed=4, n_predict=12)["content"]
    more = {"temperature": 1, "seed": 4, "n_predict": 12}
    settings = {"adaptive_target": 0.01, "adaptive_decay": 0.5}
    answer = said(url, **more, **settings, samplers=["top_k", "adaptive_p"])
    plain = said(url, **more, samplers=["top_k", "adaptive_p"])
    assert answer["content"] != plain["content"] and usual
    assert answer["generation_settings"]["adaptive_target"] == 0.01


# ---- timings


@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions"])
def test_timings_come_with_each_token_where_they_are_asked_for(url, path):
    body = {"prompt": "abc", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 5}
    body |= {"stream": True, "timings_per_token": True, "ignore_eos": True, "temperature": 0}
    text = post(f"{url}{path}", json=body).text
    events = [json.loads(x[6:]) for x in text.splitlines() if x.startswith("data: {")]
    numbers = [event["timings"]["predicted_n"] for event in events if "timings" in event]
    assert numbers == sorted(numbers) and numbers[-1] == 5
    assert len(numbers) >= len(events) - 1  # a chat's first chunk has none


def test_the_first_token_costs_no_step(url):
    timings = said(url, n_predict=1)["timings"]
    assert timings["predicted_per_second"] == timings["predicted_per_token_ms"] == 0.0
    timings = said(url, n_predict=6, cache_prompt=False)["timings"]
    assert timings["predicted_per_second"] == pytest.approx(5e3 / timings["predicted_ms"])
    assert timings["predicted_per_token_ms"] == pytest.approx(timings["predicted_ms"] / 5)
    assert timings["prompt_per_token_ms"] > 0 and None not in timings.values()


def test_timings_come_with_the_progress_of_a_prompt(url):
    body = {"prompt": "the rain in the air " * 8, "stream": True, "return_progress": True}
    chunks = [x for x in said(url, **body, timings_per_token=True) if "prompt_progress" in x]
    first = chunks[0]["timings"]
    assert first["prompt_n"] == first["predicted_n"] == 0 and first["prompt_ms"] == 0.0
    assert chunks[-1]["timings"]["prompt_ms"] > 0


# ---- the server


def test_every_answer_says_what_wrote_it(url):
    print_of = get(f"{url}/props").json()["build_info"]
    assert print_of.startswith("b")
    chat = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 2}
    for path in ("/v1/completions", "/v1/chat/completions"):
        body = {"prompt": "abc", **chat}
        assert post(f"{url}{path}", json=body).json()["system_fingerprint"] == print_of
        lines = post(f"{url}{path}", json={**body, "stream": True}).text.splitlines()
        events = [json.loads(x[6:]) for x in lines if x.startswith("data: {")]
        assert {event["system_fingerprint"] for event in events} == {print_of}
