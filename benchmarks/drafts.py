"""Drafts: tokens a second with and without them, in answers that repeat their prompt, and in one.

    python benchmarks/drafts.py -m MODEL.gguf -n 3 --kv-ratio 0.2

Both sides write the same answers in turns, in this process, at temperature 0; a round is all tasks.
`same` is how many tokens of the answers are the same from their beginning. With `--rows` the time
of a pass with 1 to 64 tokens is measured instead. Tables go to standard output.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import numpy as np  # noqa: E402

import edgekv  # noqa: E402
import edgekv.llama_cpp as llama_cpp  # noqa: E402
from edgekv.base.markdown import table  # noqa: E402
from edgekv.chat.completion import chat_of  # noqa: E402
from edgekv.models.demo import demo_path  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
NAMES = "Ada Bo Cleo Dan Eva Finn Gus Hana Ivo Jo Kim Lea Max Nora Otto Pia Quin Rosa Sam Tess"


def code() -> str:
    files = [ROOT / "edgekv" / "methods" / f"{x}.py" for x in ("snapkv", "h2o", "tova", "keydiff")]
    return "\n\n".join(file.read_text() for file in files)


def rows() -> str:
    rng, names = np.random.default_rng(0), NAMES.split()
    lines = [
        f"{i},{names[rng.integers(20)]},{rng.integers(18, 90)},{rng.integers(1000, 9999)}"
        for i in range(1, 121)
    ]
    return "\n".join(["id,name,age,code", *lines])


TASKS = {
    "edit of code": lambda: f"{code()}\n\nWrite this code again, with `score` renamed to `worth`.",
    "JSON of a table": lambda: f"{rows()}\n\nWrite these rows as a JSON list of objects.",
    "summary": lambda: (
        f"{(ROOT / 'docs' / 'architecture.md').read_text()[:12000]}\n\nSummarise this text section"
        " by section, with its most important sentences word for word."
    ),
    "chat": lambda: "Tell a story about a lighthouse keeper who finds an old radio.",
}


def load(path: str, args: argparse.Namespace, **more: Any) -> Any:
    return edgekv.Llama(
        path,
        n_ctx=args.n_ctx,
        n_threads=args.threads,
        n_threads_batch=args.threads,
        kv_ratio=args.kv_ratio,
        seed=1,
        verbose=False,
        **more,
    )


def written(llm: Any, prompt: list[int], n: int) -> tuple[list[int], float]:
    """Tokens of an answer, and seconds from the first to the last."""
    llm.reset()
    answer, tokens = llm.generate(prompt, temp=0.0), []
    vocab, begin = llama_cpp.llama_model_get_vocab(llm.model), 0.0
    for token in answer:
        begin = begin or time.perf_counter()
        if len(tokens) == n or llama_cpp.llama_vocab_is_eog(vocab, token):
            break
        tokens.append(token)
    seconds = time.perf_counter() - begin
    answer.close()
    return tokens, seconds


def compare(path: str, args: argparse.Namespace) -> str:
    sides = [load(path, args), load(path, args, spec_type="ngram-simple")]
    found = []
    for name, text in TASKS.items():
        if args.task and args.task not in name:
            continue
        chat = chat_of([{"role": "user", "content": text()}])
        prompt = sides[0].chat_template.prompt(chat).tokens[-args.n_ctx + args.tokens + 8 :]
        speeds, said = [], []
        for _ in range(args.n):
            said = [written(llm, prompt, args.tokens) for llm in sides]
            speeds.append([len(tokens) / seconds for tokens, seconds in said])
        without, with_them = np.median(speeds, axis=0)
        a, b = (tokens for tokens, _ in said)
        same = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
        ratio = f"{with_them / without:.2f}"
        line = (
            f"{len(prompt):,}",
            f"{without:.1f}",
            f"{with_them:.1f}",
            ratio,
            f"{same} of {len(a)}",
        )
        found.append((name, *line))
        print(line, file=sys.stderr)
    return table(("task", "prompt", "without, tokens/s", "with, tokens/s", "x", "same"), found)


def passes(path: str, args: argparse.Namespace) -> str:
    llm, found = load(path, args), []
    tokens = llm.tokenize((code() + rows()).encode())
    llm.eval(tokens[:1500])
    begin = llm.n_tokens
    for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64):
        took = []
        for i in range(args.n + 1):
            llm.back_to(begin)
            llm._batch.set_batch(tokens[2000 : 2000 + n], llm.n_tokens, False)
            now = time.perf_counter()
            llm._ctx.decode(llm._batch)
            took += [time.perf_counter() - now] if i else []
            llm.n_tokens += n
        ms = 1e3 * float(np.median(took))
        found.append((str(n), f"{ms:.1f}", f"{1e3 * n / ms:.0f}"))
    return table(("tokens of a pass", "ms", "tokens/s"), found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", default="demo")
    parser.add_argument("-n", type=int, default=3, help="rounds")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=400, help="of an answer at most")
    parser.add_argument("--n-ctx", type=int, default=4096)
    parser.add_argument("--kv-ratio", type=float, default=0.2)
    parser.add_argument("--task", default="", help="a part of its name; without it all")
    parser.add_argument("--rows", action="store_true", help="measure passes, not answers")
    args = parser.parse_args()
    path = str(demo_path()) if args.m == "demo" else args.m
    print(passes(path, args) if args.rows else compare(path, args))


if __name__ == "__main__":
    main()
