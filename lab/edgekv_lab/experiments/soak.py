"""Whether `edgekv serve` answers rightly for as long as it runs, to many clients at once.

Clients ask without a pause: chats, Anthropic's messages and texts that go on, half of them
streamed. A tenth goes away amid the answer. Half-way the server is killed (kill -9) and starts
again with the same --cache-disk. Each whole answer is compared with that of a server that remembers
nothing and answers one at a time. Lost: conversations that were listed, are not any more, and have
no line in the log; of those at the kill only what was on disk counts. --words: further ones of the
servers' command line: of prompts that share more than an ubatch with others, docs/server.md does
not promise that they have one answer. What is wrong goes to standard error.
"""

from __future__ import annotations

import json
import random
import re
import signal
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

import httpx

from edgekv.commands.declare import option
from edgekv.commands.values import COUNT, Finite
from edgekv_lab.eval.sentences import sentences
from edgekv_lab.experiments.experiment import Options, Sheet, experiment, many, say, sheet
from edgekv_lab.experiments.server import MIB, PATIENCE, SERVED, Server, prepare, serving, words_of

N_ANSWER = 8
N_GROUPS = 12
"""Prompts of one group begin alike."""
QUESTIONS = ("Who is it about?", "Where was it?", "What happened at the end?")
COUNTED = ("whole", "cut off", "wrong", "503", "5xx", "other", "lost to the kill")
LOST = re.compile(r"conversation (\w+) \(.*? is (?:forgotten|not on disk|read again|part of)")


COLUMNS = (
    ("part", ""),
    ("minute", "{:g}"),
    *((name, "{:,}") for name in COUNTED),
    ("RSS, MiB", "{:.1f}"),
    *((name, "{:,}") for name in ("conversations", "lost", "tracebacks")),
    ("seconds to the end", "{:.1f}"),
)


@experiment(
    *SERVED,
    option("--clients", type=COUNT, default=64, help="Clients at once."),
    option("--minutes", type=Finite(min=0, min_open=True), default=30.0, help="Both parts."),
    option("--prompts", type=COUNT, default=48, help="Distinct ones."),
    option("--cache-ram", type=COUNT, default=16, help="MiB."),
    option("--words", default="", callback=many(str, " "), help="Further ones of the server's."),
)
def command(o: Options) -> None:
    prepare(o.model)
    soak = Soak(o)
    soak.learn()
    with tempfile.TemporaryDirectory() as folder, sheet(*COLUMNS) as table:
        soak.table = table
        soak.part("before the kill", folder, signal.SIGKILL)
        soak.part("after the restart", folder, signal.SIGTERM)


# ---- requests


@dataclass(frozen=True)
class Request:
    """path: of the protocol."""

    path: str
    body: dict[str, Any]

    def asked(self, client: httpx.Client, streams: bool, leave_at: int = -1) -> str:
        """The answer's text. leave_at: pieces of a stream after which the client goes away.

        Raises HTTPError.
        """
        if not streams:
            said = client.post(self.path, json=self.body).raise_for_status().json()
            return self._text(said)
        text, n, is_over = "", 0, False
        with client.stream("POST", self.path, json={**self.body, "stream": True}) as answer:
            if answer.is_error:
                answer.read()
            answer.raise_for_status()
            for line in answer.iter_lines():
                if n == leave_at:
                    return text
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise httpx.RemoteProtocolError(str(event["error"]))
                    text, n = text + self._piece(event), n + 1
                is_over = is_over or self._ends(line)
        if not is_over:
            raise httpx.RemoteProtocolError("the answer has no end")
        return text

    def _text(self, said: dict[str, Any]) -> str:
        match self.path:
            case "/completion":
                return str(said["content"])
            case "/v1/messages":
                return "".join(one["text"] for one in said["content"])
        return said["choices"][0]["message"]["content"] or ""

    def _piece(self, event: dict[str, Any]) -> str:
        match self.path:
            case "/completion":
                return str(event["content"])
            case "/v1/messages":
                return str(event.get("delta", {}).get("text", ""))
        return "".join(one["delta"].get("content") or "" for one in event["choices"])

    def _ends(self, line: str) -> bool:
        ends = {"/completion": '"stop":true', "/v1/messages": "message_stop"}
        return ends.get(self.path, "data: [DONE]") in line.replace(" ", "" if "{" in line else " ")


def requests_of(n: int) -> list[Request]:
    """Chats, each also as Anthropic's messages, and texts that go on."""
    rng, found = random.Random(0), []
    for i in range(n):
        text = " ".join(islice(sentences(random.Random(i % N_GROUPS)), rng.choice([2, 6, 15])))
        talk = [{"role": "user", "content": f"{text}\n\n{rng.choice(QUESTIONS)}"}]
        if i % 2:
            talk += [{"role": "assistant", "content": "yes"}]
            talk += [{"role": "user", "content": rng.choice(QUESTIONS)}]
        usual = {"max_tokens": N_ANSWER, "temperature": 0}
        found += [
            Request(path, {"messages": talk, **usual})
            for path in ("/v1/chat/completions", "/v1/messages")
        ]
        alone = " ".join(islice(sentences(random.Random(100 + i)), round(60 ** (i / n))))
        found.append(Request("/completion", {"prompt": alone, **usual}))
    return found


# ---- the run


class Soak:
    def __init__(self, o: Options) -> None:
        self._options = o
        self._requests = requests_of(o.prompts)
        self._right: list[str] = []
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._known: dict[str, bool] = {}
        """Conversations that were listed last, and whether they were on disk."""
        self._is_killed = threading.Event()
        self.table: Sheet | None = None

    def learn(self) -> None:
        """The right answers."""
        words = words_of(
            self._options, "-c", "4096", "--cache-ram", "0", "-np", "1", *self._options.words
        )
        with (
            serving(words) as server,
            httpx.Client(base_url=server.url, timeout=PATIENCE) as client,
        ):
            self._right = [one.asked(client, False) for one in self._requests]

    @staticmethod
    def _client(server: Server) -> httpx.Client:
        return httpx.Client(base_url=server.url, timeout=PATIENCE)

    def part(self, name: str, folder: str, how: signal.Signals) -> None:
        """Half of the time, at whose end the server gets a signal."""
        o = self._options
        words = [
            "-v",
            "-c",
            "4096",
            "--cache-ram",
            str(o.cache_ram),
            "--cache-disk",
            folder,
            *o.words,
        ]
        server = Server(words_of(o, *words, "--max-queue", str(o.clients)))
        stop, begin, lost = threading.Event(), time.monotonic(), set[str]()
        with ThreadPoolExecutor(o.clients) as pool:
            for seed in range(o.clients):
                pool.submit(self._ask_on, server, f"{name} {seed}", stop)
            while (minutes := (time.monotonic() - begin) / 60) < o.minutes / 2:
                next_at = min(int(minutes) + 1, o.minutes / 2)
                while time.monotonic() - begin < 60 * next_at:
                    time.sleep(min(1.0, max(60 * next_at - (time.monotonic() - begin), 0)))
                    lost |= self._look(server)
                self._say(name, next_at, server, lost, None)
            stop.set()
            if how == signal.SIGKILL:  # amid all answers
                self._is_killed.set()
                seconds = server.end(how)
        if how != signal.SIGKILL:
            lost |= self._look(server)
            seconds = server.end(how)
        self._is_killed.clear()
        self._known = {id: True for id, is_on_disk in self._known.items() if is_on_disk}
        self._say(f"{name}, {how.name}", None, server, lost, seconds)

    def _look(self, server: Server) -> set[str]:
        """Conversations that are gone since the last look, and of which the log says nothing."""
        with suppress(httpx.HTTPError):
            now = {one["id"]: one["on_disk"] for one in server.conversations()}
            gone, self._known = set(self._known) - set(now), now
            return gone - set(LOST.findall(server.log()))
        return set()

    def _say(
        self,
        part: str,
        minute: float | None,
        server: Server,
        lost: set[str],
        seconds: float | None,
    ) -> None:
        with self._lock:
            counts = [self._counts[name] for name in COUNTED]
        rss = server.rss() / MIB if server.process.poll() is None else None
        found = len(self._known), len(lost), server.log().count("Traceback")
        assert self.table
        self.table.add(part, minute, *counts, rss, *found, seconds)

    def _ask_on(self, server: Server, seed: str, stop: threading.Event) -> None:
        rng = random.Random(seed)
        with self._client(server) as client:
            while not stop.is_set():
                i, streams = rng.randrange(len(self._requests)), rng.random() < 0.5
                leave_at = rng.randrange(N_ANSWER) if rng.random() < 0.1 else -1
                what = self._outcome(client, i, streams or leave_at >= 0, leave_at)
                with self._lock:
                    self._counts[what] += 1
                if what == "503":
                    time.sleep(0.1)

    def _outcome(self, client: httpx.Client, i: int, streams: bool, leave_at: int) -> str:
        """One of COUNTED."""
        request = self._requests[i]
        try:
            got = request.asked(client, streams, leave_at)
        except httpx.HTTPStatusError as error:
            status = error.response.status_code
            what = "503" if status == 503 else "5xx" if status >= 500 else "other"
            if what != "503":
                say(f"{request.path}: {error.response.text}")
            return what
        except httpx.HTTPError as error:
            if self._is_killed.is_set():
                return "lost to the kill"
            say(f"{request.path}: {error!r}")
            return "other"
        if leave_at >= 0:
            return "cut off"
        if got != self._right[i]:
            say(f"{request.path}: {got!r} instead of {self._right[i]!r}")
            return "wrong"
        return "whole"
