"""Predictions in a file, a line of JSON each, from which a call that was stopped goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import click

from edgekv.base import files
from edgekv.errors import BadInput
from edgekv_lab.eval.sample import Outcome


@dataclass
class Predictions:
    """Outcomes of a task in one setting (empty for a task that has none), and where their lines
    go."""

    task: str
    setting: str
    outcomes: list[Outcome]
    file: IO[str] | None = None

    def add(self, outcome: Outcome) -> str:
        """Keep an outcome; its line."""
        text = line(self.task, self.setting, outcome)
        self.outcomes.append(outcome)
        if self.file:
            self.file.write(text)
        return text


IS_OURS = files.begins_with(b'{"task"')


@contextmanager
def kept(name: str | None, task: str, setting: str, call: dict[str, Any]) -> Iterator[Predictions]:
    """The predictions of one call; with a name they gather in `<name>.partial` and become `<name>`
    in the end.

    call: what the answers depend on. If `<name>.partial` was left by the same call, its outcomes
    are there already. Raises BadInput if the file cannot be written.
    """
    if name is None:
        yield Predictions(task, setting, [])
        return
    partial, head = Path(name + ".partial"), json.dumps({"call": call}, sort_keys=True, default=str)
    predictions = Predictions(task, setting, [])
    stopped = True
    try:
        files.check(name, IS_OURS, "file of predictions")
        before = _left(partial, head)
        with partial.open("w", encoding="utf-8", buffering=1) as predictions.file:
            predictions.file.write(head + "\n")
            for outcome in before:
                predictions.add(outcome)
            yield predictions
        stopped = False
        with files.replaced(name, IS_OURS, "file of predictions") as f:
            for outcome in predictions.outcomes:
                f.write(line(task, setting, outcome).encode())
        partial.unlink()
    except OSError as error:
        raise BadInput(
            f"{name} cannot be written ({error.strerror}); choose another place"
        ) from None
    finally:
        if stopped and partial.is_file():
            click.echo(
                f"edgekv: stopped; what was answered until then is in {partial}, and the same "
                "command goes on from there",
                err=True,
            )


def line(task: str, setting: str, outcome: Outcome) -> str:
    """One prediction as a line of JSON."""
    record = {
        "task": task,
        **({"setting": setting} if setting else {}),
        "method": outcome.method,
        "ratio": outcome.ratio,
        "type": outcome.kind,
        "id": outcome.sample,
        **outcome.tags,
        "n_prompt": outcome.n_prompt,
        "n_seen": outcome.n_seen,
        "n_kept": round(outcome.n_kept, 2),
        "kv_bytes_full": outcome.n_bytes_full,
        "kv_bytes": outcome.n_bytes,
    }
    if outcome.references:
        record |= {"prediction": outcome.prediction, "references": list(outcome.references)}
    return json.dumps(record | outcome.scores, ensure_ascii=False) + "\n"


def _outcome(record: dict[str, Any]) -> Outcome:
    """What `line` made a line of. Its order tells tags from scores."""
    names = list(record)
    tags = names[names.index("id") + 1 : names.index("n_prompt")]
    scores = [
        name
        for name in names[names.index("kv_bytes") + 1 :]
        if name not in ("prediction", "references")
    ]
    return Outcome(
        record["id"],
        {name: record[name] for name in tags},
        record["method"],
        record["ratio"],
        {name: record[name] for name in scores},
        record["n_prompt"],
        record["n_seen"],
        record["n_kept"],
        record["kv_bytes"],
        record.get("prediction", ""),
        tuple(record.get("references", ())),
        record["type"],
        record["kv_bytes_full"],
    )


def _left(partial: Path, head: str) -> list[Outcome]:
    """Outcomes that the same call left; the last line may be torn."""
    if not partial.is_file():
        return []
    first, *lines = partial.read_text(encoding="utf-8", errors="replace").split("\n")
    outcomes: list[Outcome] = []
    for text in lines if first == head else []:
        try:
            outcomes.append(_outcome(json.loads(text)))
        except (ValueError, KeyError):
            break
    return outcomes
