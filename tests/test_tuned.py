"""tuned: slopes and steps by hand, a search with a known optimum, going on after a stop, cases, nearness on the engine, the command."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from edgekv import commands, profiles
from edgekv.errors import BadInput, Unsupported
from edgekv.profiles import file, nearness, tuned
from tests.engine import load
from tests.test_profiles import MAPS

PLAN = tuned.Plan(rounds=2, n_cases=4, n_pairs=3, n_tokens=1000, n_checks=2)
METHOD = "score=keydiff,budget=profile,merge=summary"
TEXT = "The wall is high and the gate is low. The mill stands where the brook bends, and behind it lies the smaller of both ponds. " * 6


@pytest.fixture(scope="module")
def profile(tiny):
    base = np.array([[0.3, 0.35], [0.5, 0.4], [0.45, 0.4]])
    shares = np.stack([file.scale(base.ravel(), ratio).reshape(3, 2) for ratio in (0.05, 0.2, 0.4, 0.6)])
    return profiles.Profile(profiles.identify(str(tiny("llama-gqa"))), "probe", (0.05, 0.2, 0.4, 0.6), shares.astype(np.float32), sink=0, window=0)


@pytest.fixture(scope="module")
def model(tiny, profile, tmp_path_factory):
    """A model with a profile beside it."""
    path = shutil.copy(tiny("llama-gqa"), tmp_path_factory.mktemp("tune") / "m.gguf")
    profiles.write(profile, path.with_name("kvbudget-m.gguf"))
    return str(path)


@pytest.fixture(scope="module")
def llm(model):
    return tuned.load(model, METHOD, 0.4, 1000, n_threads=1, n_threads_batch=1)


# ---- slopes and steps


def test_slopes_are_found_and_their_error_too():
    rng = np.random.default_rng(0)
    true, signs = rng.standard_normal(20), rng.choice([-1.0, 1.0], (4000, 20))
    found, error = tuned.slopes(signs, tuned.STEP * (signs @ true + rng.standard_normal(4000)))
    assert error == pytest.approx(4000**-0.5, rel=0.2)
    np.testing.assert_allclose(found, true / (1 + tuned.RIDGE), atol=5 * error)


def test_a_head_that_does_not_move_has_no_slope():
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (50, 3)) * [1, 0, 1]
    found, error = tuned.slopes(signs, signs @ [1.0, 5.0, -1.0])
    assert found[1] == 0 and np.isfinite(error) and tuned.step_from(found, error)[1] == 0


def test_steps_by_hand():
    np.testing.assert_allclose(tuned.step_from(np.array([0.2, -0.3, 0.1, 9.0, 0.0]), 0.1), [-0.1, 0.3, 0, -0.5, 0])
    assert not tuned.step_from(np.zeros(3), 0.0).any()


def test_full_heads_stay_and_none_is_above_one():
    np.testing.assert_allclose(tuned.moved(np.array([[0.95, 0.5, 0.2]]), np.array([[-1.0, 2.0, np.log(2)]])), [[0.95, 1, 0.4]])


# ---- the search


class Fake:
    """Instead of `Nearness`: the loss is how far the shares, scaled to the ratio, are from half as much again for head (0, 1)."""

    asked = 0

    def __init__(self, llm, case):
        self.wanted = profiles.find(llm.model_path).shares_at(0.4)
        self.wanted[0, 1] *= 1.5
        self.noise = np.random.default_rng(len(case.text))

    def __call__(self, shares):
        Fake.asked += 1
        return float(0.01 * np.exp(0.25 * np.square(np.log(shares) - np.log(self.wanted)).sum() + 0.01 * self.noise.standard_normal()))


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(tuned, "Nearness", Fake)
    monkeypatch.setattr(Fake, "asked", 0)


def test_the_search_moves_to_where_it_is_nearer(llm, profile, fake, tmp_path):
    steps = []
    found, check = tuned.make(llm, profile, replace(PLAN, n_cases=20, n_checks=3), partial=tmp_path / "p", progress=lambda *x: steps.append(x), command="c")
    assert check.after < check.before and check.n == 3 and Fake.asked == 2 * (2 * 20 * 3 + 3) == steps[-1][1] == steps[-1][0] == len(steps)
    gain = np.log(found.shares_at(0.4) / profile.shares_at(0.4))
    others = np.delete(gain.ravel(), 1)
    assert gain[0, 1] - others.max() > 0.15 and np.abs(others - np.median(others)).max() < 0.2
    assert (found.kind, found.score, found.command, found.seed, found.ratios) == ("tuned", "keydiff", "c", 0, profile.ratios)
    half, tenth = (np.log(found.shares_at(r) / profile.shares_at(r)) for r in (0.2, 0.04))
    assert gain[0, 1] - np.median(gain) > half[0, 1] - np.median(half) > tenth[0, 1] - np.median(tenth) > 0
    assert found.shares_at(0.04).mean() == pytest.approx(0.04) and not list(tmp_path.iterdir())


def test_a_stopped_search_goes_on_and_ends_the_same(llm, profile, fake, tmp_path):
    def stop(done, total):
        if done == 30:
            raise KeyboardInterrupt

    whole, _ = tuned.make(llm, profile, PLAN)
    asked = Fake.asked
    with pytest.raises(KeyboardInterrupt):
        tuned.make(llm, profile, PLAN, partial=tmp_path / "p", progress=stop)
    again, _ = tuned.make(llm, profile, PLAN, partial=tmp_path / "p")
    assert np.array_equal(whole.shares, again.shares)
    assert Fake.asked - asked == asked + 6, "of the text that was being asked, six tables are tried again"


def test_more_cases_have_those_of_the_first_round(llm, profile, fake, tmp_path):
    def stop(done, total):
        if done == 25:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tuned.make(llm, profile, replace(PLAN, rounds=1), partial=tmp_path / "p", progress=stop)
    assert Fake.asked == 25, "four texts with six tables each, and a check"
    tuned.make(llm, profile, replace(PLAN, rounds=1, n_cases=6), partial=tmp_path / "p")
    assert Fake.asked == 25 + 2 * 6 + 2 * PLAN.n_checks


def test_the_kept_maps_go_along(llm, profile, fake):
    assert tuned.make(llm, profile, PLAN)[0].surrogate is None
    weights = np.zeros((3, 2, MAPS.weights.shape[2]), np.float32)
    assert tuned.make(llm, replace(profile, surrogate=replace(MAPS, weights=weights)), PLAN)[0].surrogate.weights is weights


def test_a_result_that_is_no_nearer_is_refused(llm, profile, monkeypatch, tmp_path):
    monkeypatch.setattr(tuned, "Nearness", lambda llm, case: lambda shares: 0.5)
    with pytest.raises(BadInput, match="more --cases"):
        tuned.make(llm, profile, PLAN, partial=tmp_path / "p")


# ---- cases


def test_cases_differ_and_are_always_the_same(llm):
    def tokenize(text):
        return llm.tokenize(text.encode(), add_bos=False)

    first, again, other = (nearness.case(seed, 1500, tokenize) for seed in (1, 1, 2))
    assert first == again != other
    for case in (first, other):
        assert len(tokenize(case.text)) > 1400
        assert len(case.asked) == nearness.QUESTIONS + nearness.SENTENCES
        for question, answer in case.asked[nearness.QUESTIONS :]:
            assert answer.split()[: nearness.FIRST] == question.split('"')[1].split() and answer.rstrip(".") in case.text.replace("\n", " ")


# ---- on the engine


CASE = nearness.Case("{brackets} {0} " + TEXT * 3, (("Where does the mill stand?", "Where the brook bends."), ("What is high?", "The wall.")))


def test_all_rows_are_the_full_cache_and_more_are_nearer(llm):
    near = nearness.Nearness(llm, CASE)
    far = []
    for ratio in (0.3, 0.8, 1.0):
        near._settings = replace(near._settings, ratio=ratio)
        far.append(near(np.full((3, 2), ratio)))
    assert far[0] > far[1] > far[2] == nearness.LEAST


def test_nothing_is_left_over_from_the_table_before(llm):
    near, even, uneven = nearness.Nearness(llm, CASE), np.full((3, 2), 0.4), np.array([[0.1, 0.7], [0.7, 0.1], [0.4, 0.4]])
    first = near(even)
    kept = llm._kv.kept()
    assert first != near(uneven) and (llm._kv.kept() != kept).any() and llm._kv.kept().sum() == kept.sum()
    assert near(even) == first and np.array_equal(llm._kv.kept(), kept) and llm.n_tokens == len(near._text)


def test_models_without_a_store_and_methods_without_shares_are_refused(model, tiny, profile):
    with pytest.raises(Unsupported, match="uncompressed"):
        tuned.make(load(tiny("llama-gqa")), profile, PLAN)
    with pytest.raises(BadInput, match="budget=profile"):
        tuned.load(model, "snapkv", 0.2, 1000)


# ---- the command


def call(*args: str):
    return CliRunner().invoke(commands.main, ["profile", "tuned", *args], prog_name="edgekv")


SMALL = ("--kv-method", METHOD, "--rounds", "1", "--cases", "2", "--pairs", "2", "--tokens", "1000", "-t", "1")


def test_the_command_records_itself_and_says_what_was_won(model, fake, tmp_path):
    out = tmp_path / "p.gguf"
    done = call("-m", model, "-o", str(out), *SMALL, "--kv-ratio", "0.4", "--cases", "8", "--seed", "3")
    assert done.exit_code == 0 and "on 8 texts that nothing was learned from" in done.stdout, done.output
    found = profiles.read(out)
    assert found.kind == "tuned" and found.seed == 3 and found.command == (
        f"edgekv profile tuned -m m.gguf --kv-method {METHOD} --kv-ratio 0.4 --rounds 1 --cases 8 --pairs 2 --tokens 1000 --seed 3")
    assert [path.name for path in tmp_path.iterdir()] == ["p.gguf"]


def test_ctrl_c_keeps_what_is_done(model, fake, monkeypatch, tmp_path):
    real = Fake.__call__

    def stop(self, shares):
        if Fake.asked == 5:
            raise KeyboardInterrupt
        return real(self, shares)

    args = ("-m", model, "-o", str(tmp_path / "p.gguf"), *SMALL, "--kv-ratio", "0.4", "--cases", "8")
    monkeypatch.setattr(Fake, "__call__", stop)
    done = call(*args)
    assert done.exit_code == 130 and "the same command goes on from there" in done.stderr and [p.name for p in tmp_path.iterdir()] == ["p.gguf.partial"]
    monkeypatch.setattr(Fake, "__call__", real)
    assert call(*args).exit_code == 0 and [path.name for path in tmp_path.iterdir()] == ["p.gguf"]


@pytest.mark.parametrize(("args", "says"), [
    (["--kv-method", "snapkv"], "budget=profile"), (["--kv-profile", "none"], "edgekv profile probe"), (["--kv-profile", "missing.gguf"], "missing.gguf"),
    (["--kv-ratio", "7"], "7"), (["--tokens", "20"], "tokens"), (["-o", "no/such/folder/p.gguf"], "folder"), (["-m", "missing.gguf"], "missing.gguf"),
])
def test_mistakes_are_one_line(model, tmp_path, monkeypatch, args, says):
    monkeypatch.chdir(tmp_path)
    done = call("-m", model, "-o", "p.gguf", *SMALL, *args)
    lines = [line for line in done.stderr.splitlines() if line]
    assert done.exit_code == 2 and len(lines) == 1 and lines[0].startswith("edgekv: ") and says in lines[0], done.output
