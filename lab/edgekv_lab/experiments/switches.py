"""What `edgekv serve` without a model does when models take turns.

Three links to the model's file are three models. In turns: each one is asked three times, and has
its conversation back from --cache-disk, while --models-memory is one and a half times what the
first one took. Crash: with two models loaded one's process is killed (kill -9). Switches: the
three in turns within the same memory; what the router's own process takes along the way. Without
-m the model is one of the tests' tiny ones.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil

from edgekv.commands.declare import option
from edgekv.commands.values import COUNT
from edgekv.errors import EdgeKVError
from edgekv_lab.experiments.checkout import root
from edgekv_lab.experiments.experiment import Options, experiment, sheet
from edgekv_lab.experiments.server import MIB, PATIENCE, Server, serving

NAMES = ("one", "two", "three")
QUESTIONS = ("the rain in the air is an art " * 40, "abc", "def")
LOOK_S = 0.02


@experiment(
    option("-m --model", help="A file; without it a tiny one of the tests."),
    option("--switches", type=COUNT, default=100, help="How often models take turns."),
    option("--words", default="", help="Further ones of the server's command line."),
)
def command(o: Options) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        path = Path(o.model or tiny(place)).resolve()
        (place / "models").mkdir()
        for name in NAMES:
            (place / "models" / f"{name}.gguf").hardlink_to(path)
        words = ["--models-dir", str(place / "models"), "-c", "2048", *o.words.split()]
        within = ["--models-memory", str(show_memory(words))]
        show_turns([*words, *within, "--cache-disk", str(place / "disk")])
        show_crash(words)
        show_switches([*words, *within], o.switches)


def tiny(folder: Path) -> str:
    root()
    from tests import models

    return str(models.write("llama-gqa", folder))


Messages = list[dict[str, str]]


def ask(server: Server, name: str, messages: Messages) -> tuple[int, int]:
    """Tokens of the prompt, and those that were known before. The answer joins the messages."""
    body = {"model": name, "messages": messages, "max_tokens": 4, "temperature": 0}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE)
    if reply.status_code != 200:
        raise EdgeKVError(f"{name} does not answer: {reply.text}\n{server.log()}")
    said = reply.json()
    messages.append({"role": "assistant", "content": said["choices"][0]["message"]["content"]})
    usage = said["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def children(server: Server) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children()


def rss(process: psutil.Process) -> int:
    with suppress(psutil.Error):
        return int(process.memory_info().rss)
    return 0


@contextmanager
def peak_of_children(server: Server) -> Iterator[list[int]]:
    """A `with` block behind which the list has one number: most bytes that all had together."""
    most, is_over = [0], threading.Event()

    def look() -> None:
        while not is_over.wait(LOOK_S):
            most[0] = max(most[0], sum(map(rss, children(server))))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield most
    finally:
        is_over.set()
        thread.join()


def show_memory(words: list[str]) -> int:
    """What three models may take, in bytes."""
    with serving(words) as server:
        ask(server, NAMES[0], [{"role": "user", "content": "abc"}])
        (alone,) = map(rss, children(server))
    limit = alone * 3 // 2
    print(f"\nOne model takes {alone / MIB:.0f} MiB, three may take {limit / MIB:.0f} MiB.\n")
    return limit


def show_turns(words: list[str]) -> None:
    talks: dict[str, Messages] = {name: [] for name in NAMES}
    columns = [(f"{name}: tokens, known", "{:,}, {:,}") for name in NAMES]
    with (
        serving(words) as server,
        peak_of_children(server) as most,
        sheet(("turn", "{}"), *columns, name="turns") as table,
    ):
        for turn, question in enumerate(QUESTIONS, 1):
            cells = []
            for name, talk in talks.items():
                talk.append({"role": "user", "content": question})
                cells.append(ask(server, name, talk))
            table.add(turn, *cells)
    print(f"\nAll processes of models took {most[0] / MIB:.0f} MiB at most.\n")


def show_crash(words: list[str]) -> None:
    with serving(words) as server:
        for name in NAMES[:2]:
            ask(server, name, [{"role": "user", "content": "abc"}])
        first, second = sorted(children(server), key=psutil.Process.create_time)
        first.kill()
        ask(server, NAMES[1], [{"role": "user", "content": "def"}])
        stays = second.is_running()
        ask(server, NAMES[0], [{"role": "user", "content": "def"}])
    print(f"One process was killed: the other {'stayed' if stays else 'ended'}, both answer.\n")


def show_switches(words: list[str], n: int) -> None:
    with (
        serving(words) as server,
        sheet(*SWITCHES, name="switches") as table,
    ):
        begin, marks = time.monotonic(), {1, n // 10, n // 2, n}
        for i in range(1, n + 1):
            ask(server, NAMES[i % len(NAMES)], [{"role": "user", "content": "abc"}])
            if i in marks:
                own = rss(psutil.Process(server.process.pid)) / MIB
                others = sum(map(rss, children(server))) / MIB
                each = (time.monotonic() - begin) / i
                table.add(i, own, others, each)


SWITCHES = (
    ("switches", "{}"),
    ("router MiB", "{:.1f}"),
    ("models' MiB", "{:.0f}"),
    ("seconds a switch", "{:.1f}"),
)
