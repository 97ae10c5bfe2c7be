"""Threads of a chat beside other processes."""

from __future__ import annotations

from edgekv.base.pace import EVERY, Pace, runnable
from tests.engine import load


def threads(n_most: int, n_cores: int, counts: list[int | None]) -> list[int]:
    """Threads after each look at a machine where so many threads are runnable."""
    seen = iter(counts)
    pace = Pace(n_most, lambda: next(seen), n_cores)
    found = []
    for _ in counts:
        pace.look()
        found.append(pace.n)
    return found


def test_alone_all_threads_write_whether_they_wait_in_a_loop_or_sleep():
    assert threads(4, 4, [1, 4, 2, 4, 1]) == [4] * 5


def test_beside_another_process_both_leave_it_its_cores():
    # two of two cores each, then one each: what the other one does is seen at the next look
    assert threads(2, 2, [4, 2, 2, 2]) == [1, 1, 1, 1]
    assert threads(8, 8, [8 + 4]) == [4]
    assert threads(2, 8, [12]) == [1], "never none"


def test_threads_come_back_when_the_cores_were_free_twice():
    assert threads(2, 2, [4, 1, 2, 1, 1, 1]) == [1, 1, 1, 1, 2, 2]


def test_a_system_that_says_nothing_changes_nothing():
    assert threads(4, 4, [None, None]) == [4, 4]
    assert runnable() is None or runnable() > 0


def test_an_answer_does_not_depend_on_how_many_threads_write_it(tiny, text):
    answers = []
    for counts in ([1] * 9, [9, 1, 1, 9, 1, 1, 9, 1, 1]):
        llm = load(tiny("llama-gqa"), kv_ratio=0.3, n_threads=2)
        seen, changed = iter(counts), []
        llm.pace = Pace(2, lambda: next(seen), 2)  # noqa: B023
        set_n_threads = llm.set_n_threads
        llm.set_n_threads = lambda n: changed.append(n) or set_n_threads(n)  # noqa: B023
        tokens = llm.generate(list(text(300)), temp=0.0)
        answers.append([next(tokens) for _ in range(8 * EVERY)])
        assert changed == ([] if 9 not in counts else [1, 2, 1, 2, 1])
    assert answers[0] == answers[1]


def test_an_uncompressed_models_threads_are_what_was_asked_for(tiny, text):
    llm = load(tiny("llama-gqa"), n_threads=2)
    llm.pace = Pace(2, lambda: 9, 2)
    next(llm.generate(list(text(30)), temp=0.0))
    assert llm.pace.n == 2
