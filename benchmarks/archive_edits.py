"""What is read again with an archive where a text is changed: the table "Going back" of
docs/results/recall.md.

    python benchmarks/archive_edits.py [-m demo] [--tokens 3000] [--ratio 0.1] [--recall 0.05]

A conversation has read a text. Each case gives a prompt that shares a part of it, on a
conversation of its own. Counted are the prompt's tokens, those that are new and those that are
read. Logits at the prompt's end, and of 8 tokens that are written behind it, are compared with
those of a conversation that read the same prompt afresh with an archive, and with the full f16
cache (NMSE).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import numpy as np  # noqa: E402
from process import machine  # noqa: E402

import edgekv  # noqa: E402
from edgekv.base.markdown import table  # noqa: E402
from edgekv.models.demo import demo_path  # noqa: E402

N_WRITTEN = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-m", "--model", default="demo")
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--ratio", type=float, default=0.1)
    parser.add_argument("--recall", type=float, default=0.05)
    parser.add_argument("--method", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    print(machine(), file=sys.stderr)
    text = tokens_of(options)
    rows = [row(options, text, name, prompt) for name, prompt in cases(text).items()]
    head = ["case", "tokens", "new", "read", "first: fresh", "full", "written: fresh", "full"]
    print(table(head, rows, words={"case"}))


def load(options: argparse.Namespace, **more: Any) -> Any:
    path = demo_path() if options.model == "demo" else options.model
    n_ctx = -(-options.tokens // 256) * 256 + 1024
    given = {"n_ctx": n_ctx, "n_threads": options.threads, "verbose": False, "flash_attn": True}
    return edgekv.Llama(str(path), **{**given, **more})


def archived(options: argparse.Namespace) -> Any:
    how = {"kv_ratio": options.ratio, "kv_recall": options.recall, "kv_method": options.method}
    return load(options, kv_archive=tempfile.gettempdir(), **how)


def tokens_of(options: argparse.Namespace) -> list[int]:
    """As many tokens of prose as are asked for."""
    llm = load(options, n_ctx=512)
    prose = (Path(__file__).resolve().parents[1] / "docs" / "architecture.md").read_bytes()
    found: list[int] = llm.tokenize(prose)
    assert len(found) >= options.tokens, f"there are {len(found)} tokens of text: give fewer"
    llm.close()
    return found[: options.tokens]


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


def row(options: argparse.Namespace, text: list[int], name: str, prompt: list[int]) -> list[str]:
    llm = archived(options)
    llm.eval(text)
    before, shared = llm.n_evaluated, n_shared(text, prompt)
    next(llm.generate(prompt, temp=0))
    n_read, first = llm.n_evaluated - before, llm.logits().copy()
    fresh = archived(options)
    fresh.eval(prompt)
    full = load(options)
    full.eval(prompt)
    said = text[50 : 50 + N_WRITTEN]
    firsts = [x.logits().copy() for x in (fresh, full)]
    written = [feed(x, said) for x in (llm, fresh, full)]
    for one in (llm, fresh, full):
        one.close()
    errors = [*(nmse(x, first) for x in firsts), *(nmse(x, written[0]) for x in written[1:])]
    n_new = max(len(prompt) - shared, 1)
    return [name, *map(str, (len(prompt), n_new, n_read)), *(f"{x:.1e}" for x in errors)]


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


if __name__ == "__main__":
    main()
