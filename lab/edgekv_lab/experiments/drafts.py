"""Drafts: tokens a second with and without them, in answers that repeat their prompt, and in one.

Both sides write the same answers in turns, in this process, at temperature 0 or with one seed; a
round is all tasks. `same` is how many tokens of the answers are the same from their beginning. With
`--rows` the time of a pass with 1 to 64 tokens is measured instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

import edgekv
import edgekv.llama_cpp as llama_cpp
from edgekv.chat.completion import chat_of
from edgekv.commands.declare import option
from edgekv.commands.values import COUNT, SHARE
from edgekv_lab.experiments.checkout import root
from edgekv_lab.experiments.experiment import (
    MODEL,
    THREADS,
    Options,
    Sheet,
    experiment,
    sheet,
    tokens,
)

NAMES = "Ada Bo Cleo Dan Eva Finn Gus Hana Ivo Jo Kim Lea Max Nora Otto Pia Quin Rosa Sam Tess"


def code() -> str:
    names = "snapkv h2o tova keydiff knorm late expected cake".split()
    folder = root() / "edgekv" / "methods"
    return "\n\n".join((folder / f"{name}.py").read_text() for name in names)


def rows() -> str:
    rng, names = np.random.default_rng(0), NAMES.split()
    lines = [
        f"{i},{names[rng.integers(20)]},{rng.integers(18, 90)},{rng.integers(1000, 9999)}"
        for i in range(1, 121)
    ]
    return "\n".join(["id,name,age,code", *lines])


TASKS: dict[str, Callable[[], str]] = {
    "edit of code": lambda: f"{code()}\n\nWrite this code again, with `score` renamed to `worth`.",
    "JSON of a table": lambda: f"{rows()}\n\nWrite these rows as a JSON list of objects.",
    "summary": lambda: (
        f"{(root() / 'docs' / 'architecture.md').read_text()[:12000]}\n\nSummarise this text"
        " section by section, with its most important sentences word for word."
    ),
    "chat": lambda: "Tell a story about a lighthouse keeper who finds an old radio.",
    "chat, drawn": lambda: "Tell a story about a lighthouse keeper who finds an old radio.",
    "walk, drawn": lambda: "Describe a walk through a market in the morning.",
    "advice, drawn": lambda: "What should somebody know who moves to a new city?",
}
DRAWN = dict.fromkeys(("chat, drawn", "walk, drawn", "advice, drawn"), 1.0)
"""Temperatures above 0: such an answer does not repeat itself."""


def load(o: Options, **more: Any) -> Any:
    return edgekv.Llama(
        o.model,
        n_ctx=o.n_ctx,
        n_threads=o.threads,
        n_threads_batch=o.threads,
        kv_ratio=o.kv_ratio,
        seed=1,
        verbose=False,
        **more,
    )


def written(llm: Any, prompt: list[int], n: int, temp: float) -> tuple[list[int], float]:
    """Tokens of an answer, and seconds from the first to the last."""
    llm.reset()
    llm.set_seed(1)
    answer, tokens = llm.generate(prompt, temp=temp), list[int]()
    vocab, begin = llama_cpp.llama_model_get_vocab(llm.model), 0.0
    for token in answer:
        begin = begin or time.perf_counter()
        if len(tokens) == n or llama_cpp.llama_vocab_is_eog(vocab, token):
            break
        tokens.append(token)
    seconds = time.perf_counter() - begin
    answer.close()
    return tokens, seconds


def compare(o: Options, table: Sheet) -> None:
    sides = [load(o), load(o, spec_type="ngram-simple")]
    for name, text in TASKS.items():
        if o.task and o.task not in name:
            continue
        chat = chat_of([{"role": "user", "content": text()}])
        prompt = sides[0].chat_template.prompt(chat).tokens[-o.n_ctx + o.tokens + 8 :]
        speeds, said = [], []
        for _ in range(o.n):
            said = [written(llm, prompt, o.tokens, DRAWN.get(name, 0.0)) for llm in sides]
            speeds.append([len(tokens) / seconds for tokens, seconds in said])
        without, with_them = np.median(speeds, axis=0)
        a, b = (tokens for tokens, _ in said)
        same = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
        speed = float(without), float(with_them), float(with_them / without)
        table.add(name, len(prompt), *speed, [same, len(a)])


def passes(o: Options, table: Sheet) -> None:
    llm = load(o)
    text = llm.tokenize((code() + rows()).encode())
    llm.eval(text[:1500])
    begin = llm.n_tokens
    for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64):
        took = []
        for i in range(o.n + 1):
            llm.back_to(begin)
            now = time.perf_counter()
            llm.eval(text[2000 : 2000 + n])
            took += [time.perf_counter() - now] if i else []
        ms = 1e3 * float(np.median(took))
        table.add(n, ms, 1e3 * n / ms)


PASSES = (("tokens of a pass", "{}"), ("ms", "{:.1f}"), ("tokens/s", "{:.0f}"))
ANSWERS = (
    ("task", ""),
    ("prompt", "{:,}"),
    ("without, tokens/s", "{:.1f}"),
    ("with, tokens/s", "{:.1f}"),
    ("x", "{:.2f}"),
    ("same", "{} of {}"),
)


@experiment(
    MODEL,
    option("-n n", type=COUNT, default=3, help="Rounds."),
    THREADS,
    tokens(400, "an answer at most"),
    option("--n-ctx", type=COUNT, default=4096, help="Size of the context."),
    option("--kv-ratio", type=SHARE, default=0.2, help="Share of the bytes to keep."),
    option("--task", default="", help="A part of its name; without it all."),
    option("--rows", is_flag=True, help="Measure passes, not answers."),
)
def command(o: Options) -> None:
    with sheet(*(PASSES if o.rows else ANSWERS), name="rows" * o.rows) as table:
        (passes if o.rows else compare)(o, table)
