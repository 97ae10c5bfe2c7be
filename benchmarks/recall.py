"""Answers with tokens that are looked up again: the page docs/results/recall.md.

    python benchmarks/recall.py -m MODEL.gguf -f squad.json --lengths 3600 -n 12 -o NAME.json

The questions of `edgekv eval answers` are asked after the text was compressed. The full f16 cache
answers; every other cache is judged by the KL divergence along that answer, at its first token, and
by the share of tokens that are the same. Bytes are those of main memory behind the text, the index
among them. "next word" is the time from the question's end to the answer's second token, less the
first: one token behind the text. A cache is RATIO or RATIO+RECALL, or the cache type of a full one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import numpy as np  # noqa: E402
from process import machine  # noqa: E402

import edgekv  # noqa: E402
from edgekv import llama_cpp  # noqa: E402
from edgekv.base.markdown import table  # noqa: E402
from edgekv.learn.divergence import divergence, log_softmax  # noqa: E402
from edgekv.models.demo import demo_path  # noqa: E402
from edgekv_lab.eval.interval import interval  # noqa: E402
from edgekv_lab.eval.prompt import Prompt, prompt  # noqa: E402
from edgekv_lab.eval.sample import Request  # noqa: E402
from edgekv_lab.eval.tasks import answers  # noqa: E402

FULL = "f16"
KINDS = {"f16": 1, "q8_0": 8, "q4_0": 2}
HEADS = (
    "cache",
    "memory, MiB",
    "share",
    "KL",
    "interval",
    "first token",
    "same token",
    "next word, ms",
)


def load(model: str, n_ctx: int, cache: str, method: str, threads: int) -> Any:
    """cache: see above."""
    how: dict[str, Any] = {"kv_method": method}
    if cache[0].isdigit():
        ratio, _, recall = cache.partition("+")
        how |= {"kv_ratio": float(ratio), "kv_recall": float(recall or 0)}
    else:
        kind = KINDS[cache]
        how = {"kv_method": "full", "type_k": kind, "type_v": kind, "flash_attn": True}
    return edgekv.Llama(model, n_ctx=n_ctx, n_threads=threads, verbose=False, **how)


class Asker:
    """A model with one cache, which is asked question after question behind the same text."""

    def __init__(self, llm: Any) -> None:
        self.llm, self.n = llm, 0

    def read(self, text: Sequence[int]) -> None:
        self.llm.reset()
        self.llm.eval(text)
        self.n = len(text)

    def ask(self, question: Sequence[int]) -> np.ndarray:
        """Logits [n_vocab] behind the text and a question: what came behind the text is taken
        back."""
        self.llm._ctx.kv_cache_seq_rm(-1, self.n, -1)
        self.llm.n_tokens = self.n
        return self.step(question)

    def n_bytes(self) -> tuple[int, int]:
        """Bytes of the text's rows in memory, and of the full f16 cache's."""
        stats = self.llm.kv_stats()
        return stats.n_bytes_used, stats.n_bytes_full

    def step(self, tokens: Sequence[int]) -> np.ndarray:
        self.llm.eval(tokens)
        return np.ctypeslib.as_array(self.llm._ctx.get_logits_ith(-1), (self.llm.n_vocab(),)).copy()


Answer = tuple[list[int], np.ndarray]


def of_full(asker: Asker, question: Sequence[int], most: int) -> Answer:
    """The full cache's answer, and the log-probabilities it was chosen by."""
    vocab = llama_cpp.llama_model_get_vocab(asker.llm._model.model)
    logits, tokens, found = asker.ask(question), list[int](), []
    while True:
        found.append(logits)
        tokens.append(int(logits.argmax()))
        if len(tokens) == most or llama_cpp.llama_vocab_is_eog(vocab, tokens[-1]):
            return tokens, log_softmax(np.array(found))
        logits = asker.step(tokens[-1:])


def judged(
    asker: Asker, question: Sequence[int], answer: Answer
) -> tuple[np.ndarray, float, float]:
    """KL of each token, share of the same ones, seconds of a token."""
    tokens, whole = answer
    found = [asker.ask(question)]
    begin = time.perf_counter()
    for token in tokens[:-1]:
        found.append(asker.step([token]))
    took = (time.perf_counter() - begin) / max(len(tokens) - 1, 1)
    got = log_softmax(np.array(found))
    return divergence(whole, got), float((got.argmax(1) == np.array(tokens)).mean()), took


def texts(prompts: Sequence[Prompt]) -> Iterator[tuple[tuple[int, ...], list[tuple[int, Prompt]]]]:
    for text, some in groupby(enumerate(prompts), key=lambda x: x[1].text):
        yield text, list(some)


def row(name: str, asker: Asker, prompts: Sequence[Prompt], whole: Sequence[Answer]) -> list[Any]:
    kl, first, same, took, used, full = [], [], [], [], 0, 1
    for text, some in texts(prompts):
        asker.read(text)
        used, full = asker.n_bytes()
        for i, one in some:
            far, alike, seconds = judged(asker, one.rest, whole[i])
            kl.append(float(far.mean()))
            first.append(float(far[0]))
            same.append(alike)
            took.append(seconds)
    low, high = interval(kl, np.inf, hits=False)
    return [
        name,
        used / 2**20,
        100 * used / full,
        float(np.mean(kl)),
        [low, high],
        float(np.mean(first)),
        100 * float(np.mean(same)),
        1e3 * float(np.median(took)),
    ]


def options(about: str, caches: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("-f", "--file", action="append", required=True)
    parser.add_argument("-n", type=int, default=12)
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--lengths", type=int, default=3600)
    parser.add_argument("--method", default="auto")
    parser.add_argument("--caches", default=caches)
    parser.add_argument("-o", "--output")
    o = parser.parse_args()
    o.model = str(demo_path()) if o.model == "demo" else o.model
    return o


def asker(o: argparse.Namespace, cache: str) -> Asker:
    return Asker(load(o.model, o.lengths + 512, cache, o.method, o.threads))


def main() -> None:
    measure(options(__doc__ or "", "q8_0,q4_0,0.2,0.1,0.05,0.2+0.05,0.1+0.05,0.1+0.02"), asker)


def measure(o: argparse.Namespace, make: Callable[[argparse.Namespace, str], Asker]) -> None:
    """Print the table of o.caches, each as `make` makes it."""
    full = make(o, FULL)
    llm = full.llm

    def tokenize(text: str) -> list[int]:
        return llm.tokenize(text.encode(), add_bos=False)

    samples = answers.samples(Request(0, o.n, tokenize, (o.lengths,), tuple(o.file)))
    prompts = [prompt(llm, sample, False, False) for sample in samples]
    whole: list[Answer] = []
    for text, some in texts(prompts):
        full.read(text)
        whole += [of_full(full, one.rest, answers.ANSWER_TOKENS) for _, one in some]
    rows = [row(f"full {FULL}", full, prompts, whole)]
    llm.close()
    for cache in o.caches.split(","):
        one = make(o, cache)
        name = f"full {cache}" if cache in KINDS else cache
        rows.append(row(name, one, prompts, whole))
        one.llm.close()
        print(rows[-1], file=sys.stderr, flush=True)
    forms = ("", "{:.1f}", "{:.1f} %", "{:.4f}", "{:.4f} to {:.4f}", "{:.4f}", "{:.1f} %", "{:.0f}")
    cells = [
        [
            form.format(*x) if isinstance(x, list) else (form or "{}").format(x)
            for form, x in zip(forms, r)
        ]
        for r in rows
    ]
    print(table(list(HEADS), cells, HEADS[:1]), end="")
    if o.output:
        found = {"columns": list(zip(HEADS, forms)), "rows": rows, "machine": machine()}
        Path(o.output).write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
