"""Outcomes as a table with a row for each setting."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite
from statistics import fmean
from typing import Any

from edgekv.base.sizes import percent, share
from edgekv_lab import record
from edgekv_lab.eval.interval import interval
from edgekv_lab.eval.sample import Measure, Outcome, Row, Task
from edgekv_lab.record import Column

MEANS = ("n_seen", "n_kept", "n_bytes", "n_bytes_full")


@dataclass(frozen=True)
class Table:
    """What came out of a task in one setting (empty for a task that has none)."""

    task: Task
    setting: str
    outcomes: Sequence[Outcome]
    about: Sequence[str] = ()
    """Model, machine, date: for a picture."""

    @property
    def rows(self) -> dict[Row, list[Outcome]]:
        """The outcomes by their settings, full caches first, else in the order in which they
        came."""
        rows: dict[Row, list[Outcome]] = {}
        for outcome in sorted(self.outcomes, key=lambda outcome: outcome.ratio < 1):
            rows.setdefault(outcome.row, []).append(outcome)
        return rows

    @property
    def groups(self) -> list[str]:
        """Labels of the columns for parts of the samples; none if there is just one part."""
        labels = list(dict.fromkeys(self.label(outcome) for outcome in self.outcomes))
        return labels if len(labels) > 1 else []

    def label(self, outcome: Outcome) -> str:
        """The part of the samples that an outcome belongs to, by those of the task's columns that
        differ at all."""
        differing = [
            name for name in self.task.columns if len({o.tags[name] for o in self.outcomes}) > 1
        ]
        return ", ".join(
            f"{outcome.tags[name]:,} tokens" if name == "length" else str(outcome.tags[name])
            for name in differing
        )


def mean(measure: Measure, outcomes: Sequence[Outcome]) -> tuple[float, float, float]:
    """The measure over outcomes as people know it, and the ends of its 95 % interval."""
    scores = [outcome.scores[measure.name] for outcome in outcomes]
    low, high = interval(
        scores, 1.0 if measure.percent else inf, hits=measure.percent and not measure.of_tokens
    )

    def shown(x: float) -> float:
        return measure.shown(x) if isfinite(x) else x

    return shown(fmean(scores)), shown(low), shown(high)


def records(table: Table) -> list[dict[str, Any]]:
    """One flat record per row, the same for every output form. Shares are 0..1; an end that is not
    known is None."""
    return [_record(table, row, outcomes) for row, outcomes in table.rows.items()]


def _record(table: Table, row: Row, outcomes: list[Outcome]) -> dict[str, Any]:
    head, *_ = table.task.measures
    setting = {"setting": table.setting} if table.setting else {}
    record: dict[str, Any] = {
        "task": table.task.name,
        **setting,
        "method": row.method,
        "type": row.kind,
        "ratio": row.ratio,
    }
    fields = (
        ("n_seen", "n_seen"),
        ("n_kept", "n_kept"),
        ("kv_bytes_full", "n_bytes_full"),
        ("kv_bytes", "n_bytes"),
    )
    record |= {name: round(fmean(getattr(o, field) for o in outcomes)) for name, field in fields}
    for label in table.groups:
        record[f"{head.name}: {label}"] = round(
            mean(head, [o for o in outcomes if table.label(o) == label])[0], 4
        )
    for measure in table.task.measures:
        ends = dict(zip(("", "_low", "_high"), mean(measure, outcomes), strict=True))
        record |= {
            measure.name + end: round(x, 4) if isfinite(x) else None for end, x in ends.items()
        }
    return record | {"samples": len(outcomes)}


def columns(table: Table) -> list[Column]:
    """Of `rows`: settings, what they keep, each part's score, each measure with its interval."""
    head: list[Column] = [("method", ""), ("cache type", ""), ("ratio", "{:g}")]
    head += [("KV used", "{}"), ("tokens", "{:,.0f}"), ("tokens kept", "{}")]
    head += [(label, form(table.task.measures[0])) for label in table.groups]
    for measure in table.task.measures:
        one = form(measure)
        head += [(measure.label, one), ("95 % interval", f"{one} to {one}")]
    return [*head, ("samples", "{}")]


def rows(table: Table) -> list[list[Any]]:
    """Values of `columns`; an interval whose upper end is not known is a dash."""
    found = []
    for row, outcomes in table.rows.items():
        tokens, kept, n_bytes, full = (
            fmean(getattr(o, field) for o in outcomes) for field in MEANS
        )
        cells: list[Any] = [*(row.method, row.kind, row.ratio), share(n_bytes, full)]
        cells += [tokens, percent(kept, tokens)]
        head, *_ = table.task.measures
        for label in table.groups:
            part = [o for o in outcomes if table.label(o) == label]
            cells.append(scaled(head, mean(head, part)[0]))
        for measure in table.task.measures:
            value, *ends = (scaled(measure, x) for x in mean(measure, outcomes))
            cells += [value, ends if isfinite(ends[1]) else "-"]
        found.append([*cells, len(outcomes)])
    return found


def as_markdown(table: Table) -> str:
    return record.table(columns(table), rows(table))


def form(measure: Measure) -> str:
    """How a measure's values are printed."""
    return f"{{:.{measure.digits}f}}" + " %" * measure.percent


def scaled(measure: Measure, value: float) -> float:
    """Shares in percent, with the digits that a file needs."""
    return round(100 * value if measure.percent else value, measure.digits + 4)


def number(measure: Measure, value: float) -> str:
    """Shares in percent."""
    return form(measure).format(scaled(measure, value))


def as_csv(table: Table) -> str:
    rows = records(table)
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def as_json(table: Table) -> str:
    return json.dumps(records(table), indent=2) + "\n"


FORMS = {"md": as_markdown, "csv": as_csv, "json": as_json}
