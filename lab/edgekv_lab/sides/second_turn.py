"""Later turns of a conversation."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from edgekv_lab.sides.load import llama

N_ANSWER, N_TURN = 16, 30
TURNS = {"goes on": N_ANSWER, "answer replaced": N_ANSWER // 2}
"""Tokens of the answer that the next turn's text has."""


def turns(request: dict[str, Any]) -> dict[str, list[float]]:
    """By kind of turn: seconds and tokens until the first token of its answer. cache: as of
    `load.llama`."""
    n_ctx, n_threads = request["tokens"] + 256, request["threads"]
    llm = llama(request["model"], n_ctx, n_threads, request["cache"], use_mmap=False)
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


def until_first_token(llm: Any, prompt: list[int]) -> tuple[list[float], list[int]]:
    """Seconds and tokens read, and the first tokens of the answer."""
    n_read, plain = 0, type(llm).eval

    def counted(tokens: Any) -> None:
        nonlocal n_read
        n_read += len(tokens)
        plain(llm, tokens)

    llm.eval = counted
    begin, answer, cost = time.perf_counter(), list[int](), [0.0, 0.0]
    for token in llm.generate(prompt, temp=0.0):
        if not answer:
            cost = [time.perf_counter() - begin, n_read]
        answer.append(token)
        if len(answer) == N_ANSWER:
            break
    return cost, answer
