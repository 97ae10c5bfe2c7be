"""Whether a request has one answer, however often and after whatever it is asked.

    python benchmarks/same_answer.py [-m MODEL] [--prompts 200] [--longest 3000] [--tokens 24]
                                     [--caches "1:f16;0.2:auto"] [--threads 1]

Prompts of 1 to --longest tokens, their lengths spread by logarithm, are asked greedily in ten ways:
at first, at once again, after the others, read anew, in turns with others, after a restart with
--cache-disk, with so little --cache-ram that all wait on disk, or are forgotten. Each answer is
compared with that of a server that remembers nothing and answers one at a time. The cells are
answers that have other tokens / only other log-probabilities, in any bit. --caches: ratio and cache
type; auto: no type is named. Markdown goes to standard output, progress and what differs to
standard error.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(Path(__file__).resolve().parent)]
sys.path.append(str(ROOT))

from process import heading  # noqa: E402
from served import PATIENCE, Server, prepare, serving, tokens_of  # noqa: E402

from edgekv_lab.eval.sentences import sentences  # noqa: E402

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


def main() -> None:
    options = parse()
    prepare(options.model)
    print(heading("same_answer.py"))
    print(f"| ratio | cache | prompts | {' | '.join(WAYS)} |\n| ---: | ---{' | ---:' * 11} |")
    for cache in options.caches.split(";"):
        ratio, kind = cache.split(":")
        found = Cache(options, ratio, kind).measured()
        n = options.prompts
        cells = (f"{found[way].n_answers} / {found[way].n_logits}" for way in WAYS)
        print(f"| {ratio} | {kind} | {n} | {' | '.join(cells)} |", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", default="demo")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--longest", type=int, default=3000, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=24, help="of an answer")
    parser.add_argument("--caches", default=CACHES)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


@dataclass
class Difference:
    """How many answers of a way have other tokens, or only other logits."""

    n_answers: int = 0
    n_logits: int = 0


class Cache:
    """A ratio and a cache type, and the servers that have them."""

    def __init__(self, options: argparse.Namespace, ratio: str, kind: str) -> None:
        self._options, self._name = options, f"{ratio}:{kind}"
        words = ["-m", options.model, "--kv-ratio", ratio, "-t", str(options.threads)]
        self._words = [*words, "-c", str(options.longest + 512), "--max-queue", "1000"]
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
        print(f"{time.strftime('%H:%M:%S')} {self._name} {way}", file=sys.stderr, flush=True)
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
        print(
            f"{self._name} {way}: prompt {i} of {len(self._prompts[i])} tokens has other"
            f" {'tokens' if is_other else 'log-probabilities'}, from token {first} on",
            file=sys.stderr,
            flush=True,
        )


def prompts_of(server: Server, options: argparse.Namespace) -> Iterator[list[int]]:
    """Each is the beginning of a text of its own."""
    for i in range(options.prompts):
        n = round(options.longest ** (i / max(options.prompts - 1, 1)))
        text = " ".join(islice(sentences(random.Random(i)), n // 8 + 2))
        yield tokens_of(server, text)[:n]


if __name__ == "__main__":
    main()
