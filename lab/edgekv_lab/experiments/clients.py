"""Tokens a second of several clients whose answers are written at once, beside another server.

Each client has asked about a text of its own, so the server holds its prompt; then all ask again at
once. Tokens a second are those of all from the second token of the first answer on, until the last
one ends. RSS is the server's at its end, with the model. --peer-path: a folder that has xllamacpp
(`pip install --target`); its loop, which is llama-server's, has a full f16 cache with a slot for
each client.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

from edgekv.commands.declare import option
from edgekv.commands.values import COUNT
from edgekv.errors import EdgeKVError
from edgekv_lab.experiments.experiment import Options, experiment, many, say, sheet, tokens
from edgekv_lab.experiments.peer import PEER_PATH, serving_peer
from edgekv_lab.experiments.prompts import text_tokens
from edgekv_lab.experiments.server import MIB, PATIENCE, SERVED, Server, prepare, serving, words_of

DATA = b"data: "
APART = 97
"""Tokens between the beginnings of two clients' texts."""


@experiment(
    *SERVED,
    option("--clients", default="1,2,4,8", callback=many(int), help="Numbers of clients."),
    tokens(2000, "each text"),
    option("-n --n-predict n_predict", type=COUNT, default=96, help="Tokens of an answer."),
    option("--words", default="", help="Further ones of edgekv's command line."),
    PEER_PATH,
)
def command(o: Options) -> None:
    prepare(o.model)
    text = text_tokens(o.model, o.tokens + max(o.clients) * APART)
    sides = ["edgekv", *["llama-server"] * bool(o.peer_path)]
    columns = ("clients", "{}"), ("server", ""), ("tokens/s", "{:.1f}"), ("RSS, MiB", "{:.0f}")
    with sheet(*columns) as table:
        for n in o.clients:
            prompts = [text[i * APART :][: o.tokens] for i in range(n)]
            for name in sides:
                with started(o, name, n) as server:
                    speed = together(server, prompts, o.n_predict)
                    table.add(n, name, speed, server.rss() / MIB)


@contextmanager
def started(o: Options, name: str, n: int) -> Iterator[Server]:
    n_ctx = o.tokens + 2 * o.n_predict + 64
    if name == "edgekv":
        words = ["-c", str(n_ctx), "--parallel", str(n), *o.words.split()]
        with serving(words_of(o, *words)) as server:
            yield server
        return
    values: dict[str, Any] = {"n_ctx": n * n_ctx, "n_parallel": n, "n_threads": o.threads}
    with serving_peer(o.peer_path, model=o.model, **values) as server:
        yield server


def together(server: Server, prompts: list[list[int]], n_predict: int) -> float:
    """Tokens a second."""
    for i, prompt in enumerate(prompts):
        said = answer(server, prompt, 1, i)
        say(f"client {i + 1} of {len(prompts)}: {said[-1][1]['timings']['prompt_n']} tokens read")
    with ThreadPoolExecutor(len(prompts)) as pool:
        jobs = [pool.submit(answer, server, x, n_predict, i) for i, x in enumerate(prompts)]
        answers = [job.result() for job in jobs]
    begin, end = min(x[0][0] for x in answers), max(x[-1][0] for x in answers)
    n_written = [x[-1][1]["timings"]["predicted_n"] for x in answers]
    return (sum(n_written) - 1) / (end - begin)


def answer(server: Server, prompt: list[int], n: int, slot: int) -> list[tuple[float, Any]]:
    """The first and the last of its events, and when they came. What a client works is taken from
    the server, on the same processors: no event is parsed before the answer's end. Raises OSError,
    HTTPException and EdgeKVError.
    """
    body = {"prompt": prompt, "n_predict": n, "stream": True, "ignore_eos": True}
    body |= {"temperature": 0, "cache_prompt": True, "id_slot": slot}
    to = urlsplit(server.url)
    connection = HTTPConnection(to.hostname or "", to.port, PATIENCE)
    with closing(connection):
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/completion", json.dumps(body), headers)
        said = connection.getresponse()
        if said.status != 200:
            raise EdgeKVError(f"the server answers {said.status}: {said.read().decode()}")
        found = [(time.perf_counter(), line) for line in said if line.startswith(DATA)]
    return [(at, json.loads(line.removeprefix(DATA))) for at, line in (found[0], found[-1])]
