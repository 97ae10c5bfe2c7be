"""What `edgekv serve` remembers between questions.

    python benchmarks/serve.py turns [-m MODEL] [--tokens 8000] [--kv-ratio 0.2]
    python benchmarks/serve.py between [-m MODEL] [--tokens 8000] [--kv-ratio 0.2]
    python benchmarks/serve.py peer [-m MODEL] [--tokens 8000] --peer-path FOLDER

turns: a document and a question, and then a second question, the same question again, an edited
one, one after a restart with --cache-disk, and five conversations in turn. Tokens that were read
and seconds to the first token, beside a server that remembers nothing (--cache-ram 0). between: a
short question comes while a document is read, and then many, one after the other; seconds to the
first token. peer: the same turns, beside llama_cpp.server of the unpatched library's version;
FOLDER is a PYTHONPATH that has it. Markdown goes to standard output, progress to standard error.
"""

from __future__ import annotations

import argparse
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
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(Path(__file__).resolve().parent)]
sys.path.append(str(ROOT))

from process import demo_path, heading  # noqa: E402
from served import PATIENCE, Server, add_model, serving, tokens_of, words_of  # noqa: E402

from edgekv_lab.eval.sentences import sentences  # noqa: E402

N_ANSWER = 8
N_TALKS = 5
QUESTIONS = ("Who is it about?", "Where was it?", "What happened at the end?")
Messages = list[dict[str, str]]


def main() -> None:
    options = parse()
    print(heading("serve.py"))
    kinds = {
        "turns": print_turns,
        "between": print_between,
        "peer": print_peer,
    }
    kinds[options.what](options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["turns", "between", "peer"])
    add_model(parser)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--peer-path", default="")
    options = parser.parse_args()
    if options.model == "demo":
        options.model = str(demo_path())
    return options


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


def print_turns(options: argparse.Namespace) -> None:
    n_ctx = ["-c", str(options.tokens + 2048)]
    with tempfile.TemporaryDirectory() as folder, httpx.Client(timeout=PATIENCE) as client:
        kept = [*n_ctx, "--cache-disk", folder]
        with serving(words_of(options, *kept)) as server:
            text = document(server, options.tokens, 0)
            rows, talk = turns(client, server, text)
        with serving(words_of(options, *kept)) as server:
            rows["the next question after a restart"] = ask(client, server.url, talk)
            texts = short_documents(options, server)
            rows |= in_turn(client, server, texts)
        with serving(words_of(options, *n_ctx, "-np", "1", "--cache-ram", "0")) as server:
            again: dict[str, Answer] = {}
            for name, last in (("a second question", 3), ("the next question after a restart", 5)):
                # another conversation in between, so that this one is forgotten
                ask(client, server.url, [question("Hello.")])
                again[name] = ask(client, server.url, talk[:last])
            again |= in_turn(client, server, texts)
    print(
        "| request | prompt tokens | read | first token, s | read without memory |"
        " first token, s |\n| --- | ---: | ---: | ---: | ---: | ---: |"
    )
    for name, one in rows.items():
        other = again.get(name)
        cells = f"{other.n_read:,} | {other.first_s:.2f}" if other else " | "
        print(f"| {name} | {one.n_prompt:,} | {one.n_read:,} | {one.first_s:.2f} | {cells} |")


def turns(client: httpx.Client, server: Server, text: str) -> tuple[dict[str, Answer], Messages]:
    """The answers by their names, and the conversation with a question that was not asked."""
    rows: dict[str, Answer] = {}
    talk = [question(f"{text}\n\n{QUESTIONS[0]}")]

    def now(name: str, messages: Messages) -> Answer:
        print(name, file=sys.stderr, flush=True)
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


def short_documents(options: argparse.Namespace, server: Server) -> list[str]:
    n = options.tokens // N_TALKS
    return [document(server, n, seed) for seed in range(1, N_TALKS + 1)]


# ---- peer


def print_peer(options: argparse.Namespace) -> None:
    n_ctx = str(options.tokens + 2048)
    found = []
    with tempfile.TemporaryDirectory() as folder, httpx.Client(timeout=PATIENCE) as client:
        ours = ["-c", n_ctx, "--cache-disk", folder]
        with serving(words_of(options, *ours)) as server:
            text = document(server, options.tokens, 0)
            texts = short_documents(options, server)
        theirs = ["--model", options.model, "--n_ctx", n_ctx, "--flash_attn", "true"]
        for name in ("--n_threads", "--n_threads_batch"):
            theirs += [name, str(options.threads)]
        environment = {**os.environ, "PYTHONPATH": options.peer_path}
        for kind, words, env in (
            (Server, words_of(options, *ours), None),
            (Peer, theirs, environment),
        ):
            with serving(words, kind, env=env) as server:
                rows, talk = turns(client, server, text)
            with serving(words, kind, env=env) as server:
                rows["the next question after a restart"] = ask(client, server.url, talk)
                found.append(rows | in_turn(client, server, texts))
    print("| request | edgekv: first token, s | llama_cpp.server: first token, s |")
    print("| --- | ---: | ---: |")
    for name, one in found[0].items():
        print(f"| {name} | {one.first_s:.2f} | {found[1][name].first_s:.2f} |")


# ---- between

SHORT = "Which is larger, an ox or a mouse? Say it in one word."
"""Some 20 tokens; a number before it makes it a new one."""


def print_between(options: argparse.Namespace) -> None:
    n_ctx = ["-c", str(options.tokens + 2048)]
    with httpx.Client(timeout=PATIENCE) as client, serving(words_of(options, *n_ctx)) as server:
        ask(client, server.url, [question(SHORT)])  # the first one of all takes longer
        print("| request | prompt tokens | first token, s |\n| --- | ---: | ---: |")
        alone = ask(client, server.url, [question(f"1. {SHORT}")])
        print_answer("the question alone", alone)
        text = [question(f"{document(server, options.tokens, 0)}\n\n{QUESTIONS[0]}")]
        print_answer("the document alone", ask(client, server.url, text))
        for seed, n_most in ((1, 1), (2, 1 << 20)):
            text = [question(f"{document(server, options.tokens, seed)}\n\n{QUESTIONS[0]}")]
            reader, asked = read_and_ask(client, server, text, n_most)
            many = f"{len(asked)} questions, one after the other" if n_most > 1 else "a question"
            mean = sum(x.first_s for x in asked) / len(asked)
            print_answer(f"{many} while a document is read (mean)", replace(asked[0], first_s=mean))
            print_answer("that document", reader)


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


def print_answer(name: str, one: Answer) -> None:
    print(f"| {name} | {one.n_prompt:,} | {one.first_s:.2f} |", flush=True)


if __name__ == "__main__":
    main()
