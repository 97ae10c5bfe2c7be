"""Who is answered when: turns, places to wait, stops, and the end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import threading
from dataclasses import replace
from typing import Any

import click
import httpx
import openai
import pytest
from click.testing import CliRunner

from edgekv import commands
from edgekv.chat.sampling import Sampling
from edgekv.chat.template import Syntax
from edgekv.commands.serve import serve_options
from edgekv.conversation.pool import Conversations
from edgekv.errors import EdgeKVError
from edgekv.serve.conversations import ServerConversations
from edgekv.serve.errors import ApiError
from edgekv.serve.events import Done, Progress, Written
from edgekv.serve.job import Job
from edgekv.serve.options import ServeOptions
from edgekv.serve.queue import FairQueue
from edgekv.serve.request import Prompt, Request
from edgekv.serve.worker import Worker
from tests.engine import load
from tests.models import EOS
from tests.serving import PATIENCE, delete, get, post, serving, started, stream, until


def test_clients_take_turns_and_the_requests_of_one_do_not():
    queue = FairQueue(10)
    for client, item in [("a", 1), ("a", 2), ("a", 3), ("b", 4), ("c", 5), ("b", 6)]:
        queue.put(client, item)
    assert [queue.get() for _ in range(7)] == [1, 4, 5, 2, 6, 3, None]


@pytest.mark.parametrize("client", ["a", None])
def test_a_client_can_be_passed_over(client):
    queue = FairQueue(2)
    queue.put(client, 1)
    assert queue.get(but=[client]) is None
    queue.put("b", 2)
    assert [queue.get(but=[client]), queue.get(but=["b"]), queue.get()] == [2, 1, None]


def test_a_queue_is_bounded_and_gives_places_back():
    queue = FairQueue(2)
    queue.put("a", 1)
    queue.put("b", 2)
    with pytest.raises(ApiError, match="are waiting"):
        queue.put("c", 3)
    assert queue.remove(1) and not queue.remove(1)
    queue.put("c", 3)
    assert len(queue) == 2 and [queue.get(), queue.get()] == [2, 3]


class Log:
    """Takes a job's events."""

    def __init__(self) -> None:
        self.events, self.over = [], threading.Event()

    def __call__(self, event) -> None:
        self.events.append(event)
        if isinstance(event, (Done, ApiError)):
            self.over.set()

    def wait(self):
        assert self.over.wait(PATIENCE)
        return self.events[-1]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Written))


@pytest.fixture
def working(tiny):
    """working(n_parallel, n_queue, cache_ram, **arguments of Llama) -> (worker, llm), which are
    ended.
    """
    made = []

    def make(n_parallel=1, n_queue=4, cache_ram=None, **arguments):
        llm = load(tiny("llama-gqa"), n_ctx=1024, **arguments)
        worker = Worker(llm, ServerConversations(llm, cache_ram), n_parallel, n_queue)
        worker.start()
        made.append((worker, llm))
        return worker, llm

    yield make
    for worker, llm in made:
        worker.stop()
        worker.join()
        llm.close()


ENDOFTEXT = 5
"""The other token at which the tiny models end."""


def request(tokens, n=30, constraint: Any = None, **more) -> Request:
    endless = Sampling(temperature=0, logit_bias=dict.fromkeys((EOS, ENDOFTEXT), float("-inf")))
    prompt = Prompt(list(tokens), syntax=Syntax(settings=constraint or {}))
    return Request(prompt, endless, max_tokens=n, **more)


@pytest.mark.parametrize("arguments", [{}, {"kv_ratio": 0.5, "kv_method": "snapkv"}])
def test_answers_in_turns_are_those_of_each_alone(working, text, arguments):
    prompts = [text(90, seed) for seed in range(3)]
    alone, together = [], []
    for n_parallel, texts in ((1, alone), (3, together)):
        worker, _ = working(n_parallel, **arguments)
        logs = [Log() for _ in prompts]
        for prompt, log in zip(prompts, logs):
            worker.submit(Job(request(prompt), log))
        for log in logs:
            assert log.wait().progress.n_written == 30
            texts.append(log.text)
    assert together == alone


def test_an_answer_that_is_forgotten_meanwhile_is_read_again_in_the_same_parts(
    working, text, monkeypatch
):
    """What a prompt keeps depends on where it is cut."""
    monkeypatch.setattr(Conversations, "hold", lambda pool: None)
    prompts = [Prompt(list(text(400, seed)), cuts=(300,)) for seed in range(2)]
    said = []
    for n_parallel in (1, 2):
        worker, _ = working(n_parallel, cache_ram=0, kv_ratio=0.2, kv_method="snapkv")
        logs = [Log() for _ in prompts]
        for prompt, log in zip(prompts, logs):
            worker.submit(Job(replace(request([], n=20), prompt=prompt), log))
        for log in logs:
            log.wait()
        said.append([log.text for log in logs])
    assert said[0] == said[1]


@pytest.mark.parametrize("cache", [{}, {"kv_ratio": 0.2, "kv_method": "snapkv"}])
def test_answers_in_turns_are_not_read_again_where_nothing_may_wait(working, text, cache):
    worker, llm = working(2, cache_ram=0, **cache)
    logs = [Log() for _ in range(2)]
    for seed, log in enumerate(logs):
        worker.submit(Job(request(list(text(100, seed)), n=60), log))
    for log in logs:
        log.wait()
    assert llm.n_evaluated <= 2 * (100 + 60)


@pytest.mark.parametrize("n_prompt", [20, 90, 300])
def test_the_same_prompt_asked_at_once_has_one_answer(working, text, n_prompt):
    """Who comes later has a branch of the conversation of who came first."""
    said = []
    for n_parallel, n_jobs in ((1, 1), (3, 6)):
        worker, _ = working(n_parallel, 9, kv_ratio=0.5, kv_method="snapkv")
        logs = [Log() for _ in range(n_jobs)]
        for log in logs:
            worker.submit(Job(request(text(n_prompt), 60, n_probs=3), log))
        for log in logs:
            log.wait()
            said.append([event for event in log.events if isinstance(event, Written)])
    assert said[1:] == said[:1] * 6


def asked(worker, prompts, client, n=30):
    """The logs of a client's requests."""
    logs = [Log() for _ in prompts]
    for prompt, log in zip(prompts, logs):
        worker.submit(Job(request(prompt, n), log, client))
    return logs


@pytest.fixture
def brief(monkeypatch):
    """Turns have TURN tokens, however long it takes to change conversations."""
    monkeypatch.setattr("edgekv.serve.worker.WORTH", 0)


def test_a_client_alone_has_all_places(working, text):
    worker, _ = working(3, 9)
    logs = asked(worker, [text(20, i) for i in range(9)], "one", 900)
    until(lambda: all(log.text for log in logs[:3]) or logs[0].over.is_set())
    assert not any(log.over.is_set() for log in logs)
    assert len(worker.active()) == 3 and worker.n_waiting == 6
    worker.stop()


@pytest.mark.parametrize("cache", [{}, {"kv_ratio": 0.5, "kv_method": "snapkv"}])
def test_a_client_with_all_places_makes_no_other_wait_for_a_whole_answer(
    working, text, cache, brief
):
    worker, llm = working(3, 30, **cache)
    many = asked(worker, [text(20, i) for i in range(12)], "many", 900)
    until(lambda: all(log.text for log in many[:3]))
    few, n_others = Log(), []

    def emit(event):  # by the worker
        n_others.append(max(len(log.events) for log in many[:3]))
        few(event)

    worker.submit(Job(request(text(20, 99), 20), emit, "few"))
    assert few.wait().progress.n_written == 20
    assert not any(log.over.is_set() for log in many)
    assert n_others[-1] - n_others[0] < 300
    worker.stop()


def test_places_beyond_their_number_are_for_clients_without_one(working, text, brief):
    worker, _ = working(3, 30)
    many = asked(worker, [text(20, i) for i in range(5)], "many", 900)
    others = [
        asked(worker, [text(20, 10 * i), text(20, 10 * i + 1)], str(i), 900) for i in range(1, 4)
    ]
    until(lambda: all(log.text for log in (*many[:3], others[0][0], others[1][0])))
    clients = sorted(job.client for job in worker.active())
    assert clients == ["1", "2", "many", "many", "many"] and worker.n_waiting == 6
    worker.stop()


@pytest.mark.parametrize("n_parallel", [2, 3])
def test_clients_have_turns_alike_however_many_answers_each_has(working, text, brief, n_parallel):
    """Where answers are written in turns."""
    worker, _ = working(n_parallel, 30)
    many = asked(worker, [text(20, i) for i in range(n_parallel)], "many", 900)
    until(lambda: all(log.text for log in many))
    few, n_others = Log(), []

    def emit(event):  # by the worker
        n_others.append(sum(len(log.events) for log in many))
        few(event)

    worker.submit(Job(request(text(20, 99), 200), emit, "few"))
    assert few.wait().progress.n_written == 200
    assert n_others[-1] - n_others[0] < 300
    worker.stop()


def test_a_request_beyond_the_queue_is_refused(working, text):
    worker, _ = working(1, 1)
    jobs = [Job(request(text(20), 900), Log()) for _ in range(2)]
    for job in jobs:
        worker.submit(job)
    with pytest.raises(ApiError) as caught:
        worker.submit(Job(request(text(20)), Log()))
    assert caught.value.status == 503 and caught.value.headers["Retry-After"]
    for job in jobs:
        worker.cancel(job)


def test_a_job_is_stopped_while_its_prompt_is_read(working, text):
    worker, llm = working(kv_ratio=0.5, kv_method="snapkv")
    reading, log = threading.Event(), Log()

    def emit(event):
        log(event)
        if isinstance(event, Progress) and event.n_read:
            reading.set()

    job = Job(request(text(1000), 20), emit)
    worker.submit(job)
    assert reading.wait(PATIENCE)
    worker.cancel(job)
    until(lambda: not worker.active())
    assert not log.over.is_set()
    after = Log()
    worker.submit(Job(request(text(30)), after))
    assert after.wait().progress.n_written == 30


def test_a_job_that_waits_leaves_when_it_is_stopped(working, text):
    worker, _ = working()
    first, second = Job(request(text(20), 900), Log()), Job(request(text(20)), Log())
    worker.submit(first)
    worker.submit(second)
    worker.cancel(second)
    assert worker.n_waiting == 0
    worker.cancel(first)


def test_who_waits_when_the_server_stops_is_told(working, text):
    worker, _ = working(1, 4)
    logs = [Log(), Log()]
    for log in logs:
        worker.submit(Job(request(text(20), 900), log))
    until(lambda: logs[0].text)
    worker.stop()
    assert [log.wait().status for log in logs] == [503, 503]
    with pytest.raises(ApiError):
        worker.submit(Job(request(text(20)), Log()))


def test_a_second_conversation_costs_the_first_nothing(working, text):
    """What was asked before goes on where it was, whatever others asked meanwhile."""
    worker, _ = working(kv_ratio=0.5, kv_method="snapkv")
    first, second = text(300), text(300, 1)
    cached = []
    for prompt in (first, second, (*first, *text(20, 2)), (*second, *text(20, 3))):
        log = Log()
        worker.submit(Job(request(prompt, 1), log))
        cached.append(log.wait().progress.n_cached)
    assert cached[:2] == [0, 0] and min(cached[2:]) >= 300


def test_a_document_is_not_read_again_for_another_question(working, text):
    worker, _ = working(kv_ratio=0.5, kv_method="snapkv")
    document, cached = text(300), []
    for i in range(3):
        log = Log()
        prompt = Prompt([*document, *text(90, i + 1)], cuts=(300,))
        worker.submit(Job(Request(prompt, Sampling(temperature=0), 3), log))
        cached.append(log.wait().progress.n_cached)
    assert cached == [0, 300, 300]


def test_conversations_are_found_again_after_a_restart(tiny, tmp_path):
    messages = [{"role": "user", "content": "the rain in " * 80}]  # its answer is text
    options, cached = ServeOptions(cache_disk=str(tmp_path)), list[int]()
    for _ in range(2):
        with serving(tiny("llama-gqa"), options, kv_ratio=0.5, kv_method="snapkv") as (url, _):
            body = {"messages": messages, "max_tokens": 3, "temperature": 0}
            reply = post(f"{url}/v1/chat/completions", json=body).json()
        cached.append(reply["usage"]["prompt_tokens_details"]["cached_tokens"])
        messages += [reply["choices"][0]["message"], {"role": "user", "content": "abc"}]
    assert cached[0] == 0 and cached[1] > 300


def test_conversations_can_be_seen_and_forgotten(tiny):
    with serving(tiny("llama-gqa"), kv_ratio=0.5, kv_method="snapkv") as (url, server):
        path = f"{url}/v1/chat/completions"
        ask = {"messages": [{"role": "user", "content": "the " * 300}], "ignore_eos": True}
        post(path, json={**ask, "max_tokens": 3})
        (one,) = get(f"{url}/conversations").json()["data"]
        assert one["n_tokens"] > 300 and one["is_current"]
        with httpx.stream(
            "POST", path, json={**ask, "stream": True, "max_tokens": 600}, timeout=PATIENCE
        ) as reply:
            lines = reply.iter_lines()
            until(lambda: '"content": "' in next(lines))
            for one in get(f"{url}/conversations").json()["data"]:
                assert delete(f"{url}/conversations/{one['id']}").json()["deleted"]
            assert [line for line in lines if line][-1] == "data: [DONE]"  # it was read again
        assert delete(f"{url}/conversations/nothing").status_code == 400


def test_an_error_ends_its_own_answer_only(working, text):
    worker, _ = working()
    bad, good = Log(), Log()
    worker.submit(Job(request(text(20), constraint={"grammar": "root ::= ("}), bad))
    worker.submit(Job(request(text(20)), good))
    assert bad.wait().status == 400
    assert good.wait().progress.n_written == 30


def test_a_grammar_that_lets_nothing_through_ends_its_answer(working, text):
    worker, _ = working()
    log, after = Log(), Log()
    worker.submit(Job(request(text(20), constraint={"grammar": 'root ::= "a" [\\U00FFFFFF]'}), log))
    worker.submit(Job(request(text(20)), after))
    assert isinstance(log.wait(), ApiError)
    assert isinstance(after.wait(), Done)


def test_a_grammar_that_takes_minutes_ends_its_own_answer_only(working, text):
    worker, _ = working()
    slow, after = Log(), Log()
    grammar = 'root ::= (a | b | "x"){1,200}\na ::= [a-z]{0,200}\nb ::= [a-m]{0,200}'
    worker.submit(Job(request(text(20), constraint={"grammar": grammar}), slow))
    worker.submit(Job(request(text(20)), after))
    assert "takes too long" in slow.wait().message
    assert after.wait().progress.n_written == 30


def test_where_the_grammar_ends_so_does_an_answer_without_an_end(working, text):
    worker, _ = working()
    log = Log()
    worker.submit(Job(request(text(20), constraint={"grammar": 'root ::= "abc"'}), log))
    assert log.wait().finish == "stop" and log.text == "abc"


@pytest.mark.parametrize("bias", [float("-inf"), float("nan"), float("inf")])
def test_a_bias_against_all_that_a_grammar_allows_ends_its_answer(working, text, bias):
    worker, llm = working()
    log, after = Log(), Log()
    sampling = Sampling(logit_bias=dict.fromkeys(range(llm.n_vocab()), bias))
    prompt = Prompt(list(text(20)), syntax=Syntax(settings={"grammar": 'root ::= "abc"'}))
    worker.submit(Job(Request(prompt, sampling, 9), log))
    worker.submit(Job(request(text(20)), after))
    assert isinstance(log.wait(), (Done, ApiError))
    assert isinstance(after.wait(), Done)


def test_a_trigger_lets_its_grammar_decide_from_there_on(working, text):
    worker, _ = working()
    free, bound = Log(), Log()
    worker.submit(Job(request(text(20)), free))
    free.wait()
    begin = re.match("[ -~]+", free.text).group()[:2]
    lazy = {
        "grammar": f'root ::= {json.dumps(begin)} [0-9] [0-9] "END"',
        "grammar_lazy": True,
        "grammar_triggers": [{"type": 1, "value": begin}],
    }
    worker.submit(Job(request(text(20), constraint=lazy), bound))
    assert bound.wait().finish == "stop"
    assert re.fullmatch(re.escape(begin) + "[0-9]{2}END", bound.text)
    assert not re.match("[0-9]{2}END", free.text[len(begin) :])


def test_others_may_use_the_model_between_two_steps(working, text):
    worker, llm = working()
    log = Log()
    job = Job(request(text(20), 900), log)
    worker.submit(job)
    assert worker.call(lambda: llm.kv_stats().n_seen).result(PATIENCE) >= 0
    with pytest.raises(EdgeKVError):
        worker.call(lambda: llm.kv_load("/nothing")).result(PATIENCE)
    worker.cancel(job)


# ---- over HTTP


def test_a_full_queue_is_a_503_with_a_time_to_wait(tiny):
    ask = {"messages": [{"role": "user", "content": "abc"}], "ignore_eos": True, "stream": True}
    with serving(tiny("llama-gqa"), ServeOptions(max_queue=0, parallel=1)) as (url, server):
        with httpx.stream(
            "POST", f"{url}/v1/chat/completions", json=ask, timeout=PATIENCE
        ) as first:
            lines = first.iter_lines()  # a generator that is dropped would close the stream
            next(lines)
            refused = post(f"{url}/v1/chat/completions", json=ask)
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert refused.json()["error"]["type"] == "unavailable_error"
        until(lambda: not server.worker.active())


def test_who_reads_when_the_server_ends_is_told(tiny):
    ask = [{"role": "user", "content": "abc"}]
    with serving(tiny("llama-gqa")) as (url, server):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        pieces = client.chat.completions.create(
            messages=ask, model="x", stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(pieces))
        server.handle_exit(2, None)
        with pytest.raises(openai.APIError, match="stopping"):
            for _ in pieces:
                pass
        client.close()


def test_without_its_packages_the_command_says_which_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "edgekv.serve.run", None)
    done = CliRunner().invoke(commands.main, ["serve", "-m", "demo"], prog_name="edgekv")
    assert done.exit_code == 2 and "edgekv[server]" in done.stderr


@pytest.mark.parametrize(
    "args, word",
    [
        (["--api-key", ""], "API key"),
        (["--api-key", "a,,b"], "API key"),
        (["--api-key-file", "/nothing"], "/nothing"),
        (["--api-key-file", os.devnull], os.devnull),
        (["--host", "no.such.host.invalid"], "cannot listen"),
        (["--chat-template-file", "/nothing"], "nothing"),
        (["--max-request", "much"], "max-request"),
    ],
)
def test_options_that_cannot_be_used_are_refused_before_the_model_is_loaded(args, word):
    done = CliRunner().invoke(
        commands.main, ["serve", "-m", "/no/model", "--port", "0", *args], prog_name="edgekv"
    )
    assert done.exit_code == 2 and word in done.stderr, done.stderr
    assert "/no/model" not in done.stderr


def said(*words: str) -> ServeOptions:
    """What the command's words say."""
    read = click.command()(serve_options(lambda options: options))
    return read.main(list(words), standalone_mode=False)


def test_what_is_not_said_is_as_in_python(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("LLAMA_", "EDGEKV_"))]:
        monkeypatch.delenv(name)
    assert said() == ServeOptions()


def test_the_memory_for_conversations_is_given_as_to_llama_server():
    assert [said("-cram", mib).cache_ram for mib in "02"] == [0, 2 * 2**20]
    assert said("--cache-ram", "-1").cache_ram > 2**50


def test_keys_come_from_both_places(tmp_path):
    (file := tmp_path / "keys").write_text("one\n\n two \n")
    options = said("--api-key", "three, four", "--api-key-file", str(file))
    assert options.api_keys + options.file_keys == ("three", "four", "one", "two")


def test_a_port_that_is_taken_is_said():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        args = ["serve", "-m", "/no/model", "--port", port]
        done = CliRunner().invoke(commands.main, args, prog_name="edgekv")
    assert done.exit_code == 2 and "--port" in done.stderr


def test_the_end_of_the_process_is_in_order_when_it_is_terminated(tiny, tmp_path):
    """A service manager sends SIGTERM: conversations are written down before the end."""
    child = started(tiny, tmp_path)
    with child:
        child.send_signal(signal.SIGTERM)
        assert child.wait(PATIENCE) == 143
        assert child.stderr.read().strip() == ""


def test_the_command_serves_until_ctrl_c(tiny, tmp_path):
    with started(tiny, tmp_path) as child:
        ask = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 3}
        path = f"{child.url}/v1/chat/completions"
        done = post(path, json=ask).json()
        assert done["usage"]["completion_tokens"] <= 3
        endless = {**ask, "max_tokens": -1, "ignore_eos": True, "stream": True}
        with stream(path, json=endless) as reply:
            lines = reply.iter_lines()
            next(lines)
            child.send_signal(signal.SIGINT)
            assert child.wait(PATIENCE) in (0, 130)
        assert child.stderr.read().strip() == ""


def test_a_rejected_grammar_is_not_printed(tiny, capfd):
    """A client could write lines of its own into the log."""
    with serving(tiny("llama-gqa")) as (url, _):
        body = {"prompt": "abc", "max_tokens": 2, "grammar": "root ::= (\nedgekv: a forged line\n"}
        assert post(f"{url}/v1/completions", json=body).status_code == 400
        os.write(2, b"still there\n")
    assert capfd.readouterr().err == "still there\n"
