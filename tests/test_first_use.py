"""First use: the profile is made once, announced, may be skipped or refused, and is made for `auto`
alone.
"""

from __future__ import annotations

import json
import signal
import sys
from typing import ClassVar

import pytest

from edgekv.choice.choose import WITHOUT_PROFILE
from edgekv.choice.config import KVConfig
from edgekv.commands.options import EngineOptions
from edgekv.commands.progress import WorkBar, about
from edgekv.learn import contest, probe_profile
from edgekv.profiles import find
from edgekv.profiles.winners import METHODS
from tests.test_cli import call


@pytest.fixture
def model(tiny, tmp_path, monkeypatch):
    """A tiny model that no profile has been made for."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(contest, "N_READ", 320)
    return str(tiny("llama-gqa"))


@pytest.fixture
def cached(monkeypatch):
    """Calls of what makes a profile; nothing is made."""
    calls: list[str] = []
    monkeypatch.setattr(
        probe_profile, "cache", lambda path, progress, **options: calls.append(path)
    )
    return calls


def run(model, *more):
    return call(
        "run", "-m", model, "-p", "x " * 200, "-n", "1", "--raw", "-c", "1024", "-t", "1", *more
    )


def test_a_profile_is_made_and_found_the_next_time(model):
    first = run(model, "--kv-ratio", "0.3")
    assert first.exit_code == 0 and "one-time preparation of this model" in first.stderr
    assert not {"KV heads", "rows", "profile"} & set(first.stderr.split())
    made = find(model)
    assert made is not None and made.kind == "probe" and made.command == "made on first use"
    again = run(model, "--kv-ratio", "0.3", "--json")
    assert again.exit_code == 0 and "preparation" not in again.stderr
    assert json.loads(again.stdout)["kv_method"] in METHODS


@pytest.mark.parametrize(
    "words",
    [
        ["--kv-ratio", "1"],
        ["--kv-ratio", "0.3", "--kv-profile", "none"],
        ["--kv-ratio", "0.3", "--kv-method", "tova"],
    ],
)
def test_nothing_is_made_where_nothing_needs_it(model, cached, words):
    result = run(model, *words)
    assert result.exit_code == 0 and not cached and "preparation" not in result.stderr


def test_a_budget_is_reason_enough(model, cached):
    assert run(model, "--kv-budget", "100").exit_code == 0 and cached == [model]


def test_ctrl_c_skips_it(model, monkeypatch):
    def interrupted(path, progress, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(probe_profile, "cache", interrupted)
    result = run(model, "--kv-ratio", "0.3", "--json")
    assert result.exit_code == 0 and "without the preparation" in result.stderr
    assert "read slower" in result.stderr
    assert json.loads(result.stdout)["kv_method"] == WITHOUT_PROFILE


def steps(before: float, cold: float, n: int, done: int, total: int) -> list[tuple[float, int]]:
    """(time, done) of work that reports every 0.5 s: what is done at first was done by an earlier
    run, loading takes `before` seconds, and the first steps wait `cold` seconds longer."""
    times = [before + cold + 0.5 * i for i in range(1, n + 1)]
    return [
        (before, done),
        *((t, done + round((total - done) * (i + 1) / n)) for i, t in enumerate(times)),
    ]


def said(capsys, course: list[tuple[float, int]], total: int) -> str:
    now = [0.0]
    with WorkBar(lambda words: f"edgekv: this takes {words}", lambda: now[0]) as bar:
        for now[0], done in course:
            bar(done, total)
    assert bar.said == bool(course)
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("before", "cold", "done"),
    [
        (0, 0, 0),
        (5, 0, 0),
        (0, 20, 0),
        (3, 10, 0),
        (0, 0, 70_000),
        (3, 10, 95_000),
    ],
)
def test_how_long_it_takes_is_said_once_without_a_terminal(capsys, before, cold, done):
    """240 steps of 0.5 s are two minutes: loading, a cold beginning, and what an earlier
    run did count for nothing."""
    line = said(capsys, steps(before, cold, 240, done, 100_000), 100_000)
    assert line == "edgekv: this takes about 2 to 3 minutes\n"


def test_a_terminal_gets_a_bar_with_the_time_that_is_left(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    seen, now = [], [0.0]
    with WorkBar(lambda words: f"edgekv: this takes {words}", lambda: now[0]) as bar:
        for i in range(100):
            now[0] = float(i)
            bar(i, 240)
            bar._bar.refresh()
            seen.append(capsys.readouterr().err)
    assert "measuring how long it takes" in seen[3] and "left" not in seen[3]
    assert "edgekv: this takes about 3 to 5 minutes" in "".join(seen[:12])
    assert "about 2 to 3 minutes left" in seen[99] and "41%" in seen[99]


def test_the_time_that_is_left_follows_the_machine(monkeypatch):
    """It becomes three times as slow in the middle, and minutes later the estimate says so."""
    now = [0.0]
    bar = WorkBar(str, lambda: now[0])
    for i in range(1000):
        now[0] += 0.5 if i < 500 else 1.5
        bar(i, 1200)
    assert bar._bar.tasks[0].time_remaining == pytest.approx(200 * 1.5, rel=0.1)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (3, "some seconds"),
        (20, "about 20 to 30 seconds"),
        (60, "about 50 to 80 seconds"),
        (100, "about 1 to 2 minutes"),
        (120, "about 2 to 3 minutes"),
        (600, "about 8 to 13 minutes"),
        (2000, "about 25 to 40 minutes"),
        (7200, "about 2 to 3 hours"),
        (4000, "about 55 to 85 minutes"),
        (3600 * 30, "about 24 to 38 hours"),
    ],
)
def test_a_time_is_said_as_a_range(seconds, words):
    assert about(seconds) == words


def test_the_line_says_what_a_newcomer_needs(model, monkeypatch):
    def slow(path, progress, **options):
        now = [0.0]
        progress._clock = progress._bar.get_time = lambda: now[0]
        for i in range(241):
            now[0] = 0.5 * i
            progress(i, 240)

    monkeypatch.setattr(probe_profile, "cache", slow)
    lines = run(model, "--kv-ratio", "0.3").stderr.splitlines()
    assert lines[0] == (
        "edgekv: one-time preparation of this model, about 2 to 3 minutes; "
        "Ctrl-C starts now, documents are then read slower"
    )
    assert not any("preparation" in line for line in lines[1:])


def test_a_model_that_cannot_be_read_is_left_to_whoever_loads_it(cached, tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    result = run(str(broken), "--kv-ratio", "0.3")
    assert result.exit_code == 2 and not cached and "broken.gguf" in result.stderr


def test_a_program_asks_for_a_profile_and_makes_it(model, monkeypatch):
    import edgekv

    monkeypatch.setattr(
        probe_profile,
        "named_texts",
        lambda: {"fog": "the fog came in at nine and went at ten. " * 12},
    )
    text = b"A line of text that is read again and again. " * 8

    def stats():
        with edgekv.Llama(model, n_ctx=512, kv_ratio=0.4, n_threads=1, verbose=False) as llm:
            llm.eval(llm.tokenize(text))
            return llm.kv_stats()

    assert not edgekv.has_profile(model)
    without, steps = stats(), []
    path = edgekv.make_profile(model, lambda *step: steps.append(step), n_threads=1)
    assert edgekv.has_profile(model) and steps[0][0] == 0 and steps[-1][0] == steps[-1][1] > 0
    found = stats()
    assert (without.method, without.profile) == (
        WITHOUT_PROFILE,
        "",
    ) and "no profile" in without.why
    assert found.method in METHODS and found.profile == path and "contest" in found.why


def test_a_program_is_told_what_is_no_model(model, tmp_path):
    import edgekv

    for path in (tmp_path / "missing.gguf", __file__):
        for ask in (edgekv.has_profile, edgekv.make_profile):
            with pytest.raises(edgekv.BadInput, match=str(path)):
                ask(path)


def test_a_profile_that_is_stopped_by_its_progress_goes_on(model, monkeypatch):
    import edgekv

    monkeypatch.setattr(
        probe_profile,
        "named_texts",
        lambda: {"fog": "the fog came in at nine. " * 12, "nails": "nails, a saw; " * 20},
    )

    monkeypatch.setattr(contest, "cost", lambda llm: 8000)

    def stop(done, total):
        if done > (total - 8000) / 2:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        edgekv.make_profile(model, stop, n_threads=1)
    assert not edgekv.has_profile(model)
    steps = []
    edgekv.make_profile(model, lambda *step: steps.append(step), n_threads=1)
    assert 0 < steps[0][0] < steps[0][1] and edgekv.has_profile(model)


# ---- in stages


def engine(model):
    return EngineOptions(
        model=model,
        ctx_size=2048,
        batch_size=512,
        ubatch_size=512,
        threads=1,
        threads_batch=None,
        gpu_layers=0,
        flash_attn="on",
        cache_type_k=None,
        cache_type_v=None,
        seed=1,
        verbose=False,
        kv=KVConfig(ratio=0.3),
    )


def test_the_longer_stage_is_another_process_while_somebody_types(model, capsys):
    from edgekv.commands.later import Later
    from edgekv.commands.load import learn

    options = engine(model)
    with Later() as later:
        learn(options, later)
        first = find(model, predicts=True)
        assert first is not None and first.contest is None, "it can be used already"
        assert "goes on while you type" in capsys.readouterr().err
        assert not later.is_done()
        learn(options, later)  # as when a ratio is set: nothing is made twice
        assert find(model).contest is None
        later.go_on()
        assert later._process.wait(timeout=120) == 0 and later.is_done()
    assert find(model).contest is not None
    with Later() as later:
        learn(options, later)
        assert not later.has_begun


def test_nothing_is_left_for_later_where_memory_has_no_room(model, monkeypatch):
    from edgekv.commands.later import Later
    from edgekv.commands.load import learn

    monkeypatch.setattr("edgekv.memory.room.memory_free", lambda swap: 2**30)
    with Later() as later:
        learn(engine(model), later)
        assert not later.has_begun and find(model).contest is not None


def test_a_chat_that_ends_ends_the_other_process(model):
    from edgekv.commands.later import Later

    with Later() as later:
        later.begin(model, {"n_threads": 1})
        process = later._process
    assert not process.is_running() and not later.is_done()


def test_a_chat_takes_up_what_was_found_before_its_first_question(monkeypatch):
    from edgekv.commands import chat, load
    from edgekv.commands.conversation import Conversation
    from tests.fakes import FakeLlama

    class Done:
        seen: ClassVar[list[str]] = []
        is_ready = True

        def go_on(self):
            self.seen.append("on")

        def stand_still(self):
            self.seen.append("still")

        def is_done(self):
            return self.is_ready

    class Closed(FakeLlama):
        def close(self):
            self.closed = True

    old, new = Closed(), Closed()
    loads = []
    monkeypatch.setattr(load, "load_llama", lambda options, later: loads.append(1) or new)
    conversation = Conversation(old, {})
    lines = chat.with_later(iter(["a", "/help", "b"]), Done(), conversation, engine("m"))
    assert next(lines) == "a" and conversation.llm is new and old.closed
    assert Done.seen == ["on", "still"]
    assert next(lines) == "/help" and loads == [1], "it is loaded once"
    assert list(lines) == ["b"] and Done.seen == ["on", "still"] * 4

    def interrupted(options, later):
        signal.raise_signal(signal.SIGINT)
        return new

    stopped = Conversation(Closed(), {})
    with monkeypatch.context() as patch:
        patch.setattr(load, "load_llama", interrupted)
        lines = chat.with_later(iter(["a", "b"]), Done(), stopped, engine("m"))
        assert list(lines) == ["b"] and stopped.llm is new, "Ctrl-C drops the line, not the chat"

    asked, chosen = Conversation(Closed(), {}), Conversation(Closed(), {})
    for talk in (asked, chosen):
        lines = chat.with_later(iter(["a", "b"]), Done(), talk, engine("m"))
        Done.is_ready = False
        assert next(lines) == "a"
        if talk is asked:
            talk.messages.append({"role": "user", "content": "a"})
        else:
            talk.llm.kv_set(ratio=0.5)
        Done.is_ready = True
        assert next(lines) == "b" and loads == [1], "what was asked or chosen stays"
