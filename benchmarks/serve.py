"""What `edgekv serve` remembers between questions, and whether it holds under load.

    python benchmarks/serve.py turns [-m MODEL] [--tokens 8000] [--kv-ratio 0.2]
    python benchmarks/serve.py between [-m MODEL] [--tokens 8000] [--kv-ratio 0.2]
    python benchmarks/serve.py peer [-m MODEL] [--tokens 8000] --peer-path FOLDER
    python benchmarks/serve.py load [-m MODEL] [--clients 64] [--requests 2000] [--cache-ram 16]
    python benchmarks/serve.py steady [-m MODEL] [--clients 16] [--minutes 30] [--cache-ram 16]

turns: a document and a question, and then a second question, the same question again, an edited
one, one after a restart with --cache-disk, and five conversations in turn. Tokens that were read
and seconds to the first token, beside a server that remembers nothing (--cache-ram 0). between: a
short question comes while a document is read, and then many, one after the other; seconds to the
first token. peer: the same turns, beside llama_cpp.server of the unpatched library's version;
FOLDER is a PYTHONPATH that has it. load: many clients ask one server greedily; a third goes away
amid the answer; half-way the server is killed and starts again. Each whole answer is compared with
that of one client alone. steady: the same without an end, and how the process grows. Markdown goes
to standard output, progress to standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(Path(__file__).resolve().parent)]
sys.path.append(str(ROOT))

from process import demo_path, heading  # noqa: E402

from edgekv.eval.text import sentences  # noqa: E402

MIB = 2**20
PATIENCE = 600
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
        "load": print_load,
        "steady": print_steady,
    }
    kinds[options.what](options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["turns", "between", "peer", "load", "steady"])
    parser.add_argument("-m", "--model", default="demo")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--kv-ratio", default="0.2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--prompts", type=int, default=48, help="distinct ones")
    parser.add_argument("--cache-ram", type=int, default=16, help="MiB, of `load`")
    parser.add_argument("--minutes", type=float, default=30, help="of `steady`")
    parser.add_argument("--peer-path", default="")
    options = parser.parse_args()
    if options.model == "demo":
        options.model = str(demo_path())
    return options


# ---- a server and its clients


class Server:
    """A process of `edgekv serve`."""

    health = "/health"

    def __init__(self, options: argparse.Namespace, *more: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.process = self.start(options, str(port), *more)
        while not self.is_up():
            if self.process.poll() is not None:
                raise SystemExit("the server does not start; its reason stands above")
            time.sleep(0.1)

    def start(self, options: argparse.Namespace, port: str, *more: str) -> subprocess.Popen[bytes]:
        words = ["-m", options.model, "--kv-ratio", options.kv_ratio, "-t", str(options.threads)]
        words += ["--port", port, "--temp", "0", "--metrics", *more]
        command = [sys.executable, "-m", "edgekv", "serve", *words]
        return subprocess.Popen(command, cwd=ROOT, stderr=sys.stderr)

    def is_up(self) -> bool:
        with suppress(httpx.HTTPError):
            return httpx.get(self.url + self.health, timeout=PATIENCE).status_code == 200
        return False

    def end(self, how: signal.Signals = signal.SIGINT) -> None:
        self.process.send_signal(how)
        self.process.wait(PATIENCE)

    def rss(self) -> int:
        """Bytes."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        return 0

    def n_waiting_bytes(self) -> int:
        """Of conversations that wait, as the server says."""
        found = httpx.get(f"{self.url}/conversations", timeout=PATIENCE).json()["data"]
        return sum(one["n_bytes"] for one in found if not one["is_current"])


class Peer(Server):
    """A process of llama_cpp.server with the unpatched library and a full f16 cache."""

    health = "/v1/models"

    def start(self, options: argparse.Namespace, port: str, *more: str) -> subprocess.Popen[bytes]:
        words = ["--model", options.model, "--port", port, "--flash_attn", "true"]
        words += ["--n_threads", str(options.threads), "--n_threads_batch", str(options.threads)]
        command = [sys.executable, "-m", "llama_cpp.server", *words, *more]
        environment = {**os.environ, "PYTHONPATH": options.peer_path}
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return subprocess.Popen(command, env=environment, **quiet)


@contextmanager
def serving(
    options: argparse.Namespace, *more: str, kind: type[Server] = Server
) -> Iterator[Server]:
    server = kind(options, *more)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.end()


@dataclass
class Answer:
    """text: None where the client went away."""

    text: str | None = None
    first_s: float = 0.0
    n_read: int = 0
    n_prompt: int = 0


def ask(
    client: httpx.Client,
    url: str,
    messages: Messages,
    n: int = N_ANSWER,
    leave_at: int = -1,
    quarter: threading.Event | None = None,
) -> Answer:
    """Raises HTTPError. leave_at: pieces of the answer after which the client goes away; quarter:
    set when a quarter of the prompt has been read.
    """
    body = {"messages": messages, "max_tokens": n, "temperature": 0, "stream": True}
    begin, answer, text, n_pieces = time.perf_counter(), Answer(), "", 0
    with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            response.read()
        response.raise_for_status()
        if leave_at == 0:
            return answer
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
            n_pieces += 1
            if n_pieces == leave_at:
                return answer
    if answer.text is None:
        raise httpx.RemoteProtocolError("the answer has no end")
    return answer


def question(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def document(server: Server, n_tokens: int, seed: int) -> str:
    """Sentences of about n_tokens tokens of the model."""
    text = " ".join(islice(sentences(random.Random(seed)), n_tokens // 4 + 10))
    body = {"content": text}
    found = httpx.post(f"{server.url}/tokenize", json=body, timeout=PATIENCE).json()
    return text[: len(text) * n_tokens // len(found["tokens"])]


# ---- turns


def print_turns(options: argparse.Namespace) -> None:
    n_ctx = ["-c", str(options.tokens + 2048)]
    with tempfile.TemporaryDirectory() as folder, httpx.Client(timeout=PATIENCE) as client:
        kept = [*n_ctx, "--cache-disk", folder]
        with serving(options, *kept) as server:
            text = document(server, options.tokens, 0)
            rows, talk = turns(client, server, text)
        with serving(options, *kept) as server:
            rows["the next question after a restart"] = ask(client, server.url, talk)
            texts = short_documents(options, server)
            rows |= in_turn(client, server, texts)
        with serving(options, *n_ctx, "-np", "1", "--cache-ram", "0") as server:
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
        with serving(options, *ours) as server:
            text = document(server, options.tokens, 0)
            texts = short_documents(options, server)
        for kind, more in ((Server, ours), (Peer, ["--n_ctx", n_ctx])):
            with serving(options, *more, kind=kind) as server:
                rows, talk = turns(client, server, text)
            with serving(options, *more, kind=kind) as server:
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
    with httpx.Client(timeout=PATIENCE) as client, serving(options, *n_ctx) as server:
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


# ---- load


@dataclass
class Tally:
    """What became of the requests of one part of the run."""

    first_s: list[float] = field(default_factory=list)
    n_whole: int = 0
    n_left: int = 0
    n_busy: int = 0
    n_lost: int = 0
    wrong: list[tuple[str, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


def print_load(options: argparse.Namespace) -> None:
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder, httpx.Client(timeout=PATIENCE) as client:
        with serving(options, "-c", "2048", "--cache-ram", "0", "-np", "1") as server:
            prompts = [talk_of(server, rng, i) for i in range(options.prompts)]
            # each prompt alone: the conversation before it is forgotten
            right = [ask(client, server.url, one).text or "" for one in prompts]
        more = ["-c", "2048", "--cache-ram", str(options.cache_ram), "--cache-disk", folder]
        more += ["--max-queue", str(options.clients)]
        print(
            "| part | whole | cut off | lost to the kill | status 503 | wrong | p50, s | p99, s |"
            " RSS at first, MiB | at the end | waiting at most, MiB |\n"
            f"|{' --- |'}{' ---: |' * 10}",
            flush=True,
        )
        half = options.requests // 2
        for part, kill in (("before the kill", True), ("after the restart", False)):
            server = Server(options, *more)
            tally = Tally()
            numbers = [rng.randrange(len(prompts)) for _ in range(half)]
            begin, stop, most = server.rss(), threading.Event(), [0]
            watching = threading.Thread(target=watch, args=(server, stop, most))
            watching.start()
            with ThreadPoolExecutor(options.clients) as pool:
                for i, n in enumerate(numbers):
                    leaves = rng.randrange(N_ANSWER) if rng.random() < 1 / 3 else -1
                    if kill and i == half - options.clients:
                        while tally.n_whole + tally.n_left < half - 3 * options.clients:
                            time.sleep(0.05)
                    pool.submit(one_request, server, prompts[n], right[n], leaves, tally)
                if kill:
                    while tally.n_whole + tally.n_left < half - options.clients:
                        time.sleep(0.02)
                    end = server.rss()
                    stop.set()
                    server.end(signal.SIGKILL)
            stop.set()
            watching.join()
            if not kill:
                end = server.rss()
                server.end()
            print(row_of(part, tally, begin, end, most[0]), flush=True)
            for got, wished in tally.wrong[:5]:
                print(f"{got!r} instead of {wished!r}", file=sys.stderr)


# ---- steady


def print_steady(options: argparse.Namespace) -> None:
    rng, tally, stop = random.Random(0), Tally(), threading.Event()
    with tempfile.TemporaryDirectory() as folder, httpx.Client(timeout=PATIENCE) as client:
        with serving(options, "-c", "2048", "--cache-ram", "0", "-np", "1") as server:
            prompts = [talk_of(server, rng, i) for i in range(options.prompts)]
            right = [ask(client, server.url, one).text or "" for one in prompts]
        more = ["-c", "2048", "--cache-ram", str(options.cache_ram), "--cache-disk", folder]

        def go_on(seed: int) -> None:
            own = random.Random(seed)
            while not stop.is_set():
                n, leaves = own.randrange(len(prompts)), own.randrange(3 * N_ANSWER)
                leave_at = leaves if leaves < N_ANSWER else -1
                one_request(server, prompts[n], right[n], leave_at, tally)

        print("| minute | answers | cut off | wrong | RSS, MiB | waiting, MiB |", flush=True)
        print(f"|{' ---: |' * 6}", flush=True)
        with serving(options, *more) as server, ThreadPoolExecutor(options.clients) as pool:
            for seed in range(options.clients):
                pool.submit(go_on, seed)
            begin = time.monotonic()
            try:
                while (minute := (time.monotonic() - begin) / 60) < options.minutes:
                    time.sleep(60 - (time.monotonic() - begin) % 60)
                    cells = [tally.n_whole, tally.n_left, len(tally.wrong)]
                    sizes = [server.rss() / MIB, server.n_waiting_bytes() / MIB]
                    row = [f"{x:,}" for x in cells] + [f"{x:.1f}" for x in sizes]
                    print(f"| {minute + 1:.0f} | {' | '.join(row)} |", flush=True)
            finally:
                stop.set()
        for got, wished in tally.wrong[:5]:
            print(f"{got!r} instead of {wished!r}", file=sys.stderr)


def talk_of(server: Server, rng: random.Random, seed: int) -> Messages:
    """A prompt; those of one group begin alike."""
    text = document(server, rng.choice([100, 300]), seed % 12)
    talk = [question(f"{text}\n\n{rng.choice(QUESTIONS)}")]
    if seed % 2:
        talk += [{"role": "assistant", "content": "yes"}, question(rng.choice(QUESTIONS))]
    return talk


def one_request(server: Server, prompt: Messages, right: str, leave_at: int, tally: Tally) -> None:
    try:
        with httpx.Client(timeout=PATIENCE) as client:
            got = ask(client, server.url, prompt, leave_at=leave_at)
    except httpx.HTTPStatusError as error:
        with tally.lock:
            if error.response.status_code == 503:
                tally.n_busy += 1
            else:
                tally.wrong.append((error.response.text, right))
        return
    except httpx.HTTPError:
        with tally.lock:
            tally.n_lost += 1
        return
    with tally.lock:
        if got.first_s:
            tally.first_s.append(got.first_s)
        if got.text is None:
            tally.n_left += 1
        else:
            tally.n_whole += 1
            if got.text != right:
                tally.wrong.append((got.text, right))


def watch(server: Server, stop: threading.Event, most: list[int]) -> None:
    """Bytes of conversations that wait, at most."""
    while not stop.wait(0.5):
        with suppress(httpx.HTTPError, KeyError):
            most[0] = max(most[0], server.n_waiting_bytes())


def row_of(part: str, tally: Tally, begin: int, end: int, most: int) -> str:
    ordered = sorted(tally.first_s) or [0.0]
    p50, p99 = ordered[len(ordered) // 2], ordered[min(len(ordered) * 99 // 100, len(ordered) - 1)]
    cells = [tally.n_whole, tally.n_left, tally.n_lost, tally.n_busy, len(tally.wrong)]
    cells += [f"{p50:.2f}", f"{p99:.2f}", *(f"{x / MIB:.1f}" for x in (begin, end, most))]
    return f"| {part} | {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
