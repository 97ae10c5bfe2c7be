"""The evaluator and its commands: one reading for all rows, tables that hold together, bad input in
one line.
"""

from __future__ import annotations

import csv
import io
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from edgekv import commands
from edgekv.commands.measured import known
from edgekv.errors import BadInput, EdgeKVError, Unsupported
from edgekv.profiles import identify
from edgekv_lab.commands import eval as command
from edgekv_lab.commands.counted import counted
from edgekv_lab.eval import (
    along,
    evaluate,
    perplexity,
    plot,
    predictions,
    prompt,
    reader,
    results,
    table,
)
from edgekv_lab.eval.prompt import EvalPrompt
from edgekv_lab.eval.sample import PERPLEXITY, SCORE, Measure, Outcome, Row, Sample, Task
from edgekv_lab.eval.tasks import TASKS
from tests import models
from tests.cli import refused, typed
from tests.engine import feed, load, logits

GRID = [Row("full", 1.0), Row("snapkv", 0.5), Row("snapkv", 0.2)]


@dataclass
class FakeLlama:
    """The little of a model that the evaluation itself uses. A word is a token; its number is its
    length.
    """

    ctx: int = 2000
    metadata: dict[str, str] = field(default_factory=dict)

    def n_ctx(self) -> int:
        return self.ctx

    def tokenize(self, text: bytes, add_bos: bool, special: bool = False) -> list[int]:
        return [len(word) for word in text.split()]


class FakeReader:
    """Answers '7' if the ratio is at least 0.5; writes down what it is asked."""

    def __init__(self, llm: FakeLlama, names: dict[str, list[str]]) -> None:
        self.llm, self.names, self.log = llm, names, []

    def read(self, tokens) -> None:
        self.log.append(("read", len(tokens)))

    def compress(self, name: str, ratio: float, kind: str):
        assert name in self.names[kind]
        self.ratio = ratio
        return SimpleNamespace(
            n_seen=1000, n_kept=1000 * ratio, n_bytes_used=int(2**20 * ratio), n_bytes_full=2**20
        )

    def answer(self, rest, n_tokens: int, stop: str = "") -> str:
        self.log.append(("answer", len(rest)))
        return "It is 7, and 1000000." if self.ratio >= 0.5 else "I do not know 123."


def sample(n: int = 0, **tags) -> Sample:
    return Sample(
        f"s{n}",
        "one two three",
        "four five?",
        ("7",),
        5,
        ("contains_all",),
        begin=" six",
        tags={"length": 300, **tags},
    )


TASK = Task("toy", "t", "h", lambda request: [], asks=("lengths",))


def outcome(method: str, ratio: float, score: float, n: int = 0, **tags) -> Outcome:
    return Outcome(
        f"s{n}",
        {"length": 300, **tags},
        method,
        ratio,
        {"score": score},
        1100,
        1000,
        1000 * ratio,
        int(2**20 * ratio),
        "said",
        ("7",),
        n_bytes_full=2**20,
    )


# ---- prompts


def test_aware_prompts_hold_the_question_and_agnostic_ones_do_not():
    llm = FakeLlama()
    assert prompt.prompt(llm, sample(), True, False) == prompt.EvalPrompt((3, 3, 5, 4, 5, 3), ())
    assert prompt.prompt(llm, sample(), False, False) == prompt.EvalPrompt((3, 3, 5), (4, 5, 3))


def test_a_question_is_found_behind_a_context_that_has_the_same_words():
    twice = Sample("s", "four five? one", "four five?", ("7",), 5, ("contains_all",))
    assert prompt.prompt(FakeLlama(), twice, False, False) == prompt.EvalPrompt((4, 5, 3), (4, 5))


def test_a_template_that_changes_the_question_is_refused(monkeypatch):
    monkeypatch.setattr(prompt, "template", lambda llm, messages: messages[0]["content"].upper())
    with pytest.raises(Unsupported, match="template"):
        prompt.prompt(FakeLlama(), sample(), True, False)


def test_a_text_that_is_too_long_loses_its_middle_or_is_refused():
    long = Sample("s", " ".join("x" * n for n in range(1, 21)), "q?", ("7",), 5, ("contains_all",))
    assert prompt.prompt(FakeLlama(13), long, False, True) == prompt.EvalPrompt(
        (1, 2, 3, 17, 18, 19, 20), (2,)
    )
    assert prompt.prompt(FakeLlama(13), long, True, True) == prompt.EvalPrompt(
        (1, 2, 3, 17, 18, 19, 20, 2), ()
    )
    with pytest.raises(BadInput, match="26 tokens.*context of 13.*--ctx-size"):
        prompt.prompt(FakeLlama(13), long, True, False)
    with pytest.raises(BadInput):
        prompt.prompt(FakeLlama(7), long, True, True)  # no room for any text


def test_the_chat_template_is_applied_unless_the_sample_wants_none(tiny):
    llm = load(tiny("llama-gqa"), kv_ratio=0.5)
    chat = prompt.prompt(llm, sample(), True, False).text
    assert chat[0] == models.BOS and chat[1] == models.USER and models.ASSISTANT in chat
    assert (
        models.USER
        not in prompt.prompt(
            llm, Sample("s", "a", "b", ("7",), 5, ("f1",), chat=False), True, False
        ).text
    )


# ---- the evaluator


def test_full_comes_once_and_random_is_always_there():
    def rows(*args, **more):
        return [(row.method, row.ratio) for row in evaluate.settings(*args, **more)]

    assert rows(["full", "snapkv"], [1, 0.2]) == [("full", 1.0), ("random", 0.2), ("snapkv", 0.2)]
    assert rows(["snapkv", "random"], [0.5]) == [("full", 1.0), ("random", 0.5), ("snapkv", 0.5)]
    assert rows(["full"], [0.5]) == [("full", 1.0)]
    assert rows(["random"], [0.5]) == [("full", 1.0), ("random", 0.5)]


def test_rows_of_a_cache_type_follow_each_other_each_with_random_ones():
    kinds = {"auto": "q8_0", "snapkv": "f16"}

    def stored(name: str, ratio: float) -> str:
        return kinds[name]

    assert evaluate.settings(["auto", "snapkv"], [0.2], ["f16", "q8_0", "q4_0"], stored) == [
        ("full", 1, "f16"),
        ("random", 0.2, "f16"),
        ("snapkv", 0.2, "f16"),
        ("full", 1, "q8_0"),
        ("random", 0.2, "q8_0"),
        ("auto", 0.2, "q8_0"),
        ("full", 1, "q4_0"),
    ]
    assert evaluate.settings(["auto"], [0.2], [], stored) == [
        ("full", 1, "q8_0"),
        ("random", 0.2, "q8_0"),
        ("auto", 0.2, "q8_0"),
    ]


@pytest.mark.parametrize(
    ("aware", "log"), [(True, [("read", 6), ("answer", 0)]), (False, [("read", 3), ("answer", 3)])]
)
def test_one_reading_serves_every_method_and_ratio(aware, log):
    fake = FakeReader(FakeLlama(), {"f16": ["full", "snapkv"]})
    found = list(evaluate.evaluate(TASK, fake, [sample(0), sample(1)], GRID, aware))
    assert fake.log == 2 * [log[0], *3 * [log[1]]]
    assert [o.scores["score"] for o in found] == [1, 1, 0, 1, 1, 0]
    assert [(o.sample, o.method, o.ratio) for o in found[2:4]] == [
        ("s0", "snapkv", 0.2),
        ("s1", "full", 1.0),
    ]
    assert {o.n_prompt for o in found} == {6} and found[2].n_kept == pytest.approx(200)


def test_nothing_is_read_if_a_sample_does_not_fit():
    fake = FakeReader(FakeLlama(8), {"f16": ["full"]})
    with pytest.raises(BadInput, match="--ctx-size"):
        evaluate.evaluate(TASK, fake, [sample()], GRID[:1])


# ---- answers and predictions of a real (tiny) model


@pytest.fixture(scope="module")
def tiny_reader(tiny):
    return reader.Reader(load(tiny("llama-gqa"), kv_ratio=0.5), ["full", "snapkv", "d2o", "random"])


def test_every_cache_type_is_asked_in_turn_with_the_weights_once(tiny, text, nmse):
    tokens, rest = text(300), text(20, seed=1)
    one = reader.Reader(
        load(tiny("llama-gqa"), kv_ratio=0.5),
        {"f16": ["full"], "q8_0": ["full", "snapkv"], "q8_0/q4_0": ["snapkv"]},
    )
    model = one.llm._model
    one.read(tokens)
    for kind, ratio in (("f16", 1.0), ("q8_0", 0.2), ("q8_0/q4_0", 0.2), ("f16", 1.0)):
        stats = one.compress("full" if ratio == 1 else "snapkv", ratio, kind)
        got = np.concatenate(list(one.predict(rest)))
        k, _, v = kind.partition("/")
        other = load(tiny("llama-gqa"), kv_ratio=ratio, kind=kind.replace("/", ","), kv_tail=1000)
        other.eval(list(tokens))
        assert (stats.type_k, stats.type_v) == (k, v or k) and one.llm._model is model
        assert stats.n_bytes_used == pytest.approx(ratio * stats.n_bytes_full, rel=0.02)
        assert nmse(feed(other, rest), got) < 1e-5


def test_an_answer_is_greedy_decoding_behind_the_compressed_text(tiny, text, tiny_reader):
    tokens, rest = text(200), text(40, seed=1)
    tiny_reader.read(tokens)
    tiny_reader.compress("snapkv", 0.3)
    got = tiny_reader.answer(rest, 6)
    one = load(tiny("llama-gqa"), kv_ratio=0.3)
    one.eval(list(tokens))
    logits, expected = feed(one, rest)[-1], []
    for _ in range(6):
        expected.append(int(logits.argmax()))
        logits = feed(one, expected[-1:])[-1]
    assert got == one.detokenize(expected).decode(errors="replace")
    tiny_reader.compress("snapkv", 0.3)
    cut = tiny_reader.answer(rest, 6, stop=got.lstrip("\n")[1])
    assert cut == got.lstrip("\n").split(got.lstrip("\n")[1])[0]


def softmax(logits):
    shifted = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("method", ["snapkv", "d2o"])
def test_perplexity_and_kl_are_those_of_a_direct_computation(tiny, text, tiny_reader, method):
    n, m = 200, 70  # more than two batches
    tokens = text(n + m + 1, seed=3)
    passage = perplexity.Passage("p", tokens, n, {"length": n})
    got = list(perplexity.predict(tiny_reader, [passage], [Row("full", 1.0), Row(method, 0.3)]))
    probabilities = []
    for options in ({"kv_ratio": 1.0}, {"kv_ratio": 0.3, "kv_method": method, "kv_tail": 1000}):
        llm = load(tiny("llama-gqa"), **options)
        llm.eval(list(tokens[:n]))
        probabilities.append(softmax(feed(llm, tokens[n:-1])))
    full, compressed = probabilities
    at = np.arange(m), np.array(tokens[n + 1 :])
    assert got[0].scores == {
        "nll": pytest.approx(-np.log(full[at]).mean(), rel=1e-3),
        "kl": 0,
        "same_top": 1,
    }
    assert got[1].scores["nll"] == pytest.approx(-np.log(compressed[at]).mean(), rel=1e-3)
    assert got[1].scores["kl"] == pytest.approx(
        (full * np.log(full / compressed)).sum(axis=1).mean(), rel=1e-2
    )
    assert got[1].scores["same_top"] == pytest.approx(
        (full.argmax(1) == compressed.argmax(1)).mean(), abs=0.03
    )
    assert got[1].scores["kl"] > 1e-3 and got[1].n_kept <= 0.3 * n and got[1].n_seen == n


@pytest.mark.parametrize("aware", [False, True])
def test_answers_are_judged_along_the_full_caches(tiny, text, tiny_reader, aware):
    tokens, question = text(200), text(20, seed=1)
    parts = (tokens + question, ()) if aware else (tokens, question)
    asked = replace(sample(0), max_tokens=7)
    grid = [Row("full", 1.0), Row("snapkv", 0.3)]
    got = list(along.follow(tiny_reader, [asked], [EvalPrompt(*parts)], grid))
    answer: list[int] = []
    found = []
    for options in ({"kv_ratio": 1.0}, {"kv_ratio": 0.3, "kv_method": "snapkv", "kv_tail": 1000}):
        llm = load(tiny("llama-gqa"), **options)
        llm.eval(list(parts[0]))
        rows = [feed(llm, parts[1])[-1] if parts[1] else logits(llm)]
        for i in range(6):
            if len(answer) == i:
                answer.append(int(rows[-1].argmax()))
            rows.append(feed(llm, answer[i : i + 1])[-1])
        found.append(softmax(np.array(rows)))
    full, compressed = found
    far = (full * np.log(full / compressed)).sum(axis=1)
    assert got[0].scores == {"kl": 0, "first": 0, "same_top": 1, "same": 1}
    assert got[1].scores["kl"] == pytest.approx(far.mean(), rel=1e-2) and far.mean() > 1e-4
    assert got[1].scores["first"] == pytest.approx(far[0], rel=1e-2, abs=1e-6)
    alike = full.argmax(1) == compressed.argmax(1)
    assert got[1].scores["same_top"] == pytest.approx(alike.mean())
    assert got[1].scores["same"] == float(alike.all())
    assert got[1].references == (got[0].prediction,) and got[1].n_kept <= 0.3 * len(parts[0])


def test_questions_about_one_text_share_its_reading(text, tiny_reader, monkeypatch):
    read, asked = [], [replace(sample(i), max_tokens=3) for i in range(3)]
    monkeypatch.setattr(
        tiny_reader, "read", lambda t: (read.append(t), type(tiny_reader).read(tiny_reader, t))
    )
    prompts = [EvalPrompt(text(100), text(9, seed=seed)) for seed in (1, 2)]
    prompts.append(EvalPrompt(text(90), text(9, seed=1)))
    grid = [Row("full", 1.0), Row("snapkv", 0.3), Row("random", 0.3)]
    known = frozenset({(asked[0].id, grid[1])})
    found = list(along.follow(tiny_reader, asked, prompts, grid, known))
    assert [len(t) for t in read] == [100, 90]
    assert len(found) == 8 and len({(o.sample, o.row) for o in found}) == 8


def test_a_method_at_ratio_1_is_the_full_cache(text, tiny_reader):
    (got,) = perplexity.predict(
        tiny_reader, [perplexity.Passage("p", text(161), 100)], [Row("snapkv", 1.0)]
    )
    assert got.scores["kl"] == 0 and got.scores["same_top"] == 1


def test_passages_that_do_not_fit_are_refused(text, tiny_reader):
    with pytest.raises(BadInput, match="--next"):
        evaluate.evaluate(
            Task("toy", "t", "h", lambda request: [], asks=(), predicts=True),
            tiny_reader,
            [perplexity.Passage("p", text(3000), 100)],
            GRID,
        )


def test_budgets_are_kept_by_methods_that_merge(text, tiny_reader):
    tiny_reader.read(text(300))
    stats = tiny_reader.compress("d2o", 0.3)
    assert stats.n_kept <= 90 and tiny_reader.llm.engine.kept().max() < 300


# ---- tables


def two_rows(**more) -> table.Table:
    scores = {("full", 1.0): (1, 1, 1, 0), ("snapkv", 0.2): (0, 1, 0, 0)}
    outcomes = [
        outcome(*row, score, n, length=300 if n < 2 else 600, **more)
        for row, column in scores.items()
        for n, score in enumerate(column)
    ]
    return table.Table(TASK, "aware", outcomes)


def test_markdown_states_tokens_and_bytes_beside_every_ratio():
    lines = table.as_markdown(two_rows()).splitlines()
    assert (
        lines[0]
        == "| method | cache type | ratio | KV used | tokens | tokens kept | 300 tokens | 600"
        " tokens | score | 95 % interval | samples |"
    )
    assert (
        lines[2]
        == "| full | f16 | 1 | 100 %: 1.0 of 1.0 MiB | 1,000 | 100 % | 100.0 % | 50.0 % | 75.0 % |"
        " 30.1 % to 95.4 % | 4 |"
    )
    assert (
        lines[3]
        == "| snapkv | f16 | 0.2 | 20 %: 0.2 of 1.0 MiB | 1,000 | 20 % | 50.0 % | 0.0 % | 25.0 % |"
        " 4.6 % to 69.9 % | 4 |"
    )


def test_a_single_part_has_no_column_of_its_own():
    one = table.Table(TASK, "aware", [outcome("full", 1.0, 1.0)])
    assert "tokens |" not in table.as_markdown(one).replace("| tokens |", "")


def test_parts_are_named_by_what_differs():
    families = Task("toy", "t", "h", lambda request: [], asks=(), columns=("family", "length"))
    outcomes = [
        outcome("full", 1.0, 1.0, family=f, length=n) for f in ("a", "b") for n in (300, 600)
    ]
    assert table.Table(families, "", outcomes).groups == [
        "a, 300 tokens",
        "a, 600 tokens",
        "b, 300 tokens",
        "b, 600 tokens",
    ]
    assert table.Table(families, "", outcomes[::2]).groups == ["a", "b"]


def test_json_and_csv_hold_the_same_records():
    from_json = json.loads(table.as_json(two_rows()))
    from_csv = list(csv.DictReader(io.StringIO(table.as_csv(two_rows()))))
    assert [{key: str(value) for key, value in record.items()} for record in from_json] == from_csv
    assert from_json[1] | {} == {
        "task": "toy",
        "setting": "aware",
        "method": "snapkv",
        "type": "f16",
        "ratio": 0.2,
        "n_seen": 1000,
        "n_kept": 200,
        "kv_bytes_full": 1048576,
        "kv_bytes": 209715,
        "score: 300 tokens": 0.5,
        "score: 600 tokens": 0.0,
        "score": 0.25,
        "score_low": 0.0456,
        "score_high": 0.6994,
        "samples": 4,
    }


def test_perplexity_is_the_exponential_of_the_mean_and_ends_that_are_not_known_are_none():
    task = Task("toy", "t", "h", lambda request: [], asks=(), measures=PERPLEXITY, predicts=True)
    outcomes = [
        Outcome(
            f"p{n}",
            {"length": 300},
            "full",
            1.0,
            {"nll": nll, "kl": 0.5, "same_top": 1.0},
            9,
            9,
            9.0,
            9,
        )
        for n, nll in enumerate((1.0, 2.0))
    ]
    (record,) = table.records(table.Table(task, "", outcomes))
    assert record["nll"] == pytest.approx(np.exp(1.5), abs=1e-4) and "setting" not in record
    assert record["nll_low"] == pytest.approx(
        np.exp(1.5 - 1.96 * np.sqrt(0.5) / np.sqrt(2)), abs=1e-4
    )
    assert record["same_top_low"] == 1  # a mean over tokens, no single hit
    single = table.Table(task, "", outcomes[:1])
    assert table.records(single)[0]["nll_high"] is None and " - |" in table.as_markdown(single)


def test_a_prediction_is_one_line_with_all_of_it():
    line = predictions.line("toy", "aware", outcome("snapkv", 0.2, 0.0, 3, depth=0.5))
    assert line.count("\n") == 1
    assert json.loads(line) == {
        "task": "toy",
        "setting": "aware",
        "method": "snapkv",
        "ratio": 0.2,
        "type": "f16",
        "id": "s3",
        "length": 300,
        "depth": 0.5,
        "n_prompt": 1100,
        "n_seen": 1000,
        "n_kept": 200,
        "kv_bytes_full": 1048576,
        "kv_bytes": 209715,
        "prediction": "said",
        "references": ["7"],
        "score": 0.0,
    }


def test_a_second_measure_has_columns_too():
    task = Task(
        "toy",
        "t",
        "h",
        lambda request: [],
        asks=(),
        measures=(*SCORE, Measure("exact", "exact match")),
    )
    one = Outcome("s", {"length": 300}, "full", 1.0, {"score": 0.5, "exact": 0.0}, 9, 9, 9.0, 9)
    assert table.records(table.Table(task, "", [one]))[0]["exact"] == 0
    assert "| exact match | 95 % interval |" in table.as_markdown(table.Table(task, "", [one]))


# ---- pictures


def needles(n_short: int, n_long: int) -> table.Table:
    """As many at each length, evenly spread over the depths."""
    task = Task("toy", "t", "h", lambda request: [], asks=(), heat=True)
    places = [
        (length, (i + 0.5) / n) for length, n in ((300, n_short), (600, n_long)) for i in range(n)
    ]
    return table.Table(
        task,
        "aware",
        [
            outcome(row.method, row.ratio, 1.0, n, length=length, depth=depth)
            for row in GRID
            for n, (length, depth) in enumerate(places)
        ],
    )


def test_cells_are_means_by_length_and_depth():
    outcomes = [
        outcome("full", 1.0, score, length=length, depth=depth)
        for score, length, depth in ((1, 300, 0.1), (0, 300, 0.2), (1, 600, 1))
    ]
    cells = plot.cells(outcomes, [300, 600], 4, SCORE[0])
    assert cells.shape == (4, 2)
    assert cells[0, 0] == 0.5
    assert cells[3, 1] == 1
    assert np.isnan(cells).sum() == 6


@pytest.mark.parametrize(
    ("n_short", "n_long", "n_depths"), [(1, 1, 1), (2, 3, 2), (5, 5, 5), (7, 10, 7), (50, 50, 10)]
)
def test_a_map_has_no_cell_that_was_not_asked(n_short, n_long, n_depths):
    made = needles(n_short, n_long)
    assert plot.depths(made) == n_depths
    for outcomes in made.rows.values():
        assert not np.isnan(plot.cells(outcomes, [300, 600], n_depths, SCORE[0])).any()


@pytest.mark.parametrize("heat", [False, True])
def test_pictures_are_png_files(tmp_path, heat):
    pytest.importorskip("matplotlib")
    task = Task("toy", "t", "h", lambda request: [], asks=(), heat=heat)
    outcomes = [
        outcome(m, r, 1.0, n, depth=0.2 + 0.3 * n)
        for m, r in (("full", 1.0), ("snapkv", 0.5), ("snapkv", 0.2))
        for n in range(3)
    ]
    plot.save(
        table.Table(task, "aware", outcomes, ["a model", "a machine", "a day"]),
        str(tmp_path / "p.png"),
    )
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"
    assert [p.name for p in tmp_path.iterdir()] == ["p.png"]
    figure = (plot.heat_map if heat else plot.curves)(table.Table(task, "aware", outcomes))
    # a map for each row and the colour bar
    assert len([axes for axes in figure.axes if axes.get_visible()]) == (4 if heat else 1)


@pytest.mark.parametrize(
    ("n_rows", "n_holes", "n_each", "says"),
    [(5, 1, 1, "one sample a point"), (4, 0, 2, "2 samples a point"), (9, 0, 1, "one sample")],
)
def test_a_picture_of_maps_has_few_holes_and_says_what_it_counts(n_rows, n_holes, n_each, says):
    pytest.importorskip("matplotlib")
    task = Task("toy", "t", "h", lambda request: [], asks=(), heat=True)
    ratios = [1.0, *(0.9 - 0.1 * i for i in range(n_rows - 1))]
    outcomes = [
        outcome("full" if r == 1 else "snapkv", r, float(n == 0), n, length=300, depth=0.5)
        for r in ratios
        for n in range(n_each)
    ]
    figure = plot.heat_map(table.Table(task, "aware", outcomes))
    assert len([axes for axes in figure.axes if not axes.get_visible()]) == n_holes
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert titles[1] == f"snapkv f16\n90 % of the bytes, found: {100 // n_each} %"
    assert any(says in text.get_text() for text in figure.texts)


def test_curves_say_of_what_and_where_and_have_ticks_at_the_ratios():
    pytest.importorskip("matplotlib")
    made = table.Table(TASK, "aware", two_rows().outcomes, ["a model", "a machine", "2026-01-02"])
    figure = plot.curves(made)
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["20 %"]
    assert len(axes.get_xticks(minor=True)) == 0
    assert any("a model · a machine · 2026-01-02" in text.get_text() for text in figure.texts)
    assert axes.get_legend() is None
    assert [x.get_text() for x in figure.legends[0].get_texts()] == ["full f16", "snapkv f16"]


# ---- the commands


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr("edgekv.commands.load.load_llama", lambda options: FakeLlama())
    monkeypatch.setattr(
        "edgekv.commands.load.model_info",
        lambda path: {"mode": "layers", "d_head_k": 64, "d_head_v": 64},
    )
    monkeypatch.setattr("edgekv_lab.eval.reader.Reader", FakeReader)

    def run(line: str, *words: str):
        task, *given = [*line.split(), *words]
        words = [task, "-m", "x.gguf", *given]
        return CliRunner().invoke(command.command, words, catch_exceptions=False)

    return run


def test_the_table_of_a_task(run):
    lines = run("needle", "-n", "4", "--lengths", "200,400").stdout.splitlines()
    assert len(lines) == 2 + 5
    assert (
        lines[2]
        == "| full | f16 | 1 | 100 %: 1.0 of 1.0 MiB | 1,000 | 100 % | 0.0 % | 0.0 % | 0.0 % | 0.0"
        " % to 49.0 % | 4 |"
    )
    assert lines[-1].startswith("| auto | q8_0 | 0.2 | 20 %: 0.2 of 1.0 MiB | 1,000 | 20 % |")


def test_a_file_gets_lines_of_progress(capsys):
    ticks = iter(range(0, 10**4, 15))
    items = counted(range(4), 4, "needle", clock=lambda: next(ticks))
    assert list(items) == [0, 1, 2, 3]
    lines = capsys.readouterr().err.splitlines()
    assert lines and all(line.startswith("edgekv: needle: ") for line in lines)
    assert "2 of 4, about" in lines[0] and lines[0].endswith("left")


def rows_of(found) -> list[tuple[str, str, float]]:
    return [(row["method"], row["type"], row["ratio"]) for row in json.loads(found.stdout)]


def test_the_default_rows_are_the_products_beside_full_caches_and_chance(run):
    assert rows_of(run("needle", "-n", "1", "--lengths", "200", "-o", "json")) == [
        ("full", "f16", 1),
        ("full", "q8_0", 1),
        ("full", "q4_0", 1),
        ("random", "q8_0", 0.2),
        ("auto", "q8_0", 0.2),
    ]


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["--methods", "snapkv"], "f16"),
        (["--methods", "auto", "-ctk", "q8_0", "-ctv", "q4_0"], "q8_0/q4_0"),
        (["-ctv", "q4_0"], "f16/q4_0"),
        (["--kv-budget", "64"], "f16"),
        (["--methods", "auto"], "q8_0"),
    ],
)
def test_cache_types_are_those_that_were_named_or_a_chats(run, words, kept):
    found = rows_of(
        run("needle", "-n", "1", "--lengths", "200", "-o", "json", "--full", "q8_0", *words)
    )
    assert [kind for method, kind, _ in found if method != "full"] == [kept, kept]
    assert ("full", "q8_0", 1) in found


def test_types_that_a_models_heads_cannot_have_are_not_among_the_default_rows(run, monkeypatch):
    monkeypatch.setattr(
        "edgekv.commands.load.model_info",
        lambda path: {"mode": "layers", "d_head_k": 80, "d_head_v": 80},
    )
    assert rows_of(run("needle", "-n", "1", "--lengths", "200", "-o", "json")) == [
        ("full", "f16", 1),
        ("random", "f16", 0.2),
        ("auto", "f16", 0.2),
    ]


def test_every_prediction_is_a_line_and_may_go_to_a_file(run, tmp_path):
    name = tmp_path / "all.jsonl"
    found = run(
        "ruler -n 2 --lengths 700 --families single,variables --methods streaming,snapkv "
        f"--full f16 --ratios 0.5 -o jsonl --predictions {name}"
    )
    assert found.stdout == name.read_text() and not name.with_name("all.jsonl.partial").exists()
    records = [json.loads(line) for line in found.stdout.splitlines()]
    assert len(records) == 2 * 2 * 4
    assert {r["family"] for r in records} == {"single", "variables"}
    assert {r["setting"] for r in records} == {"aware"}


def test_a_stopped_call_goes_on_from_its_predictions(run, tmp_path, monkeypatch):
    line = (
        "eval needle -m x.gguf -n 4 --lengths 200 --ratios 0.5,0.2,0.1 --methods streaming,snapkv "
        f"--full f16 --predictions {tmp_path / 'p'}"
    )
    partial, asked = tmp_path / "p.partial", []

    def answer(self, rest, n_tokens, stop=""):
        if len(asked) == 5:
            raise KeyboardInterrupt
        asked.append(rest)
        return f"{len(asked)} \u2028"

    monkeypatch.setattr(FakeReader, "answer", answer)
    found = typed(line)
    assert found.exit_code == 130, found.stderr
    assert "goes on" in found.stderr and not (tmp_path / "p").exists()
    assert len(partial.read_text().split("\n")[:-1]) == 1 + 5
    partial.write_text(partial.read_text()[:-10])  # killed while it wrote
    asked[:] = range(-100, 0)
    other = typed(line, "-o", "json")  # asked the same, shown another way
    assert other.exit_code == 0 and len(asked) == 100 + 4 * 10 - 4 and not partial.exists()
    lines = [json.loads(text) for text in (tmp_path / "p").read_text().split("\n")[:-1]]
    assert [line["prediction"] for line in lines[:5]] == [
        "1 \u2028",
        "2 \u2028",
        "3 \u2028",
        "4 \u2028",
        "101 \u2028",
    ]
    assert (
        len({(line["id"], line["method"], line["ratio"]) for line in lines}) == len(lines) == 4 * 10
    )
    assert [row["samples"] for row in json.loads(other.stdout)] == [4] * 10


def test_predictions_of_another_call_are_not_taken(run, tmp_path):
    words = ("needle", "-n", "2", "--lengths", "200", "--predictions", str(tmp_path / "p"))
    run(*words)
    lines = (tmp_path / "p").read_text()
    (tmp_path / "p.partial").write_text(
        '{"call": {"seed": 9}}\n' + lines.replace('"prediction": "', '"prediction": "other')
    )
    run(*words)
    assert (tmp_path / "p").read_text() == lines


@pytest.mark.parametrize(
    "words",
    [
        ("needle", "--methods", "nonsense"),
        ("needle", "--ratios", "20"),
        ("needle", "--lengths", "9000"),
        ("needle", "--lengths", "10"),
        ("ruler", "--families", "nonsense"),
        ("gsm8k", "-f", "/nowhere"),
        ("squad", "-f", "/nowhere"),
        ("longbench", "-f", "/nowhere"),
        ("ppl", "-f", "/nowhere"),
        ("needle", "--predictions", "/nowhere/p"),
        ("needle", "--plot", "/nowhere/p.png"),
        ("needle", "--predictions", "/"),
    ],
)
def test_mistakes_are_one_line(run, words):
    with pytest.raises(EdgeKVError) as error:
        run(*words)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("task", ["needle", "paraphrase", "ruler", "ppl"])
@pytest.mark.parametrize("n", [3000, 10**20])
def test_lengths_beyond_the_context_are_said_before_texts_are_made(run, monkeypatch, task, n):
    monkeypatch.setattr(
        FakeLlama, "tokenize", lambda *args, **options: pytest.fail("a text was made")
    )
    with pytest.raises(BadInput, match=f"{n:,} tokens .*context of 2,000.*--lengths") as error:
        run(task, "--lengths", f"200,{n - 256 * (task == 'ppl')}")  # and --next
    assert "\n" not in str(error.value)


def test_tokens_to_predict_count_as_well(run):
    with pytest.raises(BadInput, match="2,100 tokens .*context of 2,000"):
        run("ppl", "--lengths", "100", "--next", "2000")
    assert run("needle", "-n", "1" + 12 * "0").exit_code == 2


def test_lengths_beyond_the_trained_context_name_it(run, monkeypatch):
    trained = {"general.architecture": "llama", "llama.context_length": "2000"}
    monkeypatch.setattr(
        "edgekv.commands.load.load_llama", lambda options: FakeLlama(metadata=trained)
    )
    with pytest.raises(BadInput, match="2,000 tokens, as many as this model was trained with"):
        run("needle", "--lengths", "3000")


@pytest.mark.parametrize(
    "words",
    [
        ["needle", "--lengths", "10^20"],
        ["needle", "--lengths", "9" * 5000],
        ["gsm8k"],
        ["needle", "--lengths", "x"],
        ["needle", "-n", "0"],
        ["needle", "-o", "xml"],
        ["ppl", "--setting", "aware"],
        ["needle", "-f", "x"],
        ["nonsense"],
    ],
)
def test_wrong_words_end_with_2(words, capsys):
    with pytest.raises(SystemExit) as end:
        commands.main(
            ["eval", words[0], "-m", "x.gguf", *words[1:]]
            if words != ["nonsense"]
            else ["eval", "nonsense"]
        )
    assert end.value.code == 2 and capsys.readouterr().err.count("\n") == 1


def test_every_task_has_a_command():
    context = commands.click.Context(command.command)
    assert command.command.list_commands(context) == list(TASKS)
    for name in TASKS:
        assert command.command.get_command(context, name).name == name
    assert command.command.get_command(context, "nonsense") is None


# ---- what is kept for fit


@pytest.fixture
def measured(run, tiny, tmp_path, monkeypatch) -> tuple[str, Path]:
    """A tiny model and the file of its results, behind a small evaluation."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = str(tiny("llama-gqa"))
    run(f"needle -m {model} -n 2 --lengths 200 --methods snapkv --ratios 0.5 --setting agnostic")
    return model, results.file_of(model)


def test_fit_says_what_eval_measured_of_the_model(measured, tiny):
    def quality(name: str, ratio: str) -> str:
        line = f"fit -m {tiny(name)} --memory 2GiB -c 512 --json --kv-method snapkv"
        return json.loads(typed(line, "--ratios", ratio).stdout)["best"]["quality"]

    assert (
        quality("llama-gqa", "0.5")
        == "needle: score 0.0 % (full cache: 0.0 %; 2 samples of about 1,000 tokens, "
        "asked after the text was compressed)"
    )
    for name, ratio in (("llama-gqa", "0.4"), ("llama-mha", "0.5")):
        assert quality(name, ratio).startswith("not measured on this model")
    assert [path.name for path in measured[1].parent.iterdir()] == [measured[1].name]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-5],
        lambda text: "{}",
        lambda text: "[" * 100_000,
        lambda text: text.replace("needle", "\\u001b[2J"),
        lambda text: text.replace('"n": 2', '"n": true'),
        lambda text: text.replace('"full": 0.0', '"full": 1e999'),
        lambda text: text.replace('"agnostic"', "7"),
        lambda text: text + " " * results.BYTES_MAX,
        lambda text: "[3, null, []]",
    ],
)
def test_damaged_results_count_for_nothing(measured, damage):
    model, path = measured
    path.write_text(damage(path.read_text()))
    assert results.read(path) == []
    assert known(model, "snapkv", 0.5, "f16", "f16").startswith("not measured on this model")
    found = results.Result("needle", "aware", "snapkv", 0.5, "f16", "f16", 1.0, 1.0, 4, 200)
    results.keep(model, [found])
    assert len(results.read(path)) == 1


def test_fewer_samples_replace_nothing(measured):
    model, path = measured
    [kept] = [x for x in results.read(path) if x.method == "snapkv"]
    for n, value in ((50, 0.9), (2, 0.1), (50, 0.8)):
        results.keep(model, [replace(kept, n=n, value=value)])
    assert {x.value for x in results.read(path) if x.method == "snapkv"} == {0.8}


def test_results_from_before_attention_weights_counted_are_found_and_kept(measured):
    model, path = measured
    older = path.with_name(f"{identify(model).older.digest}.json")
    path.rename(older)
    assert known(model, "snapkv", 0.5, "f16", "f16").startswith("needle: score")
    found = results.Result("needle", "aware", "snapkv", 0.5, "f16", "f16", 1.0, 1.0, 4, 200)
    results.keep(model, [found])
    assert {x.setting for x in results.read(path)} == {"agnostic", "aware"} and older.exists()


def test_results_of_a_method_by_its_older_name_are_found(measured):
    model, path = measured
    path.write_text(path.read_text().replace('"snapkv"', '"edgekv"'))
    assert known(model, "kvzap-summary", 0.5, "f16", "f16").startswith("needle: score")


def test_results_of_another_budget_or_profile_are_not_kept(run, tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for words in (["--kv-budget", "100"], ["--kv-window", "8"]):
        model = str(tiny("llama-gqa"))
        run("needle", "-m", model, "-n", "1", "--lengths", "200", "--ratios", "0.5", *words)
    assert list(tmp_path.iterdir()) == []


def test_what_auto_stores_is_asked_once_the_model_is_prepared(tiny, monkeypatch):
    """On the first use nobody knows it before."""
    from edgekv.choice import stored

    prepared, make = [], command.model
    monkeypatch.setattr(command, "model", lambda *args: prepared.append(1) or make(*args))
    monkeypatch.setattr(stored, "stored_as", lambda *_: "q8_0" if prepared else "f16")
    words = "-n 1 --lengths 60 -c 512 --methods snapkv --full f16 -o json"
    rows = json.loads(typed(f"eval needle -m {tiny('llama-gqa')} {words}").stdout)
    assert [(x["method"], x["type"]) for x in rows] == [
        ("full", "f16"),
        ("random", "q8_0"),
        ("snapkv", "q8_0"),
    ]


@pytest.mark.parametrize("words", ["--kv-recall 0.05", "--kv-archive temporary"])
def test_there_is_no_archive_where_rows_share_a_reading(tiny, words):
    said = refused(typed(f"eval needle -m {tiny('llama-gqa')} --methods snapkv {words}"))
    assert "edgekv-lab recall" in said
