"""The tasks by name: a row for each. A module is loaded when its task is asked for."""

from __future__ import annotations

from importlib import import_module

from edgekv_lab.eval.sample import Task

TASKS = ("needle", "paraphrase", "ruler", "squad", "gsm8k", "longbench", "answers", "ppl")
"""Each: `TASK` of edgekv_lab.eval.tasks.<name>, and the command `edgekv eval <name>`."""


def get(name: str) -> Task:
    """The task of that name, one of TASKS."""
    assert name in TASKS
    task: Task = import_module(f"edgekv_lab.eval.tasks.{name}").TASK
    return task
