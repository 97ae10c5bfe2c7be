"""Needles under one setting, in a process of its own (as `measure`): how many are found once the
text was compressed and then asked about.
"""

from __future__ import annotations

from typing import Any

from edgekv_lab.bench.measure import load
from edgekv_lab.bench.spec import Case

ROOM = 200
"""Tokens for the question, the chat template and the answer."""


def answer(request: dict[str, Any]) -> str:
    """As `found`, of a case's fields and the other two."""
    n_tokens, n_cases = request.pop("n_tokens"), request.pop("n_cases")
    return found(Case.of(request), n_tokens, n_cases)


def found(case: Case, n_tokens: int, n_cases: int) -> str:
    """'hits/cases' over texts of n_tokens, the same for every setting."""
    from dataclasses import replace

    from edgekv.learn.cache_type import kind_of
    from edgekv_lab.eval.evaluate import evaluate
    from edgekv_lab.eval.reader import Reader
    from edgekv_lab.eval.sample import Row, SampleRequest
    from edgekv_lab.eval.tasks.needle import TASK

    # the cache has to be edgekv's for the evaluation; `full` keeps all of it
    ratio = min(case.kv_ratio, 0.999)
    llm = load(
        replace(
            case,
            n_prompt=n_tokens + ROOM,
            n_gen=0,
            n_depth=0,
            kv_ratio=ratio,
            kv_method=case.kv_method if not case.is_full else "snapkv",
        )
    )
    request = SampleRequest(
        0, n_cases, lambda text: llm.tokenize(text.encode(), add_bos=False), (n_tokens,)
    )
    reader = Reader(llm, ["full" if case.is_full else case.kv_method])
    row = (
        Row("full", 1.0, kind_of(llm))
        if case.is_full
        else Row(case.kv_method, case.kv_ratio, kind_of(llm))
    )
    outcomes = list(evaluate(TASK, reader, list(TASK.samples(request)), [row], aware=False))
    return f"{sum(outcome.scores['score'] == 1 for outcome in outcomes)}/{len(outcomes)}"
