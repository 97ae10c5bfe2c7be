"""What `edgekv eval` measured of a model on this machine, for `edgekv fit`.

One small JSON file for each model lies in the user's cache folder, named by the model's identity.
Records in it that make no sense count for nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from edgekv.errors import BadInput
from edgekv.methods import renamed
from edgekv.model.identity import Identity, identify
from edgekv.profiles.places import user_cache
from edgekv_lab.eval.perplexity import FULL
from edgekv_lab.eval.sample import Row
from edgekv_lab.eval.table import Table, mean, number
from edgekv_lab.eval.tasks import TASKS, get
from edgekv_lab.saved import save_json

SETTINGS = {
    "": "",
    "aware": ", the question in the prompt",
    "agnostic": ", asked after the text was compressed",
}
BYTES_MAX = 1 << 20
NUMBER_MAX = 1e12


@dataclass(frozen=True)
class Result:
    """A task's first measure at one point, as its table shows it.

    value: with the method; full: with the full cache; n: samples; n_tokens: mean of their texts.
    """

    task: str
    setting: str
    method: str
    ratio: float
    type_k: str
    type_v: str
    value: float
    full: float
    n: int
    n_tokens: int

    def __str__(self) -> str:
        measure, *_ = get(self.task).measures
        value, full = (number(measure, x) for x in (self.value, self.full))
        samples = f"{self.n} samples of about {self.n_tokens:,} tokens{SETTINGS[self.setting]}"
        return f"{self.task}: {measure.label} {value} (full cache: {full}; {samples})"


def results(table: Table) -> list[Result]:
    """The compressed rows of a finished table beside its full f16 cache; none without that."""
    measure, *_ = table.task.measures
    if Row(FULL, 1.0) not in table.rows:
        return []
    full = mean(measure, table.rows[Row(FULL, 1.0)])[0]
    found = []
    for row, outcomes in table.rows.items():
        if row.method != FULL:
            n, value = len(outcomes), mean(measure, outcomes)[0]
            n_tokens = round(sum(outcome.n_seen for outcome in outcomes) / n)
            type_k, _, type_v = row.kind.partition("/")
            point = table.task.name, table.setting, row.method, row.ratio, type_k, type_v or type_k
            found.append(Result(*point, value, full, n, n_tokens))
    return found


def keep(model_path: str, found: Iterable[Result]) -> None:
    """Add results to those of the model.

    Of two for one point the one of more samples stays, or else the newer one.
    Raises BadInput if the model cannot be identified or the file cannot be written.
    """
    path = file_of(model_path)
    points = {_point(result): result for result in _found(model_path)}
    for result in found:
        points[_point(result)] = max(result, points.get(_point(result), result), key=lambda x: x.n)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"{path.parent} cannot be made ({error.strerror})"
        raise BadInput(f"{why}; set XDG_CACHE_HOME") from None
    save_json(path, [asdict(result) for result in points.values()])


def lines(model_path: str, *point: Any) -> list[str]:
    """What was measured of the model at a point: method, ratio, types of K and V."""
    try:
        found = _found(model_path)
    except BadInput:
        return []
    return [str(x) for x in found if (x.method, x.ratio, x.type_k, x.type_v) == point]


def file_of(model_path: str) -> Path:
    """Where the results of a model are. Raises BadInput if the model cannot be identified."""
    return _file(identify(model_path))


def _file(model: Identity) -> Path:
    return user_cache() / "results" / f"{model.digest}.json"


def _found(model_path: str) -> list[Result]:
    """A model's results; those under its older name, until some are kept under the new one."""
    model = identify(model_path)
    return read(_file(model)) or read(_file(model.older))


def read(path: Path) -> list[Result]:
    """The results in a file that make sense."""
    try:
        if not path.is_file() or path.stat().st_size > BYTES_MAX:
            return []
        records = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return []
    if not isinstance(records, list):
        return []
    return [
        Result(**record | {"method": renamed(record["method"])})
        for record in records
        if _is_result(record)
    ]


def _point(result: Result) -> tuple[Any, ...]:
    return result.task, result.setting, result.method, result.ratio, result.type_k, result.type_v


def _is_result(record: Any) -> bool:
    if not isinstance(record, dict) or record.keys() != {field.name for field in fields(Result)}:
        return False
    allowed = {"str": (str,), "int": (int,), "float": (int, float)}
    if not all(type(record[field.name]) in allowed[str(field.type)] for field in fields(Result)):
        return False
    numbers = [x for x in record.values() if not isinstance(x, str)]
    makes_sense = record["task"] in TASKS and record["setting"] in SETTINGS and record["n"] > 0
    return makes_sense and all(abs(x) < NUMBER_MAX for x in numbers)
