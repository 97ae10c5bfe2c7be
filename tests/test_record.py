"""Records: one form for all that is measured."""

from __future__ import annotations

import json

import pytest

from edgekv.errors import BadInput
from edgekv_lab import record
from edgekv_lab.record import Record
from tests.cli import refused, typed

MADE = Record(
    "How far is it?",
    [("model", ""), ("n", "{:,}"), ("KL", "{:.2f}"), ("interval", "{:.1f} to {:.1f}")],
    [["a", 1000, 0.125, [0.1, 0.2]], ["b", None, 1, None]],
    ["edgekv eval ppl -m MODEL"],
    "abc",
    "2026-01-01",
    "a machine",
    2,
    samples=[{"x": 1}],
)


def test_a_table_has_each_value_in_its_columns_format():
    assert MADE.table().splitlines() == [
        "| model | n | KL | interval |",
        "| --- | ---: | ---: | ---: |",
        "| a | 1,000 | 0.12 | 0.1 to 0.2 |",
        "| b |  | 1.00 |  |",
    ]
    origin = "Commit abc, 2026-01-01, a machine, 2 processors:\n\n    edgekv eval ppl -m MODEL\n"
    assert MADE.origin() == origin


def test_a_file_of_records_takes_another_and_replaces_one_of_its_name(tmp_path):
    path = tmp_path / "found.json"
    path.write_text('{"tables": {}, "pictures": {"p": {"title": "t"}}}', encoding="utf-8")
    for name in ("first", "second", "first"):
        record.put(path, name, MADE)
    found = record.read(path)
    assert list(found) == ["first", "second"] and found["first"].table() == MADE.table()
    text = path.read_text(encoding="utf-8")
    assert text.count('        ["a", 1000, 0.125, [0.1, 0.2]],\n') == 2, "a line for each row"
    assert json.loads(text)["pictures"] and text.count("settings") == 0


@pytest.mark.parametrize("text", ["[]", "no JSON", '{"tables": {"a": {"rows": []}}}'])
def test_a_file_of_something_else_is_refused_before_anything_is_measured(text, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BadInput):
        record.put(path, "a", MADE)
    assert "other.json" in refused(typed(f"eval needle -m demo --record {path}"))
    assert path.read_text(encoding="utf-8") == text
    assert "cannot be written" in refused(typed(f"bench -m demo --record {tmp_path / 'a' / 'b'}"))


def test_eval_writes_a_record(tiny, tmp_path):
    path, model = tmp_path / "found.json", tiny("llama-gqa")
    words = f"eval needle -m {model} -c 512 --lengths 300 -n 1 --methods snapkv --record {path}"
    done = typed(words)
    assert done.exit_code == 0, done.output
    (found,) = record.read(path).values()
    assert found.table() == done.stdout and list(found.models) == [model.name]
    assert all(found.models.values()) and found.date and found.commit and found.processors
    assert found.settings["n"] == 1 and found.settings["model"] == model.name


def test_bench_writes_a_record(tiny, tmp_path):
    path, model = tmp_path / "found.json", tiny("llama-gqa")
    words = f"bench -m {model} -p 64 -n 0 -r 1 --full f16 --kv-method snapkv -o json"
    done = typed(words, "--compare", "--record", str(path))
    assert done.exit_code == 0, done.output
    found = record.read(path)["bench"]
    assert [row[found.columns.index(["test", "{}"])] for row in found.rows] == ["pp64", "pp64"]
    assert [x["samples_ns"] for x in found.samples] == [
        x["samples_ns"] for x in json.loads(done.stdout)
    ]
    beside = record.read(path)["bench-ratios"]
    assert beside.rows[0][-1] == "one round" and beside.table() in done.stderr
    assert str(tmp_path) not in path.read_text(encoding="utf-8")
