"""What `edgekv serve` remembers between questions.

turns: a document and a question, and then a second question, the same question again, an edited
one, one after a restart with --cache-disk, and five conversations in turn. Tokens that were read
and seconds to the first token, beside a server that remembers nothing (--cache-ram 0). between: a
short question comes while a document is read, and then many, one after the other; seconds to the
first token. peer: the same turns, beside llama_cpp.server of the unpatched library's version;
FOLDER is a PYTHONPATH that has it.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import click
import httpx

from edgekv.commands.declare import option
from edgekv_lab.eval.sentences import sentences
from edgekv_lab.experiments.experiment import Options, Sheet, experiment, say, sheet, tokens
from edgekv_lab.experiments.server import (
    PATIENCE,
    SERVED,
    Server,
    serving,
    tokens_of,
    words_of,
)

N_ANSWER = 8
N_TALKS = 5
QUESTIONS = ("Who is it about?", "Where was it?", "What happened at the end?")
Messages = list[dict[str, str]]


# ---- a server and its clients


class Peer(Server):
    """A process of llama_cpp.server."""

    health = "/v1/models"

    def start(self, words: list[str], **more: Any) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "llama_cpp.server", *words]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, **more)


@dataclass
class Answer:
    """text: None where it has no end."""

    text: str | None = None
    first_s: float = 0.0
    n_read: int = 0
    n_prompt: int = 0


def ask(
    client: httpx.Client,
    url: str,
    messages: Messages,
    n: int = N_ANSWER,
    quarter: threading.Event | None = None,
) -> Answer:
    """Raises HTTPError. quarter: set when a quarter of the prompt has been read."""
    body = {"messages": messages, "max_tokens": n, "temperature": 0, "stream": True}
    begin, answer, text = time.perf_counter(), Answer(), ""
    with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            response.read()
        response.raise_for_status()
        for line in response.iter_lines():
            if quarter and line.startswith(": prompt "):
                n_done, n_all = map(int, line.split()[-1].split("/"))
                if 4 * n_done >= n_all:
                    quarter.set()
            if line == "data: [DONE]":
                answer.text = text
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise httpx.HTTPError(str(event["error"]))
            for choice in event["choices"]:
                if choice["delta"].get("content") or choice["finish_reason"]:
                    answer.first_s = answer.first_s or time.perf_counter() - begin
                text += choice["delta"].get("content") or ""
            if "timings" in event:
                answer.n_read = event["timings"]["prompt_n"]
                answer.n_prompt = answer.n_read + event["timings"]["cache_n"]
    if answer.text is None:
        raise httpx.RemoteProtocolError("the answer has no end")
    return answer


def question(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def document(server: Server, n_tokens: int, seed: int) -> str:
    """Sentences of about n_tokens tokens of the model."""
    text = " ".join(islice(sentences(random.Random(seed)), n_tokens // 4 + 10))
    return text[: len(text) * n_tokens // len(tokens_of(server, text))]


# ---- turns


def show_turns(o: Options) -> None:
    n_ctx = ["-c", str(o.tokens + 2048)]
    with tempfile.TemporaryDirectory() as folder, httpx.Client(timeout=PATIENCE) as client:
        kept = [*n_ctx, "--cache-disk", folder]
        with serving(words_of(o, *kept)) as server:
            text = document(server, o.tokens, 0)
            rows, talk = turns(client, server, text)
        with serving(words_of(o, *kept)) as server:
            rows["the next question after a restart"] = ask(client, server.url, talk)
            texts = short_documents(o, server)
            rows |= in_turn(client, server, texts)
        with serving(words_of(o, *n_ctx, "-np", "1", "--cache-ram", "0")) as server:
            again: dict[str, Answer] = {}
            for name, last in (("a second question", 3), ("the next question after a restart", 5)):
                # another conversation in between, so that this one is forgotten
                ask(client, server.url, [question("Hello.")])
                again[name] = ask(client, server.url, talk[:last])
            again |= in_turn(client, server, texts)
    with sheet(*TURNS, name="turns") as table:
        for name, one in rows.items():
            other = again.get(name)
            more = (other.n_read, other.first_s) if other else (None, None)
            table.add(name, one.n_prompt, one.n_read, one.first_s, *more)


TURNS = (
    ("request", ""),
    ("prompt tokens", "{:,}"),
    ("read", "{:,}"),
    ("first token, s", "{:.2f}"),
    ("read without memory", "{:,}"),
    ("first token, s", "{:.2f}"),
)


def turns(client: httpx.Client, server: Server, text: str) -> tuple[dict[str, Answer], Messages]:
    """The answers by their names, and the conversation with a question that was not asked."""
    rows: dict[str, Answer] = {}
    talk = [question(f"{text}\n\n{QUESTIONS[0]}")]

    def now(name: str, messages: Messages) -> Answer:
        say(name)
        rows[name] = ask(client, server.url, messages)
        return rows[name]

    said = now("the document and a question", talk)
    talk += [{"role": "assistant", "content": said.text or ""}, question(QUESTIONS[1])]
    now("a second question", talk)
    said = now("the second question again (regenerate)", talk)
    now("the second question, edited", [*talk[:-1], question(f"{QUESTIONS[1]} And why?")])
    talk += [{"role": "assistant", "content": said.text or ""}, question(QUESTIONS[2])]
    return rows, talk


def in_turn(client: httpx.Client, server: Server, texts: list[str]) -> dict[str, Answer]:
    """Conversations that ask one after the other: means of their second questions."""
    talks = []
    for text in texts:
        talks.append([question(f"{text}\n\n{QUESTIONS[0]}")])
        said = ask(client, server.url, talks[-1])
        more = {"role": "assistant", "content": said.text or ""}
        talks[-1] += [more, question(QUESTIONS[1])]
    found = [ask(client, server.url, talk) for talk in talks]
    mean = Answer(
        "",
        sum(x.first_s for x in found) / N_TALKS,
        sum(x.n_read for x in found) // N_TALKS,
        sum(x.n_prompt for x in found) // N_TALKS,
    )
    return {f"each of {N_TALKS} conversations in turn (mean)": mean}


def short_documents(o: Options, server: Server) -> list[str]:
    n = o.tokens // N_TALKS
    return [document(server, n, seed) for seed in range(1, N_TALKS + 1)]


# ---- peer


def show_peer(o: Options) -> None:
    n_ctx = str(o.tokens + 2048)
    found = []
    with tempfile.TemporaryDirectory() as folder, httpx.Client(timeout=PATIENCE) as client:
        ours = ["-c", n_ctx, "--cache-disk", folder]
        with serving(words_of(o, *ours)) as server:
            text = document(server, o.tokens, 0)
            texts = short_documents(o, server)
        theirs = ["--model", o.model, "--n_ctx", n_ctx, "--flash_attn", "true"]
        for name in ("--n_threads", "--n_threads_batch"):
            theirs += [name, str(o.threads)]
        environment = {**os.environ, "PYTHONPATH": o.peer_path}
        for kind, words, env in (
            (Server, words_of(o, *ours), None),
            (Peer, theirs, environment),
        ):
            with serving(words, kind, env=env) as server:
                rows, talk = turns(client, server, text)
            with serving(words, kind, env=env) as server:
                rows["the next question after a restart"] = ask(client, server.url, talk)
                found.append(rows | in_turn(client, server, texts))
    columns = [(f"{side}: first token, s", "{:.2f}") for side in ("edgekv", "llama_cpp.server")]
    with sheet(("request", ""), *columns, name="peer") as table:
        for name, one in found[0].items():
            table.add(name, one.first_s, found[1][name].first_s)


# ---- between

SHORT = "Which is larger, an ox or a mouse? Say it in one word."
"""Some 20 tokens; a number before it makes it a new one."""


def show_between(o: Options) -> None:
    n_ctx = ["-c", str(o.tokens + 2048)]
    columns = ("request", ""), ("prompt tokens", "{:,}"), ("first token, s", "{:.2f}")
    with (
        httpx.Client(timeout=PATIENCE) as client,
        serving(words_of(o, *n_ctx)) as server,
        sheet(*columns, name="between") as table,
    ):
        ask(client, server.url, [question(SHORT)])  # the first one of all takes longer
        alone = ask(client, server.url, [question(f"1. {SHORT}")])
        add(table, "the question alone", alone)
        text = [question(f"{document(server, o.tokens, 0)}\n\n{QUESTIONS[0]}")]
        add(table, "the document alone", ask(client, server.url, text))
        for seed, n_most in ((1, 1), (2, 1 << 20)):
            text = [question(f"{document(server, o.tokens, seed)}\n\n{QUESTIONS[0]}")]
            reader, asked = read_and_ask(client, server, text, n_most)
            many = f"{len(asked)} questions, one after the other" if n_most > 1 else "a question"
            mean = sum(x.first_s for x in asked) / len(asked)
            add(table, f"{many} while a document is read (mean)", replace(asked[0], first_s=mean))
            add(table, "that document", reader)


def read_and_ask(
    client: httpx.Client, server: Server, text: Messages, n_most: int
) -> tuple[Answer, list[Answer]]:
    """The answer about a document, and those of questions that came while it was read: the first
    one when a quarter was read.
    """
    asked, quarter = list[Answer](), threading.Event()
    with ThreadPoolExecutor(1) as pool, httpx.Client(timeout=PATIENCE) as other:
        reading = pool.submit(ask, other, server.url, text, quarter=quarter)
        quarter.wait(PATIENCE)
        while len(asked) < n_most and not (asked and reading.done()):
            short = [question(f"{len(asked) + 2}. {SHORT}")]
            asked.append(ask(client, server.url, short))
        return reading.result(), asked


def add(table: Sheet, name: str, one: Answer) -> None:
    table.add(name, one.n_prompt, one.first_s)


@experiment(
    click.argument("what", type=click.Choice(["turns", "between", "peer"])),
    *SERVED,
    tokens(8000, "the document"),
    option("--peer-path", default="", help="A PYTHONPATH that has llama_cpp.server."),
)
def command(o: Options) -> None:
    {"turns": show_turns, "between": show_between, "peer": show_peer}[o.what](o)
