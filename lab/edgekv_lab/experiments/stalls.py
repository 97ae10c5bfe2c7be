"""What `edgekv serve` does to others while somebody asks for too much.

Each row is a server of its own. Another client's stream runs, a third one asks for /health, and a
fourth one a short question, again and again, from addresses and a process of their own: the longest
time without a token, and until an answer; tokens a second. RSS is that before, and the most until
the answers came. The end: the same once more, and SIGTERM after a second. --scale: a share of sizes
and counts, for a quick look; --only: rows whose name has these words.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import re
import resource
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from edgekv.commands.declare import option
from edgekv.commands.values import Finite
from edgekv_lab.eval.sentences import sentences
from edgekv_lab.experiments.experiment import Options, experiment, say, sheet
from edgekv_lab.experiments.server import (
    MIB,
    PATIENCE,
    SERVED,
    Server,
    tokens_of,
    words_of,
)

STREAMS, LOOKS, ASKS, FLOODS = "127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5"
"""Addresses of clients."""
WATCHED = ("stream", "/health", "question")
WARM_S = 2.0


# ---- clients


def asked(
    url: str,
    method: str,
    path: str,
    body: bytes = b"",
    address: str = FLOODS,
    patience: float = PATIENCE,
    **headers: str,
) -> HTTPResponse:
    """An answer whose body is not read. Raises OSError and HTTPException."""
    to = urlsplit(url)
    connection = HTTPConnection(to.hostname or "", to.port, patience, (address, 0))
    connection.request(method, path, body, {"Connection": "close", **headers})
    return connection.getresponse()


def post(server: Server, path: str, body: bytes, patience: float, **headers: str) -> str:
    """An answer's status."""
    try:
        answer = asked(server.url, "POST", path, body, FLOODS, patience, **headers)
        answer.read()
    except TimeoutError:
        return "none"
    except (OSError, HTTPException):
        return "cut off"
    return str(answer.status)


class Watched:
    """What a client waits for."""

    def __init__(self) -> None:
        self.longest_s, self.n = 0.0, 0
        self._since: float | None = None

    def begin(self) -> None:
        """It waits; it may have done so before."""
        self._since = self._since or time.monotonic()

    def end(self) -> None:
        self.longest_s, self.n, self._since = self._longest_s(), self.n + 1, None

    def taken(self) -> tuple[float, int]:
        """The longest wait since the last call, and how many had an end."""
        found = self._longest_s(), self.n
        self.longest_s, self.n = 0.0, 0
        return found

    def _longest_s(self) -> float:
        since = self._since or time.monotonic()
        return max(self.longest_s, time.monotonic() - since)


def watch(url: str, pipe: Any) -> None:
    """A process: clients who want little. It answers what is sent to it with what they saw since
    the last time.
    """
    seen = {name: Watched() for name in WATCHED}
    question = {"prompt": "Hello", "n_predict": 2, "temperature": 0}
    endless = {"prompt": "Once upon a time", "n_predict": 4000, "ignore_eos": True, "stream": True}

    def look() -> None:
        wanted("GET", "/health", b"", LOOKS).read()

    def ask() -> None:
        wanted("POST", "/completion", json.dumps(question).encode(), ASKS).read()

    def stream() -> None:
        for line in wanted("POST", "/completion", json.dumps(endless).encode(), STREAMS):
            if line.startswith(b"data: "):
                seen["stream"].end()
                seen["stream"].begin()

    def wanted(method: str, path: str, body: bytes, address: str) -> HTTPResponse:
        answer = asked(url, method, path, body, address)
        if answer.status != 200:
            raise HTTPException(answer.status)
        return answer

    def again(name: str, what: Callable[[], None], pause_s: float) -> None:
        while True:
            seen[name].begin()
            with suppress(OSError, HTTPException):  # it waits on
                what()
                seen[name].end()
            time.sleep(pause_s)

    for job in (("stream", stream, 0.05), ("/health", look, 0.02), ("question", ask, 0.2)):
        threading.Thread(target=again, args=job, daemon=True).start()
    while pipe.recv():
        pipe.send({name: one.taken() for name, one in seen.items()})


# ---- a row

Act = Callable[[Server, Options], str]


@dataclass(frozen=True)
class Row:
    """act: asks for too much, and returns what was answered; words: of the server's command line;
    before: done first, returns further words; most_files: `ulimit -n`; largest_file: bytes.
    """

    name: str
    act: Act
    words: tuple[str, ...] = ()
    before: Callable[[Options, str], list[str]] | None = None
    most_files: int = 0
    largest_file: int = 0


def measured(row: Row, o: Options) -> list[Any]:
    """The row's cells."""

    def limit() -> None:
        if row.most_files:
            resource.setrlimit(resource.RLIMIT_NOFILE, (row.most_files, row.most_files))
        if row.largest_file:
            resource.setrlimit(resource.RLIMIT_FSIZE, (row.largest_file, row.largest_file))

    with tempfile.TemporaryDirectory() as folder:
        more = row.before(o, folder) if row.before else []
        server = Server(words_of(o, *row.words, *more), preexec_fn=limit)
        with watching(server) as look:
            time.sleep(WARM_S)
            look()
            before, begin = server.rss(), time.monotonic()
            with ThreadPoolExecutor(1) as pool:
                acting, most = pool.submit(row.act, server, o), before
                while not acting.done():
                    time.sleep(0.05)
                    most = max(most, server.rss())
            seconds, seen = time.monotonic() - begin, look()
            threading.Thread(target=row.act, args=(server, o), daemon=True).start()
            time.sleep(1)
            end_s = server.end(signal.SIGTERM)
    stream, health, question = (seen[name] for name in WATCHED)
    times = seconds, stream[0], stream[1] / seconds, health[0], question[0]
    sizes = before / MIB, most / MIB
    return [row.name, acting.result(), *times, *sizes, end_s, server.log().count("Traceback")]


@contextmanager
def watching(server: Server) -> Iterator[Callable[[], dict[str, tuple[float, int]]]]:
    """Yields a function that returns of each client the longest wait since the last call, and how
    many it had.
    """
    mine, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=watch, args=(server.url, theirs))
    process.start()

    def look() -> dict[str, tuple[float, int]]:
        mine.send(True)
        found: dict[str, tuple[float, int]] = mine.recv()
        return found

    try:
        yield look
    finally:
        process.kill()


def many(statuses: list[str]) -> str:
    return ", ".join(
        f"{n} x {status}" if n > 1 else status for status, n in Counter(statuses).items()
    )


# ---- what is asked for


def text(n_bytes: float) -> str:
    some = " ".join(islice(sentences(random.Random(0)), 1000))
    return (some * int(n_bytes // len(some) + 1))[: int(n_bytes)]


def one(path: str, body: Callable[[float], dict[str, Any]]) -> Act:
    """A request whose body is that of a scale."""

    def act(server: Server, o: Options) -> str:
        return post(server, path, json.dumps(body(o.scale)).encode(), o.patience)

    return act


def eight_chats(server: Server, o: Options) -> str:
    said = {"messages": [{"role": "user", "content": text(20e6 * o.scale)}]}
    body = json.dumps(said).encode()
    with ThreadPoolExecutor(8) as pool:
        asks = [
            pool.submit(post, server, "/v1/chat/completions", body, o.patience) for _ in range(8)
        ]
        return many([one.result() for one in asks])


PATTERN = {"type": "string", "pattern": "^(a?a?a?a?){50}$"}
SLOW = {"prompt": "Write many letters.", "n_predict": 500, "temperature": 0, "json_schema": PATTERN}


def leaves(server: Server, o: Options) -> str:
    """A client goes away amid a slow grammar."""
    said = post(server, "/completion", json.dumps(SLOW).encode(), 1.0)
    time.sleep(5)
    return "it left" if said == "none" else said


TOLD = re.compile(r"edgekv: conversation .*? is (forgotten|not on disk|read again|left out)")
N_BEGUN = 40
"""Letters."""


def long_conversation(o: Options, folder: str) -> list[str]:
    """A folder with a conversation of 60,000 tokens, made anew."""
    words = ["--cache-disk", folder, "-c", "65536"]
    server = Server(words_of(o, *words))
    body = {"prompt": long_tokens(server, o), "n_predict": 2, "temperature": 0}
    said = post(server, "/completion", json.dumps(body).encode(), PATIENCE * 10)
    say(f"the conversation: {said}")
    server.end(signal.SIGTERM)
    return words


def long_tokens(server: Server, o: Options) -> list[int]:
    n = int(60_000 * o.scale)
    return tokens_of(server, text(6 * n))[:n]


def same_text(server: Server, o: Options) -> str:
    """Three prompts of the conversation's text, whose first letters are tokens of their own. The
    client leaves: a prompt is compared with conversations before it is read.
    """
    letters = [token for letter in text(N_BEGUN) for token in tokens_of(server, letter)]
    rest = long_tokens(server, o)[len(tokens_of(server, text(N_BEGUN))) :]
    bodies = [{"prompt": [*letters, *rest, i], "n_predict": 2} for i in range(100, 103)]
    said = [post(server, "/completion", json.dumps(body).encode(), 10) for body in bodies]
    return many(["it left" if one == "none" else one for one in said])


def kept(server: Server, o: Options) -> str:
    """Two clients look at what is kept of a conversation, for ten seconds."""
    talk = {"messages": [{"role": "user", "content": text(6000 * o.scale)}], "max_tokens": 2}
    answer = asked(server.url, "POST", "/v1/chat/completions", json.dumps(talk).encode())
    path = f"/kept?conversation={json.load(answer)['kv']['conversation']}"
    end = time.monotonic() + 10

    def look() -> list[str]:
        found = []
        while time.monotonic() < end:
            looked = asked(server.url, "GET", path)
            looked.read()
            found.append(str(looked.status))
        return found

    with ThreadPoolExecutor(2) as pool:
        return many([x for looks in [pool.submit(look) for _ in range(2)] for x in looks.result()])


def invented_keys(server: Server, o: Options) -> str:
    """30 requests of one client, each with a key of its own and a prompt of some 1,000 tokens."""
    n = int(30 * o.scale)

    def ask(i: int) -> str:
        body = {"prompt": f"{i} {text(4500)}", "n_predict": 16}
        return post(
            server,
            "/completion",
            json.dumps(body).encode(),
            o.patience,
            Authorization=f"Bearer {i}",
        )

    with ThreadPoolExecutor(n) as pool:
        return many(list(pool.map(ask, range(n))))


def idle_connections(server: Server, o: Options) -> str:
    """200 connections without a request, for ten seconds."""
    to = urlsplit(server.url)
    idle = [HTTPConnection(to.hostname or "", to.port, 10) for _ in range(int(200 * o.scale))]
    for connection in idle:
        connection.connect()
    time.sleep(10)
    for connection in idle:
        connection.close()
    return f"{len(idle)} connections"


def many_conversations(o: Options, folder: str) -> list[str]:
    """A folder of 400 conversations, made anew."""
    words = ["--cache-disk", folder, "-c", "2048"]
    server = Server(words_of(o, *words))
    for i in range(int(400 * o.scale)):
        body = {"prompt": f"{i} {text(200)}", "n_predict": 2}
        post(server, "/completion", json.dumps(body).encode(), o.patience)
    server.end(signal.SIGTERM)
    return words


N_TALKS = 12


def talks(server: Server, o: Options) -> str:
    """Prompts one after the other; what the log says of their conversations, and what became of the
    files that were there: none may go.
    """
    files = talk_files(server)
    said = many([talk(server, i, o) for i in range(N_TALKS)])
    lines = Counter(line for line in TOLD.findall(server.log()))
    told = ", ".join(f"{n} {what}" for what, n in sorted(lines.items()))
    n_left = len(files & talk_files(server))
    return f"{said}; {told or 'no line'}; {n_left} of {len(files)} files"


def talk(server: Server, i: int, o: Options) -> str:
    body = {"prompt": f"{i} {text(3000)}", "n_predict": 2}
    return post(server, "/completion", json.dumps(body).encode(), o.patience)


def talk_files(server: Server) -> set[str]:
    """Of its --cache-disk."""
    words = [str(x) for x in server.process.args]  # type: ignore[union-attr]
    return {one.name for one in Path(words[words.index("--cache-disk") + 1]).glob("*.kvtalk")}


def strange_files(o: Options, folder: str) -> list[str]:
    """A folder with conversations of another ratio, and of this one some that are damaged."""
    words = ["-c", "4096", "--cache-ram", "8", "--cache-disk", folder]
    other = Options(**{**vars(o), "kv_ratio": "0.3"})
    for one in (o, other):
        before = set(Path(folder).iterdir())
        server = Server(words_of(one, *words))
        for i in range(N_TALKS):
            talk(server, i, o)
        server.end(signal.SIGTERM)
        if one is o:
            damage(sorted(set(Path(folder).iterdir()) - before))
    return words


def damage(files: list[Path]) -> None:
    """Of four files each the first loses its end, the second all, and the third changes."""
    for i, path in enumerate(files):
        data = path.read_bytes()
        ends = b"x" * min(len(data), 64)
        path.write_bytes([data[: len(data) // 2], b"", data[: -len(ends)] + ends, data][i % 4])


def start(server: Server, o: Options) -> str:
    return f"up after {server.start_s:.1f} s, {server.start_cpu_s:.1f} s of processor"


def nothing(server: Server, o: Options) -> str:
    time.sleep(5)
    return ""


ROWS = (
    Row("nothing", nothing),
    Row(
        "/tokenize with_pieces, 8 MB",
        one("/tokenize", lambda scale: {"content": text(8e6 * scale), "with_pieces": True}),
    ),
    Row(
        "/tokenize with_pieces, 10 MB",
        one("/tokenize", lambda scale: {"content": text(10e6 * scale), "with_pieces": True}),
    ),
    Row(
        "/apply-template, a million messages",
        one(
            "/apply-template",
            lambda scale: {"messages": [{"role": "user", "content": ""}] * int(1e6 * scale)},
        ),
    ),
    Row(
        "/detokenize, 15 million numbers",
        one("/detokenize", lambda scale: {"tokens": [1] * int(15e6 * scale)}),
    ),
    Row(
        "8 chats of 20 MB, --max-queue 0, -c 2048",
        eight_chats,
        ("--max-queue", "0", "-c", "2048"),
    ),
    Row("a pattern ^(a?a?a?a?){50}$", one("/completion", lambda scale: SLOW)),
    Row("the same, its client leaves after 1 s", leaves),
    Row(
        "100,000 stops",
        one(
            "/completion",
            lambda scale: {"prompt": "a", "stop": [f"x{i}" for i in range(int(1e5 * scale))]},
        ),
    ),
    Row(
        "3 prompts of a 60K conversation's text in other tokens",
        same_text,
        before=long_conversation,
    ),
    Row("GET /kept polled by two, 10 s", kept),
    Row("30 requests, each with an invented key", invented_keys),
    Row("200 idle connections, ulimit -n 64, 10 s", idle_connections, most_files=64),
    Row("a start with --cache-disk of 400 conversations", start, before=many_conversations),
    Row("a start without it", start, ("-c", "2048")),
    Row(
        "12 prompts, --cache-disk takes no file above 64 KiB",
        talks,
        ("-c", "4096", "--cache-ram", "8"),
        before=lambda o, folder: ["--cache-disk", folder],
        largest_file=1 << 16,
    ),
    Row(
        "12 prompts, nothing can be written to --cache-disk",
        talks,
        ("-c", "4096", "--cache-ram", "8", "--cache-disk", "/sys/kernel"),
    ),
    Row(
        "12 prompts, --cache-disk has damaged files and those of another ratio",
        talks,
        before=strange_files,
    ),
)
COLUMNS = (
    ("request", ""),
    ("answers", ""),
    ("seconds", "{:.1f}"),
    ("stream's longest gap, s", "{:.2f}"),
    ("tokens/s", "{:.0f}"),
    ("/health at most, s", "{:.2f}"),
    ("question at most, s", "{:.2f}"),
    ("RSS, MiB", "{:,.0f}"),
    ("at most", "{:,.0f}"),
    ("SIGTERM, s", "{:.1f}"),
    ("tracebacks", "{}"),
)
ABOVE_0 = Finite(min=0, min_open=True)


@experiment(
    *SERVED,
    option("--only", default="", help="Rows whose name has these words."),
    option("--scale", type=ABOVE_0, default=1.0, help="Of sizes and counts."),
    option("--patience", type=ABOVE_0, default=300.0, help="Seconds for an answer."),
)
def command(o: Options) -> None:
    with sheet(*COLUMNS) as table:
        for row in ROWS:
            if o.only in row.name:
                say(row.name)
                table.add(*measured(row, o))
