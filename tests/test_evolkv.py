"""EvolKV: the search on fitness with a known optimum, its formulas by hand, going on after a stop,
training on the engine, the command.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgekv import methods, profiles
from edgekv.errors import BadInput, EdgeKVError
from edgekv.methods import budget
from edgekv_lab.makers import evolkv, training
from edgekv_lab.makers.evolkv import Scores, Search, SearchPlan
from tests.cli import refused, typed

pytest.importorskip("cma")

PLAN = SearchPlan(target=100, least=36, most=1000, group=4, generations=12, seed=3)


def towards(ideal):
    """A score, 1 for rows in the proportions of `ideal`, less by how far they are from them."""
    wish = np.asarray(ideal, float) / np.sum(ideal)
    return lambda rows: float(np.exp(-20 * ((rows / rows.sum() - wish) ** 2).sum() * len(wish)))


# ---- the formulas


@pytest.mark.parametrize(
    ("mean", "expected"),
    [(100, 1), (150, 0.5), (200, 0), (300, 0), (50, 0.9), (0, 0.8), (75, 0.95)],
)
def test_the_cache_score_by_hand(mean, expected):
    assert evolkv.cache_score(mean, 100) == pytest.approx(expected)


def test_the_fitness_by_hand():
    assert evolkv.fitness(0.5, np.array([100, 200]), 100) == pytest.approx(0.5 * (1 + 0.3 * 0.5))
    assert evolkv.fitness(0.5, np.array([50, 50]), 100) == pytest.approx(0.5 * (1 + 0.3 * 0.9))


@pytest.mark.parametrize(
    ("rows", "target", "expected"),
    [
        ((100, 50, 50, 40), 120, (200, 100, 100, 80)),  # A 240, T 480: each gets as much again
        ((400, 100, 100), 100, (200, 50, 50)),  # A 600, T 300: each loses half
        ((400, 100, 100), 101, (202, 51, 50)),  # 202, 50.5, 50.5: whole rows, the sum kept
        ((1000, 40, 40), 100, (228, 36, 36)),  # 278, 11, 11 would take the window from two layers
        ((900, 100, 100), 500, (1000, 250, 250)),  # 1227, 136, 136: no layer has more than 1,000
    ],
)
def test_completion_by_hand(rows, target, expected):
    got = evolkv.complete(np.array(rows), SearchPlan(target, 36, 1000))
    assert got.tolist() == list(expected)


@given(st.lists(st.integers(36, 900), min_size=1, max_size=40), st.integers(40, 800))
def test_completion_keeps_proportions_limits_and_the_total(rows, target):
    got = evolkv.complete(np.array(rows), SearchPlan(target, 36, 900))
    assert got.sum() == target * len(rows) and got.min() >= 36 and got.max() <= 900
    free = (got > 36) & (got < 900)
    if free.sum() > 1:
        factors = got[free] / np.array(rows)[free]
        assert (
            np.abs(got[free] - np.array(rows)[free] * factors.mean()).max()
            <= 1 + 0.03 * got[free].max()
        )


@pytest.mark.parametrize(
    ("n", "size", "sizes"),
    [(30, 8, [8, 8, 8, 6]), (9, 4, [4, 5]), (4, 8, [4]), (1, 8, [1]), (16, 8, [8, 8]), (3, 2, [3])],
)
def test_groups_are_neighbours_and_none_is_alone(n, size, sizes):
    parts = evolkv.groups(n, size)
    assert [part.stop - part.start for part in parts] == sizes
    assert [i for part in parts for i in range(n)[part]] == list(range(n))


def test_the_population_of_the_paper():
    assert [evolkv.population(n) for n in (2, 4, 8, 16, 32)] == [6, 8, 10, 12, 14]


# ---- shares


@given(
    st.lists(st.integers(36, 900), min_size=2, max_size=12),
    st.sampled_from([64, 128, 256]),
    st.sampled_from([700, 1000, 4000]),
)
def test_a_scheme_serves_other_totals_and_lengths_by_its_proportions(rows, n_rows, n_tokens):
    """Paper: b_i = k_i T / A, whatever the length of the text; what no layer can take or go without
    is shared out.
    """
    rows, n = np.array(rows), len(rows)
    model = profiles.Identity("llama", n, (2,) * n, 64, 64, "")
    table = np.repeat(evolkv.shares(rows)[:, :, None], 2, axis=2).astype(np.float32)
    profile = profiles.Profile(model, "evolkv", evolkv.RATIOS, table, "snapkv", seed=1)
    plan = budget.Plan(
        n_rows,
        np.full((n, 2), n_tokens, np.int32),
        tuple(range(n)),
        n_tokens,
        4,
        32,
        n_rows / n_tokens,
    )
    got = budget.from_shares(profile.shares_at(plan.ratio), plan)
    assert got.sum() == plan.total and np.abs(got[:, 0] - got[:, 1]).max() <= 1
    expected = evolkv.complete(rows, SearchPlan(n_rows, max(36, -(-n_tokens // 100)), n_tokens))
    near_the_cap = (
        expected > 0.9 * n_tokens
    ).any()  # between two ratios of the grid, at one of which a layer has all its rows
    assert near_the_cap or np.abs(got.mean(axis=1) - expected).max() <= 1.5


def test_shares_have_the_mean_of_the_ratio_and_none_is_above_one():
    got = evolkv.shares(np.array([1000, 36, 36, 36]))
    assert got.shape == (99, 4)
    assert got.max() <= 1
    assert got.mean(axis=1) == pytest.approx(np.array(evolkv.RATIOS))
    assert got[0] == pytest.approx(0.04 * np.array([1000, 36, 36, 36]) / 1108)


# ---- the search


@pytest.mark.parametrize("total", evolkv.TOTALS)
def test_the_search_finds_a_known_optimum(total):
    ideal = np.array([40, 300, 60, 60, 250, 40, 200, 50], float)
    score, points = towards(ideal), []
    plan = SearchPlan(**{**vars(PLAN), "generations": 40, "total": total})
    best, fitness = evolkv.search(score, 8, plan, points.append)
    uniform = np.full(8, 100)
    found = evolkv.complete(best, plan)
    assert score(found) > 0.9 > 0.5 > score(uniform)
    assert np.corrcoef(found, ideal)[0, 1] > 0.95
    assert fitness >= evolkv.fitness(score(uniform), uniform, 100)
    assert [p.best for p in points] == sorted(p.best for p in points) and len(points) == 80
    assert [(p.group, p.number) for p in points] == [(g, i) for g in (1, 2) for i in range(1, 41)]
    assert points[-1].best == fitness
    assert all(p.mean <= p.best for p in points)
    assert points[-1].n_rows == best.sum()
    if total == "fixed":
        assert best.sum() == 800


def test_nothing_worse_than_uniform_comes_out():
    best, fitness = evolkv.search(lambda rows: float((rows == 100).all()), 8, PLAN)
    assert (best == 100).all() and fitness == pytest.approx(1.3)


def test_one_seed_one_result_and_the_global_generator_is_left_alone():
    score = towards([3, 1, 1, 2, 1, 5])
    np.random.seed(7)
    before = np.random.get_state()[1].copy()
    results = [
        evolkv.search(score, 6, SearchPlan(**{**vars(PLAN), "seed": seed}))[0].tolist()
        for seed in (0, 0, 1)
    ]
    assert (np.random.get_state()[1] == before).all()
    assert results[0] == results[1] != results[2]


# ---- going on


def test_a_stopped_search_goes_on_and_ends_the_same(tmp_path):
    score, asked, partial = towards([3, 1, 1, 2, 1, 5]), [], tmp_path / "p.partial"

    def counted(rows):
        asked.append(tuple(rows))
        if len(asked) == 77:
            raise KeyboardInterrupt
        return score(rows)

    whole = []
    expected = evolkv.search(score, 6, PLAN, whole.append)
    with pytest.raises(KeyboardInterrupt):
        evolkv.search(Scores(counted, partial, "key"), 6, PLAN)
    assert len(json.loads(partial.read_text())["scores"]) == len(set(asked[:76]))
    again = []
    got = evolkv.search(Scores(counted, partial, "key"), 6, PLAN, again.append)
    assert got[0].tolist() == expected[0].tolist() and got[1] == expected[1] and again == whole
    assert len(asked) == len(set(asked)) + 1, "only the scheme that was stopped is asked for twice"


def test_an_uninterrupted_search_without_a_file_writes_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scores = Scores(towards([1, 2]), None, "key")
    evolkv.search(scores, 2, PLAN)
    scores.remove()
    assert not list(tmp_path.iterdir())


# ---- targets and packages


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (36, "sinks and window"),
        (10, "sinks and window"),
        (1000, "shortest text"),
        (5000, "shortest text"),
    ],
)
def test_targets_that_make_no_sense(target, says):
    with pytest.raises(BadInput, match=says):
        SearchPlan(target, 36, 1000)


def test_without_cma_one_line_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "cma", None)
    with pytest.raises(EdgeKVError, match=r"edgekv\[profile\]"):
        evolkv.search(lambda rows: 0.0, 4, PLAN)


# ---- examples


def jsonl(tmp_path, *lines) -> str:
    path = tmp_path / "task.jsonl"
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    )
    return str(path)


def test_examples_of_a_file(tmp_path):
    path = jsonl(
        tmp_path,
        {"prompt": "Two and two?", "answers": ["four", "4"]},
        "",
        {"context": "A cat sat.", "question": "Who?", "answers": ["cat"]},
    )
    first, second = training.from_file(path)
    assert first.messages == [{"role": "user", "content": "Two and two?"}]
    assert first.answers == ("four", "4")
    assert first.question == ""
    assert second.messages[0]["content"] == "A cat sat.\n\nWho?" and second.question == "Who?"
    assert (
        training.hash_of([first], True, "contained")
        != training.hash_of([second], True, "contained")
        != training.hash_of([second], False, "contained")
    )


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2 is no JSON"),
        ("[1]", "line 2 is no JSON"),
        ({"answers": ["a"]}, "no text"),
        ({"prompt": 3, "answers": ["a"]}, "no text"),
        ({"context": "x", "answers": ["a"]}, "no text"),
        ({"prompt": "x"}, "no answers"),
        ({"prompt": "x", "answers": "a"}, "no answers"),
        ({"prompt": "x", "answers": []}, "no answers"),
        ({"prompt": "x", "answers": [" "]}, "no answers"),
    ],
)
def test_lines_that_are_no_examples(tmp_path, line, says):
    with pytest.raises(BadInput) as error:
        training.from_file(jsonl(tmp_path, {"prompt": "x", "answers": ["a"]}, line))
    assert says in str(error.value) and "\n" not in str(error.value)


# ---- on the engine


@pytest.fixture(scope="module")
def llm(tiny):
    return evolkv.load(str(tiny("llama-gqa")), 2048, n_threads=1, n_threads_batch=1)


def examples(llm, n: int = 2) -> list[training.Example]:
    return training.needles(0, n, [100], lambda text: llm.tokenize(text.encode(), add_bos=False))


def test_more_rows_bring_the_full_cache_nearer(llm):
    """With every row a scheme's score is the full cache's own; nothing of it is left over from the
    scheme before.
    """
    task = training.Training(llm, examples(llm), True, "likelihood")
    everything = np.full(task.n_layer, task.n_tokens + 100)
    full = task.score(everything)
    few = task.score(np.full(task.n_layer, 40))
    assert 0 < full < 1 and few != full
    assert task.score(everything) == full and task.score(np.full(task.n_layer, 40)) == few


def test_a_scheme_is_what_the_cache_keeps(llm):
    task = training.Training(llm, examples(llm, 1), True, "contained")
    task.score(np.array([40, 50, 60]))
    kept = llm.engine.kept()
    assert (kept.T == kept[:, 0]).all() and (np.diff(kept[:, 0]) == 10).all(), (
        "40, 50, 60 rows and the answer behind them"
    )


def test_contained_answers_are_counted(llm):
    from edgekv_lab.eval.greedy import say

    (example,), everything = examples(llm, 1), np.full(3, 10**6)
    task = training.Training(llm, [example], True, "contained")
    task.score(everything)
    reading, preset = task._readings[0].reading, methods.get(training.SCORE)
    reading.compress(
        preset, replace(llm.settings, preset=preset, budget=np.full((3, 2), 10**6, np.int32))
    )
    word = max(say(llm, reading.logits, training.needle.ANSWER_TOKENS).split(), key=len)
    found = [
        training.Example(example.messages, "", answers)
        for answers in (("no such words", word), ("no such words",))
    ]
    assert training.Training(llm, found, True, "contained").score(everything) == 0.5


def test_layers_with_a_sliding_window_take_no_part(tiny):
    llm = evolkv.load(str(tiny("gemma3")), 2048, n_threads=1)
    task = training.Training(llm, examples(llm, 1), True, "likelihood")
    profile = evolkv.make(task, 60, Search(group=2, generations=1, population=3))
    assert profile.heads.tolist() == [[False], [True], [False], [True]]


def test_a_profile_of_the_engine_is_found_again_and_used(llm, tmp_path):
    points = []
    task = training.Training(llm, examples(llm), True, "likelihood")
    profile = evolkv.make(
        task,
        60,
        Search(group=2, generations=2, population=4, seed=5),
        partial=tmp_path / "p.partial",
        report=points.append,
        command="c",
    )
    assert profile.kind == "evolkv"
    assert profile.score == "snapkv"
    assert profile.seed == 5
    assert profile.calibration == task.task
    assert len(points) == 2 and not list(tmp_path.iterdir())
    assert np.ptp(profile.shares, axis=2).max() == 0, "all KV heads of a layer have the same"
    profiles.write(profile, tmp_path / "p.gguf")
    got = profiles.read(tmp_path / "p.gguf")
    assert np.array_equal(got.shares, profile.shares)
    assert (got.seed, got.kind, got.command) == (5, "evolkv", "c")
    ratio = 60 / task.n_tokens
    assert profile.shares_at(ratio).mean() == pytest.approx(ratio)


def test_where_no_answer_is_found_no_profile_is_made(llm):
    hopeless = [replace(example, answers=("no such words",)) for example in examples(llm, 1)]
    with pytest.raises(BadInput, match="likelihood"):
        evolkv.make(
            training.Training(llm, hopeless, True, "contained"),
            60,
            Search(group=3, generations=1, population=3),
        )


def test_texts_that_do_not_fit_and_models_without_a_store_are_refused(llm, tiny):
    from edgekv.errors import Unsupported
    from tests.engine import load

    long = training.needles(0, 1, [5000], str.split)
    with pytest.raises(BadInput, match="ctx-size"):
        training.Training(llm, long)
    with pytest.raises(Unsupported, match="uncompressed"):
        training.Training(load(tiny("llama-gqa")), examples(llm))


# ---- the command


def call(line: str = "", *words: str):
    return typed(f"profile evolkv {line}", *words)


SMALL = "--kv-budget 60 --group 2 --generations 1 --population 3 --cases 1 -c 1024 -t 1"


def test_the_command_records_itself_and_prints_the_curve(tiny, tmp_path, monkeypatch):
    from edgekv.profiles import places

    monkeypatch.setattr(places, "user_cache", lambda: tmp_path / "cache")
    model = str(shutil.copy(tiny("llama-gqa"), tmp_path / "m.gguf"))
    task = jsonl(
        tmp_path,
        {
            "context": "The wall is high and the gate is low. " * 12,
            "question": "What is high?",
            "answers": ["wall"],
        },
    )
    done = call(f"-m {model} --task {task} {SMALL} --fitness likelihood --seed 4")
    assert done.exit_code == 0 and done.stdout.startswith("at 0."), done.output
    assert "1 of 1 texts read" in done.stderr
    assert "group 1/1, generation 1/1: best" in done.stderr
    assert "total 180 tokens" in done.stderr
    profile = profiles.find(model, kind="evolkv")
    assert profile.seed == 4
    assert (
        profile.command
        == "edgekv profile evolkv -m m.gguf --task task.jsonl --kv-budget 60 --setting aware"
        " --fitness likelihood --total fixed --group 2 --generations 1 --population 3 --cases 1"
        " --seed 4"
    )


def test_ctrl_c_keeps_what_is_done(tiny, tmp_path, monkeypatch):
    model = str(tiny("llama-gqa"))
    out = tmp_path / "p.gguf"
    real = training.Training.score
    asked = []

    def score(self, rows):
        if len(asked) == 2:
            raise KeyboardInterrupt
        asked.append(rows.tolist())
        return real(self, rows)

    monkeypatch.setattr(training.Training, "score", score)
    line = f"-m {model} {SMALL} --lengths 100 -o {out}"
    done = call(line)
    assert done.exit_code == 130
    assert "the same command goes on from there" in done.stderr
    assert not out.exists()
    assert len(json.loads((tmp_path / "p.gguf.partial").read_text())["scores"]) == 2
    monkeypatch.setattr(training.Training, "score", real)
    assert call(line).exit_code == 0 and [path.name for path in tmp_path.iterdir()] == ["p.gguf"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--task", "poems"], "no task 'poems'"),
        (["--task", "missing.jsonl"], "missing.jsonl"),
        (["--kv-budget", "20"], "larger --kv-budget"),
        (["--kv-budget", "900"], "smaller --kv-budget"),
        (["--lengths", "1,x"], "1500,3000"),
        (["--group", "1"], "group"),
        (["-o", "no/such/folder/p.gguf"], "folder"),
        (["--lengths", "3000"], "--ctx-size"),
        (["-m", "missing.gguf"], "missing.gguf"),
    ],
)
def test_mistakes_are_one_line(tiny, tmp_path, monkeypatch, args, says):
    monkeypatch.chdir(tmp_path)
    line = f"-m {tiny('llama-gqa')} -o p.gguf --lengths 100 --kv-budget 60 --cases 1 -c 1024 -t 1"
    assert says in refused(call(line, *args))
