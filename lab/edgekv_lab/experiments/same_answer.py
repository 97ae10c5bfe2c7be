"""Whether a request has one answer, however often and after whatever it is asked.

Prompts of 1 to --longest tokens, their lengths spread by logarithm, are asked greedily in ten ways:
at first, at once again, after the others, read anew, in turns with others, after a restart with
--cache-disk, with so little --cache-ram that all wait on disk, or are forgotten. Each answer is
compared with that of a server that remembers nothing and answers one at a time. The cells are
answers that have other tokens / only other log-probabilities, in any bit. --caches: ratio and cache
type; auto: no type is named. What differs goes to standard error.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import httpx

from edgekv.commands.declare import option
from edgekv.commands.values import COUNT
from edgekv_lab.eval.sentences import sentences
from edgekv_lab.experiments.experiment import (
    MODEL,
    Options,
    experiment,
    many,
    say,
    sheet,
    tokens,
)
from edgekv_lab.experiments.server import PATIENCE, Server, prepare, serving, tokens_of

CACHES = "0.2:auto;0.1:auto;1:f16;0.2:f16;0.1:f16;1:q8_0;0.2:q8_0;0.1:q8_0"
LITTLE = ("--cache-ram", "1")
"""MiB: a few short conversations."""
WAYS = (
    "first",
    "at once again",
    "after the others",
    "read anew",
    "in turns",
    "after a restart",
    "then in turns",
    "from disk",
    "from disk, in turns",
    "forgotten, in turns",
)


@dataclass(frozen=True)
class Answer:
    """logprobs: of each token, from the model's own logits."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


@experiment(
    MODEL,
    option("--prompts", type=COUNT, default=200, help="Prompts."),
    option("--longest", type=COUNT, default=3000, help="Tokens of a prompt at most."),
    tokens(24, "an answer"),
    option("--caches", default=CACHES, callback=many(str, ";"), help="RATIO:TYPE, between ;."),
    option("-t --threads", type=COUNT, default=1, help="CPU threads."),
)
def command(o: Options) -> None:
    prepare(o.model)
    columns = ("ratio", "{:g}"), ("cache", ""), ("prompts", "{:,}")
    with sheet(*columns, *((way, "{} / {}") for way in WAYS)) as table:
        for cache in o.caches:
            ratio, kind = cache.split(":")
            found = Cache(o, ratio, kind).measured()
            counts = ([found[way].n_answers, found[way].n_logits] for way in WAYS)
            table.add(float(ratio), kind, o.prompts, *counts)


@dataclass
class Difference:
    """How many answers of a way have other tokens, or only other logits."""

    n_answers: int = 0
    n_logits: int = 0


class Cache:
    """A ratio and a cache type, and the servers that have them."""

    def __init__(self, o: Options, ratio: str, kind: str) -> None:
        self._options, self._name = o, f"{ratio}:{kind}"
        words = ["-m", o.model, "--kv-ratio", ratio, "-t", str(o.threads)]
        self._words = [*words, "-c", str(o.longest + 512), "--max-queue", "1000"]
        if kind != "auto":
            self._words += ["-ctk", kind, "-ctv", kind]
        self._prompts: list[list[int]] = []
        self._right: list[Answer] = []
        self._found = {way: Difference() for way in WAYS}

    def measured(self) -> dict[str, Difference]:
        with serving([*self._words, "-np", "1", "--cache-ram", "0"]) as server:
            self._prompts = list(prompts_of(server, self._options))
            self._right = [self._ask(server, i, is_fresh=True) for i in range(len(self._prompts))]
        with tempfile.TemporaryDirectory() as folder:
            on_disk = ["--cache-disk", folder]
            with self._asking(*on_disk) as (one, turns):
                one("first", "at once again")
                one("after the others")
                one("read anew")
                turns("in turns")
            with self._asking(*on_disk) as (one, turns):
                one("after a restart")
                turns("then in turns")
            with self._asking(*on_disk, *LITTLE) as (one, turns):
                one("from disk")
                turns("from disk, in turns")
            with self._asking(*LITTLE) as (one, turns):
                turns("forgotten, in turns")
        return self._found

    @contextmanager
    def _asking(self, *more: str) -> Iterator[tuple[Callable[..., None], Callable[[str], None]]]:
        """Yields two functions that ask a server all prompts: one after the other, each in all the
        ways that are named; and of four clients at a time.
        """
        with serving([*self._words, *more]) as server, ThreadPoolExecutor(4) as pool:

            def one(*ways: str) -> None:
                for i in self._order(ways[0]):
                    for way in ways:
                        answer = self._ask(server, i, is_fresh=way == "read anew")
                        self._compare(way, i, answer)

            def turns(way: str) -> None:
                asked = [(i, pool.submit(self._ask, server, i)) for i in self._order(way)]
                for i, answer in asked:
                    self._compare(way, i, answer.result())

            yield one, turns

    def _order(self, way: str) -> list[int]:
        say(f"{time.strftime('%H:%M:%S')} {self._name} {way}")
        order = list(range(len(self._prompts)))
        random.Random(way).shuffle(order)
        return order

    def _ask(self, server: Server, i: int, is_fresh: bool = False) -> Answer:
        body = {
            "prompt": self._prompts[i],
            "n_predict": self._options.tokens,
            "temperature": 0,
            "n_probs": 1,
            "return_tokens": True,
            "cache_prompt": not is_fresh,
        }
        said = httpx.post(f"{server.url}/completion", json=body, timeout=PATIENCE)
        found = said.raise_for_status().json()
        probabilities = found.get("completion_probabilities", ())
        return Answer(tuple(found["tokens"]), tuple(one["logprob"] for one in probabilities))

    def _compare(self, way: str, i: int, answer: Answer) -> None:
        right = self._right[i]
        if answer == right:
            return
        is_other = answer.tokens != right.tokens
        self._found[way].n_answers += is_other
        self._found[way].n_logits += not is_other
        pairs = zip(answer.logprobs, right.logprobs, strict=False)
        first = next((n for n, (mine, its) in enumerate(pairs) if mine != its), -1)
        say(
            f"{self._name} {way}: prompt {i} of {len(self._prompts[i])} tokens has other"
            f" {'tokens' if is_other else 'log-probabilities'}, from token {first} on"
        )


def prompts_of(server: Server, o: Options) -> Iterator[list[int]]:
    """Each is the beginning of a text of its own."""
    for i in range(o.prompts):
        n = round(o.longest ** (i / max(o.prompts - 1, 1)))
        text = " ".join(islice(sentences(random.Random(i)), n // 8 + 2))
        yield tokens_of(server, text)[:n]
