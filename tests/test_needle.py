"""The needle evaluation: cases are deterministic and as asked, hits are counted right, the command prints them."""

from __future__ import annotations

import csv
import io
import json
import re
from itertools import islice
from random import Random
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from edgekv.commands import eval as command
from edgekv.errors import EdgeKVError
from edgekv.eval import needle
from edgekv.eval.text import sentences


def count(text: str) -> int:
    return len(text.split())


def draw(seed: int = 0, n: int = 20, lengths=(300, 600)) -> list[needle.Case]:
    return list(needle.cases(seed, n, lengths, count))


class MockLlama:
    """The little of a model that the command itself uses."""

    def n_ctx(self) -> int:
        return 2000

    def tokenize(self, text: bytes, add_bos: bool) -> list[int]:
        return list(range(count(text.decode())))


class MockAsker:
    """Finds a needle if the ratio is at least 0.5; counts the readings."""

    readings = 0

    def __init__(self, llm: MockLlama, case: needle.Case, aware: bool, names: list[str]) -> None:
        MockAsker.readings += 1
        self.case, self.names = case, names

    def ask(self, name: str, ratio: float):
        assert name in self.names
        stats = SimpleNamespace(n_seen=1000, n_kept=1000 * ratio, n_bytes=10_000 * ratio)
        return f"It is {self.case.answer}." if ratio >= 0.5 else "I do not know 123.", stats


@pytest.fixture
def asker(monkeypatch):
    monkeypatch.setattr(needle, "Asker", MockAsker)
    monkeypatch.setattr(MockAsker, "readings", 0)


def test_the_same_seed_gives_the_same_cases_and_another_gives_others():
    assert draw() == draw()
    assert [case.answer for case in draw(0)] != [case.answer for case in draw(1)]


def test_cases_are_spread_over_lengths_and_depths():
    for length in (300, 600):
        depths = [case.depth for case in draw() if case.n_tokens == length]
        assert depths == pytest.approx([0.05 + 0.1 * index for index in range(10)])


def test_a_prompt_holds_its_needle_once_at_its_depth_and_no_other_digit():
    for case in draw():
        content = case.messages[0]["content"]
        assert re.findall(r"\d+", content) == [case.answer]
        assert content.count(case.key) == 2  # in the needle and in the question
        haystack = content.split("\n\n")[1]
        assert case.n_tokens - 60 < count(haystack) <= case.n_tokens
        assert haystack.index(case.answer) / len(haystack) == pytest.approx(case.depth, abs=0.06)


def test_odd_numbers_of_cases_are_all_there():
    assert len(draw(n=7, lengths=(200, 300, 400))) == 7


def test_text_is_varied():
    text = list(islice(sentences(Random(1)), 400))
    assert len(set(text)) == len(text)
    assert not [sentence for sentence in text if "{" in sentence or not sentence[0].isupper() and sentence[0] != '"']


def test_hits():
    case = needle.Case([], "", "1234567", 0.5, "red fox", 10)
    assert needle.is_hit("It is 1234567.", case) and needle.is_hit("1,234,567", case)
    assert not needle.is_hit("123456", case) and not needle.is_hit("", case)


def test_interval_holds_the_share_and_narrows():
    low, high = needle.interval(9, 10)
    assert 0.5 < low < 0.9 < high < 1
    wide, narrow = needle.interval(45, 50), needle.interval(450, 500)
    assert narrow[1] - narrow[0] < wide[1] - wide[0]
    assert needle.interval(0, 10)[0] == 0 and needle.interval(10, 10)[1] == pytest.approx(1)


def test_settings_have_full_once():
    assert needle.settings(["full", "snapkv"], [1, 0.2]) == [("full", 1.0), ("snapkv", 0.2)]
    assert needle.settings(["snapkv"], [0.5]) == [("snapkv", 0.5)]


def test_one_reading_serves_every_method_and_ratio(asker):
    todo = draw(n=4)
    rows = needle.evaluate(MockLlama(), todo, [("full", 1.0), ("snapkv", 0.5), ("snapkv", 0.2)])
    assert [row.n_hits for row in rows] == [4, 4, 0]
    assert rows[2].n_kept == pytest.approx(200) and rows[2].cases == {300: 2, 600: 2}
    assert MockAsker.readings == 4


@pytest.fixture
def run(monkeypatch, asker):
    monkeypatch.setattr("edgekv.commands.load.load_llama", lambda options: MockLlama())
    return lambda *words: CliRunner().invoke(
        command.command, ["needle", "-m", "x.gguf", "-n", "4", "--lengths", "200,400", *words], catch_exceptions=False)


def test_markdown_states_tokens_and_bytes_beside_every_ratio(run):
    lines = run().stdout.splitlines()
    assert len(lines) == 2 + 1 + 3 * 3
    assert lines[2] == "| full | 1 | 1,000 | 1,000 | 0.0 | 2/2 | 2/2 | 4/4 | 51 to 100 % |"
    assert lines[-1].startswith("| snapkv | 0.1 | 1,000 | 100 | 0.0 | 0/2 | 0/2 | 0/4 |")


def test_json_and_csv_hold_the_same_records(run):
    from_json = json.loads(run("-o", "json").stdout)
    from_csv = list(csv.DictReader(io.StringIO(run("-o", "csv").stdout)))
    assert [{key: str(value) for key, value in record.items()} for record in from_json] == from_csv


@pytest.mark.parametrize("words", [("--methods", "nonsense"), ("--ratios", "20"), ("--lengths", "9000")])
def test_mistakes_are_one_line(run, words):
    with pytest.raises(EdgeKVError) as error:
        run(*words)
    assert "\n" not in str(error.value)
