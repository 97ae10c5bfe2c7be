"""First use: the profile is made once, announced, may be skipped or refused, and is made for `auto` alone."""

from __future__ import annotations

import json

import pytest

from edgekv.choose import WITH_PROFILE, WITHOUT_PROFILE
from edgekv.commands import first_use
from edgekv.profiles import find, probe_profile
from tests.test_cli import call


@pytest.fixture
def model(tiny, tmp_path, monkeypatch):
    """A tiny model that no profile has been made for."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return str(tiny("llama-gqa"))


@pytest.fixture
def cached(monkeypatch):
    """Calls of what makes a profile; nothing is made."""
    calls: list[str] = []
    monkeypatch.setattr(probe_profile, "cache", lambda path, progress, **options: calls.append(path))
    return calls


def run(model, *more):
    return call("run", "-m", model, "-p", "x " * 200, "-n", "1", "--raw", "-c", "1024", "-t", "1", *more)


def test_a_profile_is_made_and_found_the_next_time(model):
    first = run(model, "--kv-ratio", "0.3")
    assert first.exit_code == 0 and "first use" in first.stderr and "--kv-profile none" in first.stderr
    made = find(model)
    assert made is not None and made.kind == "probe" and made.command == "made on first use"
    again = run(model, "--kv-ratio", "0.3", "--json")
    assert again.exit_code == 0 and "first use" not in again.stderr
    assert json.loads(again.stdout)["kv_method"] == WITH_PROFILE


@pytest.mark.parametrize("words", [["--kv-ratio", "1"], ["--kv-ratio", "0.3", "--kv-profile", "none"], ["--kv-ratio", "0.3", "--kv-method", "tova"]])
def test_nothing_is_made_where_nothing_needs_it(model, cached, words):
    result = run(model, *words)
    assert result.exit_code == 0 and not cached and "first use" not in result.stderr


def test_a_budget_is_reason_enough(model, cached):
    assert run(model, "--kv-budget", "100").exit_code == 0 and cached == [model]


def test_ctrl_c_skips_it(model, monkeypatch):
    def interrupted(path, progress, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(probe_profile, "cache", interrupted)
    result = run(model, "--kv-ratio", "0.3", "--json")
    assert result.exit_code == 0 and "skipped" in result.stderr
    assert json.loads(result.stdout)["kv_method"] == WITHOUT_PROFILE


def test_how_long_it_takes_is_said_without_a_terminal(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(first_use.time, "monotonic", lambda: now[0])

    class Bar:
        length, pos = 1, 0

        def update(self, n):
            self.pos += n

    report = first_use.Report(Bar())
    for seconds, done in ((1.0, 1), (5.0, 10), (9.0, 20)):
        now[0] = seconds
        report(done, 100)
    assert capsys.readouterr().err == "edgekv: this takes about 50 s\n"


def test_a_model_that_cannot_be_read_is_left_to_whoever_loads_it(cached, tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    result = run(str(broken), "--kv-ratio", "0.3")
    assert result.exit_code == 2 and not cached and "broken.gguf" in result.stderr
