"""A later turn of a model with recurrent layers, beside the unpatched library.

    python benchmarks/second_turn.py [--shape qwen3.5-0.8b] [--tokens 4000] [--rounds 3]
                                     [--ratio 0.2] [--threads 2]

A conversation of --tokens tokens is read, and then turns of 30 tokens, with the seconds until the
first token of the answer, and the tokens that `eval` was given until then. Each side has processes
of its own (unpatched: llama-cpp-python of the same version on $EDGEKV_STOCK_LIB), and the sides
take turns; the least of the rounds counts. Weights are random. Markdown goes to standard output,
progress to standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(Path(__file__).resolve().parent)]
sys.path.append(str(ROOT))

import numpy as np  # noqa: E402
from process import heading, python, stock_environment  # noqa: E402

N_ANSWER, N_TURN = 16, 30
TURNS = {"goes on": N_ANSWER, "answer replaced": N_ANSWER // 2}
"""Tokens of the answer that the next turn's text has."""
STOCK = "unpatched"


def main() -> None:
    options = parse()
    if options.child:
        print(json.dumps(turns(json.load(sys.stdin))))
        return
    print(heading("second_turn.py"))
    kinds = ["first turn", *TURNS]
    heads = [f"{kind}: {what}" for kind in kinds for what in ("seconds", "tokens read")]
    print(f"| cache | {' | '.join(heads)} |\n| --- |{' ---: |' * len(heads)}")
    sides = [STOCK, "1", f"{options.ratio:g}"]
    found: dict[str, list[dict[str, list[float]]]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as folder:
        model = written(options.shape, Path(folder) / "model.gguf")
        for _ in range(options.rounds):
            for side in sides:
                found[side].append(child(options, side, model))
    for side in sides:
        best = {kind: min(found[side], key=lambda got, of=kind: got[of][0])[kind] for kind in kinds}
        cells = [f"{seconds:.2f} | {read:,.0f}" for seconds, read in best.values()]
        print(f"| {side if side == STOCK else f'edgekv at {side}'} | {' | '.join(cells)} |")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="qwen3.5-0.8b")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ratio", type=float, default=0.2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--child", action="store_true")
    return parser.parse_args()


def written(text: str, path: Path) -> str:
    from edgekv_lab.bench import synthetic

    synthetic.write(path, *synthetic.parse(text))
    return str(path)


def child(options: argparse.Namespace, side: str, model: str) -> dict[str, list[float]]:
    request = {
        "model": model,
        "side": side,
        "tokens": options.tokens,
        "threads": options.threads,
    }
    environment = stock_environment() if side == STOCK else dict(os.environ)
    got = json.loads(python([__file__, "--child"], json.dumps(request), environment))
    print(side, got, file=sys.stderr, flush=True)
    return got


def turns(request: dict[str, Any]) -> dict[str, list[float]]:
    """By kind of turn: seconds and tokens until the first token of its answer."""
    llm = load(request)
    random = np.random.default_rng(1)

    def text(n: int) -> list[int]:
        return random.integers(259, llm.n_vocab(), n).tolist()

    said = text(request["tokens"])
    found = {}
    found["first turn"], answer = until_first_token(llm, said)
    for kind, n_said in TURNS.items():  # each behind the one before
        said = [*said, *answer[:n_said], *text(N_TURN)]
        found[kind], answer = until_first_token(llm, said)
    return found


def load(request: dict[str, Any]) -> Any:
    more: dict[str, Any] = {}
    if request["side"] == STOCK:
        from edgekv.llama_cpp import Llama
    else:
        from edgekv import Llama  # type: ignore[assignment]

        more = {"kv_ratio": float(request["side"]), "kv_method": "snapkv"}
    return Llama(
        request["model"],
        n_ctx=request["tokens"] + 256,
        n_threads=request["threads"],
        n_threads_batch=request["threads"],
        flash_attn=True,
        use_mmap=False,
        verbose=False,
        **more,
    )


def until_first_token(llm: Any, prompt: list[int]) -> tuple[list[float], list[int]]:
    """Seconds and tokens read, and the first tokens of the answer."""
    n_read, plain = 0, type(llm).eval

    def counted(tokens: Any) -> None:
        nonlocal n_read
        n_read += len(tokens)
        plain(llm, tokens)

    llm.eval = counted
    begin, answer, cost = time.perf_counter(), [], [0.0, 0.0]
    for token in llm.generate(prompt, temp=0.0):
        if not answer:
            cost = [time.perf_counter() - begin, n_read]
        answer.append(token)
        if len(answer) == N_ANSWER:
            break
    return cost, answer


if __name__ == "__main__":
    main()
