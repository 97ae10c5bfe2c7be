"""What is read again with an archive where a text is changed: the table "Going back" of
docs/results/recall.md.

A conversation has read a text. Each case gives a prompt that shares a part of it, on a
conversation of its own. Counted are the prompt's tokens, those that are new and those that are
read. Logits at the prompt's end, and of 8 tokens that are written behind it, are compared with
those of a conversation that read the same prompt afresh with an archive, and with the full f16
cache (NMSE).
"""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np

import edgekv
from edgekv.commands.declare import option
from edgekv.commands.values import SHARE
from edgekv_lab.experiments.checkout import root
from edgekv_lab.experiments.experiment import (
    AUTO,
    MODEL,
    THREADS,
    Options,
    experiment,
    sheet,
    tokens,
)

N_WRITTEN = 8
COLUMNS = (
    ("case", ""),
    *((head, "{:,}") for head in ("tokens", "new", "read")),
    *((head, "{:.1e}") for head in ("first: fresh", "full", "written: fresh", "full")),
)


@experiment(
    MODEL,
    tokens(3000, "the text"),
    option("--ratio", type=SHARE, default=0.1, help="Share of the bytes to keep."),
    option("--recall", type=SHARE, default=0.05, help="As --kv-recall."),
    AUTO,
    THREADS,
)
def command(o: Options) -> None:
    text = tokens_of(o)
    with sheet(*COLUMNS) as table:
        for name, prompt in cases(text).items():
            table.add(*row(o, text, name, prompt))


def load(o: Options, **more: Any) -> Any:
    n_ctx = -(-o.tokens // 256) * 256 + 1024
    given = {"n_ctx": n_ctx, "n_threads": o.threads, "verbose": False, "flash_attn": True}
    return edgekv.Llama(o.model, **{**given, **more})


def archived(o: Options) -> Any:
    how = {"kv_ratio": o.ratio, "kv_recall": o.recall, "kv_method": o.method}
    return load(o, kv_archive=tempfile.gettempdir(), **how)


def tokens_of(o: Options) -> list[int]:
    """As many tokens of prose as are asked for."""
    llm = load(o, n_ctx=512)
    found: list[int] = llm.tokenize((root() / "docs" / "architecture.md").read_bytes())
    assert len(found) >= o.tokens, f"there are {len(found)} tokens of text: give fewer"
    llm.close()
    return found[: o.tokens]


def cases(text: list[int]) -> dict[str, list[int]]:
    """Prompts behind a conversation that has read `text`; other tokens are the text's own, from
    elsewhere.
    """
    n = len(text)
    other = text[n // 3 : n // 3 + 40]
    middle = n // 2
    return {
        "next question": [*text, *other],
        "regenerate": text[:-30],
        "edit of the last question": [*text[:-40], *other],
        "branch in the middle": [*text[:middle], *other],
        "another tail of a system prompt": [*text[:200], *other, *text[240:]],
    }


def row(o: Options, text: list[int], name: str, prompt: list[int]) -> list[Any]:
    llm = archived(o)
    llm.eval(text)
    before, shared = llm.n_evaluated, n_shared(text, prompt)
    next(llm.generate(prompt, temp=0))
    n_read, first = llm.n_evaluated - before, llm.logits().copy()
    fresh = archived(o)
    fresh.eval(prompt)
    full = load(o)
    full.eval(prompt)
    said = text[50 : 50 + N_WRITTEN]
    firsts = [x.logits().copy() for x in (fresh, full)]
    written = [feed(x, said) for x in (llm, fresh, full)]
    for one in (llm, fresh, full):
        one.close()
    errors = [*(nmse(x, first) for x in firsts), *(nmse(x, written[0]) for x in written[1:])]
    n_new = max(len(prompt) - shared, 1)
    return [name, len(prompt), n_new, n_read, *errors]


def n_shared(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def feed(llm: Any, tokens: list[int]) -> np.ndarray:
    said = []
    for token in tokens:
        llm.eval([token])
        said.append(llm.logits().copy())
    return np.array(said)


def nmse(expected: np.ndarray, got: np.ndarray) -> float:
    return float(((expected - got) ** 2).sum() / (expected**2).sum())
