"""What recall costs in time: the page docs/results/recall.md.

All caches are loaded in one process and take turns, backwards in every second round. A round reads
the text, asks a question behind it, and asks it again when the system's page cache has been emptied
("cold", for root on Linux): each time what came behind the text is taken back. Then --tokens are
written. Medians over the rounds; caches as of `edgekv-lab recall`.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median

from edgekv.errors import BadInput
from edgekv_lab.experiments import recall
from edgekv_lab.experiments.experiment import ROUNDS, Options, experiment, say, sheet, tokens
from edgekv_lab.experiments.recall import Asker, Question

COLUMNS = (
    ("cache", ""),
    ("text, s", "{:.1f}"),
    ("question, s", "{:.2f}"),
    ("cold, s", "{:.2f}"),
    ("tokens/s", "{:.1f}"),
)
DROP = Path("/proc/sys/vm/drop_caches")
DONTNEED = 4  # sys/mman.h


@experiment(*recall.asked("0.2,0.05,0.05+0,0.05+0.05"), ROUNDS, tokens(64, "an answer"))
def command(o: Options) -> None:
    if not os.access(DROP, os.W_OK):
        raise BadInput(f"{DROP} cannot be written: run this as root on Linux")
    askers = {cache: recall.asker(o, cache) for cache in o.caches}
    (asked, *_) = recall.questions(o, askers[o.caches[0]].llm)
    found: dict[str, list[list[float]]] = defaultdict(list)
    for i in range(o.rounds):
        for cache in o.caches[:: -1 if i % 2 else 1]:
            found[cache].append(measured(askers[cache], asked, o.tokens))
            say(cache, *found[cache][-1])
    with sheet(*COLUMNS) as table:
        for cache, rounds in found.items():
            table.add(cache, *(median(values) for values in zip(*rounds)))
            table.samples.append({"cache": cache, "rounds": rounds})


def measured(asker: Asker, asked: Question, n_tokens: int) -> list[float]:
    """The columns of one round."""

    def write() -> None:
        token = int(asker.ask(asked.rest).argmax())
        begin = time.perf_counter()
        for _ in range(n_tokens):
            token = int(asker.step([token]).argmax())
        spent.append(n_tokens / (time.perf_counter() - begin))

    spent = [seconds(lambda: asker.read(asked.text))]
    asker.ask(asked.rest)
    spent.append(seconds(lambda: asker.ask(asked.rest)))
    empty_page_cache()
    spent.append(seconds(lambda: asker.ask(asked.rest)))
    write()
    return spent


def seconds(what: Callable[[], object]) -> float:
    begin = time.perf_counter()
    what()
    return time.perf_counter() - begin


def empty_page_cache() -> None:
    """Also of files without a name that this process maps: pages that are in use would stay."""
    libc = ctypes.CDLL(None, use_errno=True)
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, kind, *_, last = line.split()
        if kind == "r--s" and last == "(deleted)":
            begin, end = (int(x, 16) for x in span.split("-"))
            libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), DONTNEED)
    os.sync()
    DROP.write_text("3")
