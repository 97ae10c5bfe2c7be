"""kv_recall="auto": tokens are recalled where the model's contest came nearer with it."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from typing import Any

import pytest

import edgekv
from edgekv import profiles
from edgekv.commands.report import recall_line, stats_table
from edgekv.errors import BadInput
from edgekv.llama.instead import renewed
from edgekv.profiles.winners import METHODS, PLAIN, RECALL, Distance, Winner, Winners
from tests import mla
from tests.engine import feed, logits, random_profile
from tests.test_cli import call

NEAR, FAR = Distance(0.004, 0.02), Distance(0.03, 0.5)
FOUND = Winners(
    (
        Winner(0.1, PLAIN, "q8_0", "q4_0", NEAR, FAR),
        Winner(0.2, METHODS[0], "q8_0", "q4_0", FAR, FAR, NEAR),
        Winner(0.5, METHODS[0], "q8_0", "q8_0", NEAR, FAR, FAR),
    ),
    None,
    1280,
    190,
)
SAYS = "13.7 times as near"


def judged(model: Any, to: Any) -> str:
    """A profile with the contest above."""
    random_profile(model, to)
    profiles.write(replace(profiles.read(to), contest=FOUND), to)
    return str(to)


@pytest.fixture(scope="module")
def known(tiny, tmp_path_factory):
    """(model, a profile that says what recall brings)."""
    model = str(tiny("llama-gqa"))
    return model, judged(model, tmp_path_factory.mktemp("profile") / "p.gguf")


@pytest.fixture
def opened(known, text, tmp_path, monkeypatch, caplog):
    """opened(options): the model, which has read a text."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    caplog.set_level(logging.WARNING, "edgekv")

    def load(model: str = known[0], profile: str = known[1], **options: Any) -> Any:
        shared = dict(n_ctx=1024, n_threads=1, verbose=False, kv_profile=profile, kv_min_tokens=1)
        llm = edgekv.Llama(model, **{**shared, "kv_recall": "auto", **options})
        llm.eval(list(text(600)))
        return llm

    return load


def test_auto_recalls_where_the_contest_came_nearer(opened, text, caplog):
    auto, named = opened(kv_ratio=0.2), opened(kv_ratio=0.2, kv_recall=RECALL)
    without = opened(kv_ratio=0.2, kv_recall=0)
    answer = text(8, seed=1)
    assert (feed(auto, answer) == feed(named, answer)).all()
    assert (feed(without, answer) != logits(auto)).any()
    stats = auto.kv_stats()
    assert stats.recall == RECALL == auto.kv_config().recall
    assert (stats.method, stats.type_v) == (METHODS[0], "q4_0")  # what the contest measured
    assert stats.n_bytes_used <= 0.21 * stats.n_bytes_full
    assert not caplog.messages


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (dict(kv_ratio=0.5), "found answers no nearer with it at this ratio"),
        (dict(kv_ratio=0.1), "did not try it at this ratio"),
        (dict(kv_ratio=0.2, kv_method="snapkv"), "no contest of this model was held with these"),
        (dict(kv_ratio=0.2, type_k=1, type_v=1), "no contest of this model was held with these"),
        (dict(kv_budget=100), "no contest of this model was held with these"),
        (dict(), "nothing is evicted"),
        (dict(kv_ratio=0.2, kv_method="full"), "nothing is evicted"),
        (dict(kv_ratio=0.2, spec_type="ngram-simple"), "drafts are asked for"),
        (dict(kv_ratio=0.2, draft_model=lambda tokens: tokens[:0]), "drafts are asked for"),
    ],
)
def test_elsewhere_it_is_off_and_one_line_says_why(opened, caplog, tmp_path, options, why):
    llm = opened(**options)
    stats = llm.kv_stats()
    assert (stats.recall, stats.n_bytes_archive, llm.kv_config().recall) == (0, 0, 0)
    (line,) = caplog.messages
    assert line.startswith("edgekv: --kv-recall auto is off: ") and why in line
    assert not list(tmp_path.iterdir())  # nothing was written


def test_a_model_whose_tokens_cannot_be_recalled_goes_without(opened, caplog, tmp_path):
    """Whatever its profile says."""
    model = str(mla.write(tmp_path / "m.gguf"))
    llm = opened(model, judged(model, tmp_path / "p.gguf"), kv_ratio=0.2)
    assert llm.kv_stats().recall == 0 and "are latent" in caplog.text


def test_auto_goes_without_beside_a_gpu(opened, caplog, monkeypatch):
    monkeypatch.setattr("edgekv.model.facts.is_offloaded", lambda n: True)
    assert opened(kv_ratio=0.2).kv_stats().recall == 0 and "beside a GPU" in caplog.text
    assert opened(kv_ratio=0.2, kv_recall=0.1).kv_stats().recall == 0.1


def test_a_folder_that_cannot_be_made_costs_recall_alone(opened, caplog, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert opened(kv_ratio=0.2).kv_stats().recall == 0
    assert "cannot be made" in caplog.text
    with pytest.raises(BadInput, match="cannot be made"):  # a folder that was named is wanted
        opened(kv_ratio=0.2, kv_archive="/dev/null/x")


def test_a_context_recalls_whatever_the_ratio_is_later(opened, text):
    llm = opened(kv_ratio=0.2)
    index = llm.kv_stats().n_bytes_index
    for ratio, share in ((0.5, RECALL), (1.0, 0), (0.2, RECALL)):
        llm.kv_set(ratio=ratio)
        assert llm.kv_stats().recall == share
    llm.reset()
    llm.eval(list(text(600)))
    assert llm.kv_stats().n_bytes_index == index == llm.engine.index_bytes(600)
    without = opened(kv_ratio=0.5)
    without.kv_set(ratio=0.2)
    assert without.kv_stats().recall == 0


def test_a_ratio_that_first_compresses_decides(opened):
    llm = opened()
    llm.kv_set(ratio=0.2)
    assert llm.kv_stats().recall == RECALL


def test_a_chat_with_recall_opens_in_a_model_that_was_loaded_without(opened, tmp_path):
    first, path = opened(kv_ratio=0.2), str(tmp_path / "chat")
    first.kv_save(path)
    other = opened(kv_ratio=0.2, kv_recall=0)
    other.kv_load(path, taken_over=lambda note: first.kv_config())
    mine, its = other.kv_stats(), first.kv_stats()
    assert mine.recall == RECALL and mine.n_bytes_archive == its.n_bytes_archive > 0
    assert mine.n_bytes_index == its.n_bytes_index


def test_a_contest_that_ends_beside_the_model_decides(opened, known, tmp_path):
    """As in a server on a model's first use."""
    profile = tmp_path / "p.gguf"
    profiles.write(replace(profiles.read(known[1]), contest=None), profile)
    llm = opened(profile=str(profile), kv_ratio=0.2)
    assert llm.kv_stats().recall == 0
    shutil.copy(known[1], profile)
    with renewed(llm):
        pass
    assert llm.kv_stats().recall == RECALL == llm.engine.archives[1]


# ---- what is said


def test_a_user_hears_of_it_who_did_not_ask(opened):
    assert SAYS in recall_line(opened(kv_ratio=0.2, kv_recall=0).kv_stats())
    for options in (
        dict(kv_ratio=0.2),
        dict(kv_ratio=0.2, kv_recall=0.1),
        dict(kv_ratio=0.1, kv_recall=0),
        dict(kv_ratio=0.5, kv_recall=0),
        dict(kv_recall=0),
        dict(kv_ratio=0.2, kv_recall=0, spec_type="ngram-simple"),
    ):
        assert recall_line(opened(**options).kv_stats()) == ""


def test_a_pipe_hears_nothing_of_it(found):
    done = call(f"run -m {found} -c 1024 -n 2 -t 1 --kv-ratio 0.2 --raw -p hello")
    assert done.exit_code == 0 and "recall" not in done.stderr


def test_fit_plans_what_auto_would_do(found):
    line = f"fit -m {found} -c 4096 --memory 8GiB --json --kv-recall auto --ratios"
    best = {ratio: json.loads(call(f"{line} {ratio}").stdout)["best"] for ratio in (0.5, 0.2, 1)}
    assert best[0.2]["index"] > 0 and best[0.2]["archive"] > 0
    assert best[0.5]["index"] == best[0.5]["archive"] == best[1]["index"] == 0
    named = json.loads(call(f"{line.replace('auto', '0.05')} 0.2").stdout)["best"]
    sizes = "kv", "index", "archive", "n_kept"
    assert [named[x] for x in sizes] == [best[0.2][x] for x in sizes]


def test_statistics_say_what_the_archive_and_its_index_take(opened, text):
    llm = opened(kv_ratio=0.2)
    for token in text(4, seed=1):
        llm.eval([token])
    stats = llm.kv_stats()
    assert stats.n_bytes_index == llm.engine.index_bytes(600) < stats.n_bytes_used
    assert stats.n_bytes_recalled > 0
    table = stats_table(stats)
    for n_bytes in (stats.n_bytes_archive, stats.n_bytes_index, stats.n_bytes_recalled):
        assert f"{n_bytes / 2**20:.1f} MiB" in table.partition("archive")[2].partition("\n")[0]
