"""contest: what comes nearest to the full cache on a model is kept in its profile, `auto` follows
it, and what was measured is said.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import edgekv
from edgekv import profiles
from edgekv.choice.choose import choose
from edgekv.choice.stored import stored_as
from edgekv.commands.report import stats_table
from edgekv.errors import BadInput
from edgekv.learn import contest, probe_profile
from edgekv.methods import get
from edgekv.methods.kvzap import KVzap
from edgekv.methods.late import LATE, Late
from edgekv.model.facts import model_info
from edgekv.profiles.places import cached
from edgekv.profiles.winners import METHODS, PLAIN, RATIOS, RECALL, Distance, Winner, Winners, parse
from tests import models
from tests.engine import TYPES
from tests.test_cli import call
from tests.test_methods import layer
from tests.test_methods import method as score_of

NEAR = Distance(0.004, 0.02)
FAR = Distance(0.03, 0.5)
FOUND = Winners(
    (
        Winner(0.1, PLAIN, "q8_0", "q4_0", FAR, FAR, NEAR),
        Winner(0.2, METHODS[0], "q8_0", "q5_1", NEAR, FAR),
        Winner(0.5, METHODS[2], "q8_0", "q8_0", NEAR, FAR),
    ),
    Distance(0.09, 0.4),
    1280,
    190,
)
LINE = "0.2 on this model: 0.004 nats from the full cache; q4_0: 0.09"


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Contests of a moment."""
    monkeypatch.setattr(contest, "N_READ", 320)
    monkeypatch.setattr(contest, "N_NEXT", 16)


@pytest.fixture(scope="module")
def learned(tiny, tmp_path_factory):
    """(model, a profile of it with maps and no contest, its file)."""
    model = str(tiny("llama-gqa"))
    llm = probe_profile.load(model, 128, n_threads=1)
    words = ["the fog came in at nine and went at ten. " * 12, "nails, a saw, two rakes; " * 12]
    path = tmp_path_factory.mktemp("learned") / "p.gguf"
    profile = probe_profile.make(llm, words, n_tokens=128)
    profiles.write(profile, path)
    return model, profile, path


@pytest.fixture
def known(learned, tmp_path):
    """(model, file of its profile with the contest FOUND)."""
    model, profile, _ = learned
    path = tmp_path / "known.gguf"
    profiles.write(replace(profile, contest=FOUND), path)
    return model, str(path)


# ---- what is kept


def test_a_profile_keeps_its_contest(known):
    found = profiles.read(known[1])
    assert found.contest == FOUND and parse(FOUND.text()) == FOUND


@pytest.mark.parametrize(("ratio", "nearest"), [(0.05, 0.1), (0.3, 0.2), (0.35, 0.5), (0.9, 0.5)])
def test_a_ratio_follows_the_nearest_one(ratio, nearest):
    assert FOUND.at(ratio).ratio == nearest
    assert Winners().at(ratio) is None and Winners().line(ratio) == ""


def test_a_profile_from_before_recall_still_opens():
    older = json.loads(FOUND.text())
    for one in older["found"]:
        del one["recall"]
    found = parse(json.dumps(older))
    assert found.at(0.1) == replace(FOUND.at(0.1), recall=None)
    assert found.at(0.1).recall_gain is None


def test_how_many_times_as_near_recall_came():
    """By both kinds of tokens: 7.5 and 25 times."""
    assert FOUND.at(0.1).recall_gain == pytest.approx((7.5 * 25) ** 0.5)
    assert "nats from the full cache; with recall: 0.004; q4_0" in FOUND.line(0.1)


def test_the_line_has_the_number_and_that_of_q4_0():
    assert FOUND.line(0.2) == LINE
    assert replace(FOUND, q4_0=None).line(0.2) == LINE.partition(";")[0]


def record(**change: Any) -> str:
    return json.dumps(json.loads(FOUND.text()) | change)


WINNER = json.loads(FOUND.text())["found"][0]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "[" * 5000,
        record(found=None),
        record(found=[WINNER, WINNER]),
        record(found=[WINNER | {"ratio": 0.3}]),
        record(found=[WINNER | {"method": "full"}]),
        record(found=[WINNER | {"type_k": "f64"}]),
        record(found=[WINNER | {"type_k": ["q8_0"]}]),
        record(found=[WINNER | {"distance": {"text": -1, "answers": 0}}]),
        record(found=[WINNER | {"distance": {"text": float("nan"), "answers": 0}}]),
        record(found=[WINNER | {"distance": {"text": "0.1", "answers": 0}}]),
        record(found=[WINNER | {"recall": 0.01}]),
        record(found=[WINNER | {"recall": {"text": -1, "answers": 0}}]),
        record(found=[WINNER | {"recall": {"text": 0.1}}]),
        record(found=[list(WINNER)]),
        record(q4_0={}),
        record(n_tokens=-1),
        record(n_tokens=1.5),
        record(n_judged=True),
    ],
)
def test_what_no_contest_found_is_refused(learned, tmp_path, text):
    with pytest.raises(ValueError):
        parse(text)
    if text:
        odd = replace(learned[1], contest=type("Odd", (), {"text": lambda self: text})())
        profiles.write(odd, tmp_path / "odd.gguf")
        with pytest.raises(BadInput, match="damaged"):
            profiles.read(tmp_path / "odd.gguf")


# ---- the contest


def test_the_winner_is_the_nearest_and_never_further_than_uniform(learned):
    model, _, path = learned
    steps: list[tuple[int, int]] = []
    llm = probe_profile.load(model, 128, n_threads=1)
    with llm:
        found = contest.hold(llm, str(path), lambda *step: steps.append(step))
        assert llm.engine.store.memory().n_past == 0
        cost = contest.cost(llm)
    assert [one.ratio for one in found.found] == sorted(RATIOS)
    for one in found.found:
        assert one.distance.text <= contest.ALIKE * one.plain.text
        assert one.distance.judged <= one.plain.judged
    assert found.q4_0.text > 0 and found.n_tokens == 320 and found.n_judged > 16
    assert steps == sorted(steps) and steps[-1] == (cost, cost)


@pytest.mark.parametrize(("text", "winner"), [(0.022, METHODS[0]), (0.026, PLAIN)])
def test_the_nearest_may_be_a_little_behind_uniform_by_text_alone(text, winner):
    held = object.__new__(contest._Contest)  # no model: only what was found
    held.found = {
        contest.Entrant(PLAIN, 0.2, "q8_0"): Distance(0.02, 0.4),
        contest.Entrant(METHODS[0], 0.2, "q8_0"): Distance(text, 0.2),
    }
    assert held._best(0.2).method == winner


def test_a_candidate_is_as_far_as_reading_with_it_says(learned):
    """The number of a winner, measured again by reading and compressing as a chat does."""
    from edgekv.learn.cache_type import kind_of
    from edgekv.learn.divergence import log_softmax
    from edgekv.learn.reading import predict

    model, _, path = learned
    with probe_profile.load(model, 128, n_threads=1) as llm:
        one = next(x for x in contest.hold(llm, str(path)).found if x.ratio == 0.2)
        text = contest.text(llm)
    said = []
    for options in (
        dict(kv_method="full"),
        dict(
            kv_method=one.method,
            kv_ratio=0.2,
            kv_profile=str(path),
            type_k=TYPES[one.type_k],
            type_v=TYPES[one.type_v],
        ),
    ):
        share = dict(kv_ratio=0.99, n_ctx=1024, n_threads=1, verbose=False)
        with edgekv.Llama(model, **{**share, "kv_method": "snapkv", **options}) as llm:
            if options["kv_method"] == "full":
                llm.kv_set(ratio=0.99, method="snapkv")
                llm.engine.settings = replace(llm.engine.settings, preset=get("full"))
                contest.store_as(llm, "f16")
                reading = contest.Reading(llm, text.read, [])
                reading.compress(get("full"), llm.settings)
            else:
                llm.eval(list(text.read))
                assert kind_of(llm) == contest.kind(one.type_k, one.type_v)
            said.append(log_softmax(np.concatenate(list(predict(llm, text.fed)))))
    far = contest.divergence(*said)[: text.n_next].mean()
    assert far == pytest.approx(one.distance.text, rel=0.02)


def test_recall_is_as_near_as_a_chat_that_writes_one_token_at_a_time(learned, monkeypatch):
    monkeypatch.setattr(contest, "N_READ", 1280)
    model, _, path = learned
    with probe_profile.load(model, 128, n_threads=1) as llm:
        one = contest.hold(llm, str(path)).at(0.2)
        assert not llm.engine.archives[0]
        text = contest.text(llm)
        contest.store_as(llm, "f16")
        reading = contest.Reading(llm, text.read, [])
        reading.compress(get("full"), llm.settings)
        whole = np.concatenate([contest.log_softmax(x) for x in contest.predict(llm, text.fed)])
    types = dict(type_k=TYPES[one.type_k], type_v=TYPES[one.type_v])
    cache = dict(kv_ratio=0.2, kv_method=one.method, kv_profile=str(path), kv_recall=RECALL)
    with edgekv.Llama(model, n_ctx=2048, n_threads=1, verbose=False, **cache, **types) as llm:
        llm.eval(list(text.read))
        stats = llm.kv_stats()
        assert stats.n_bytes_used <= 0.201 * stats.n_bytes_full
        said = []
        for token in text.fed:
            llm.eval([token])
            said.append(llm.logits().copy())
    far = contest.divergence(whole, contest.log_softmax(np.stack(said)))
    assert far[: text.n_next].mean() == pytest.approx(one.recall.text, rel=0.02)


def test_where_an_index_leaves_no_room_for_tokens_recall_is_not_tried(learned):
    model, _, path = learned
    with probe_profile.load(model, 128, n_threads=1) as llm:
        assert contest.hold(llm, str(path)).at(0.1).recall is None


@pytest.mark.parametrize(("gain", "n_tried"), [(contest.CLOSE - 0.1, 1), (contest.CLOSE + 0.1, 3)])
def test_recall_is_tried_at_a_larger_ratio_if_it_brought_much(monkeypatch, gain, n_tried):
    held = object.__new__(contest._Contest)
    monkeypatch.setattr(
        held, "_recalled", lambda one: Distance(FAR.text / gain, FAR.answers / gain), raising=False
    )
    winners = [Winner(ratio, PLAIN, "q8_0", "q8_0", FAR, FAR) for ratio in sorted(RATIOS)]
    tried = [one.recall is not None for one in held._with_recall(winners)]
    assert tried == [i < n_tried for i in range(3)]


def competed(model: str, path: str) -> dict[contest.Entrant, Distance]:
    """What took part in a contest, and how far away it was."""
    with probe_profile.load(model, 128, n_threads=1) as llm:
        held = contest._Contest(llm, path, contest.Work([1], (), None))
        held.winners()
    return held.found


def nearest_in(found, kind: str, ratio: float) -> float:
    return min(d.judged for one, d in found.items() if (one.kind, one.ratio) == (kind, ratio))


def test_methods_that_are_nearly_as_good_are_tried_with_types_that_may_be_nearer(learned):
    found = competed(learned[0], str(learned[2]))
    for ratio in contest.DECIDING:
        kinds = {"q8_0", "q8_0/q4_0", "q5_0/q4_0"}
        gain = nearest_in(found, "q8_0", ratio) / nearest_in(found, "q8_0/q4_0", ratio)
        kinds |= {"q8_0/q5_1"} if gain < contest.CLOSE else set()
        few, fewer = (nearest_in(found, kind, ratio) for kind in (contest.K80_V40, contest.K50_V40))
        kinds |= {"q4_1/q4_0"} if fewer < few else set()
        first = {x.method: d for x, d in found.items() if (x.ratio, x.kind) == (ratio, "q8_0")}
        most = contest.ALIKE * first[PLAIN].text
        nearest = min(d.judged for d in first.values() if d.text <= most)
        for name in (m for m, d in first.items() if d.judged <= contest.CLOSE * nearest):
            tried = {x.kind for x in found if (x.method, x.ratio) == (name, ratio)}
            assert tried == kinds


@pytest.mark.parametrize(("four", "is_tried"), [(None, True), (0.21, True), (0.19, False)])
def test_a_type_between_two_is_tried_where_fewer_bits_brought_little(four, is_tried):
    held = object.__new__(contest._Contest)
    held.found = {contest.Entrant(PLAIN, 0.2, "q8_0"): Distance(1.0, 0.3)}
    if four is not None:  # V in q4_0 is possible
        held.found[contest.Entrant(PLAIN, 0.2, "q8_0/q4_0")] = Distance(1.0, four)
    assert held._promises("q8_0/q5_1", 0.2) == is_tried
    assert held._promises("q8_0/q4_0", 0.2) and held._promises("q5_0/q4_0", 0.2)


@pytest.mark.parametrize(("fewer", "is_tried"), [(0.31, False), (0.29, True)])
def test_keys_of_few_bits_are_tried_where_keys_of_some_more_were_nearer_than_of_8(fewer, is_tried):
    held = object.__new__(contest._Contest)
    held.found = {
        contest.Entrant(PLAIN, 0.2, "q8_0/q4_0"): Distance(1.0, 0.3),
        contest.Entrant(PLAIN, 0.2, "q5_0/q4_0"): Distance(1.0, fewer),
    }
    assert held._promises("q4_1/q4_0", 0.2) == is_tried


@pytest.fixture
def with_lukv(learned, tmp_path):
    """(model, file of its profile with maps, beside which a LU-KV profile lies)."""
    model, _, path = learned
    here = tmp_path / "m.gguf"
    shutil.copy(model, here)
    identity = profiles.identify(str(here))
    shares = np.full((1, identity.n_layer, max(identity.n_head_kv)), 0.3, np.float32)
    lukv = profiles.Profile(identity, "lukv", (0.3,), shares, score="snapkv")
    profiles.write(lukv, tmp_path / "kvbudget-m.lukv-snapkv.gguf")
    return str(here), str(path)


def test_lukv_takes_part_where_it_has_a_profile(with_lukv, learned):
    for model, path, is_there in ((*with_lukv, True), (learned[0], str(learned[2]), False)):
        ratios = {one.ratio for one in competed(model, path) if one.method == "lukv"}
        assert ratios == (set(contest.DECIDING) if is_there else set())


def test_auto_follows_lukv_while_its_profile_is_there(with_lukv, tmp_path):
    model, path = with_lukv
    won = Winners((Winner(0.2, "lukv", "q8_0", "q4_0", NEAR, FAR),), None, 1280, 190)
    judged = tmp_path / "judged.gguf"
    profiles.write(replace(profiles.read(path), contest=won), judged)
    preset = choose("auto", model, str(judged), 0.2)
    lukv = tmp_path / "kvbudget-m.lukv-snapkv.gguf"
    assert (preset.name, preset.types, preset.profile) == ("lukv", ("q8_0", "q4_0"), str(lukv))
    lukv.unlink()
    assert choose("auto", model, str(judged), 0.2).name == "kvzap-summary"


# ---- what auto does with it


def test_auto_follows_the_contest_where_nothing_was_named(known):
    model, path = known
    preset = choose("auto", model, path, 0.2)
    assert preset.name == METHODS[0] and preset.types == ("q8_0", "q5_1")
    assert preset.measured == LINE and preset.profile == path
    assert isinstance(preset.score, KVzap) and preset.score.surrogate is not None
    assert choose("auto", model, path, 0.11).name == PLAIN
    assert choose("auto", model, path, 0.2, ("q8_0", "q5_1")).name == METHODS[0]
    for other in (
        choose("auto", model, path),
        choose("auto", model, path, 0.2, ("f16", "f16")),
        choose("edgekv", model, path, 0.2),
    ):
        assert other.name == "kvzap-summary" and other.types is None and not other.measured


def stats_of(model: str, path: str, **options: Any) -> Any:
    shared = dict(n_ctx=768, n_threads=1, verbose=False, kv_profile=path, kv_min_tokens=1)
    with edgekv.Llama(model, **{**shared, **options}) as llm:
        llm.eval(llm.tokenize(b"A line of text that is read again and again. " * 10))
        return llm.kv_stats()


def test_a_model_is_loaded_with_the_types_that_won(known):
    stats = stats_of(*known, kv_ratio=0.2)
    assert (stats.method, stats.type_k, stats.type_v) == (METHODS[0], "q8_0", "q5_1")
    assert stats.measured == LINE and LINE in stats_table(stats)
    assert stats.n_bytes_used <= 0.2 * stats.n_bytes_full
    limited = stats_of(*known, kv_budget_mb=0.2)
    assert (limited.method, limited.type_v) == (METHODS[0], "q5_1")


@pytest.mark.parametrize(
    ("options", "types"),
    [
        (dict(kv_ratio=0.2, type_k=TYPES["f16"], type_v=TYPES["f16"]), ("f16", "f16")),
        (dict(kv_ratio=0.2, type_k=TYPES["q8_0"]), ("q8_0", "f16")),
        (dict(kv_budget=100), ("f16", "f16")),
        (dict(kv_ratio=0.2, kv_method="edgekv"), ("f16", "f16")),
    ],
)
def test_what_the_user_names_is_not_overruled(known, options, types):
    stats = stats_of(*known, **options)
    assert (stats.method, stats.measured) == ("kvzap-summary", "")
    assert (stats.type_k, stats.type_v) == types


def test_a_ratio_that_changes_keeps_the_types_and_says_nothing_of_others(known):
    model, path = known
    with edgekv.Llama(
        model, n_ctx=768, n_threads=1, verbose=False, kv_profile=path, kv_ratio=0.2
    ) as llm:
        llm.kv_set(ratio=0.1)
        stats = llm.kv_stats()
    assert (stats.method, stats.type_v, stats.measured) == (PLAIN, "q5_1", "")


def test_rows_on_a_device_have_one_type(known):
    from edgekv.memory.dense import best

    shape = model_info(known[0])
    assert best(shape, ("q8_0", "q5_1")) == ("q8_0", "q5_1")
    assert best(shape, ("q8_0", "q5_1"), on_device=True) == ("q8_0", "q8_0")
    assert best(shape | {"d_head_v": 48}, ("q8_0", "q5_1")) == ("q8_0", "q8_0")


def test_evaluation_and_benchmark_take_what_a_chat_takes(found):
    model = found
    kinds = [stored_as(model, model_info(model), "auto", ratio) for ratio in (0.5, 0.2, 0.1)]
    assert kinds == ["q8_0", "q8_0/q5_1", "q8_0/q4_0"]
    assert stored_as(model, model_info(model), "snapkv", 0.2) == "f16"


def test_a_chat_of_the_first_session_is_loaded_by_the_same_command(
    learned, known, monkeypatch, tmp_path
):
    """The contest ends after it was saved, and 'auto' stores other types from then on."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("edgekv.commands.load.learn", lambda *_: None)
    model, _, without = learned
    target = cached(profiles.identify(model))
    target.parent.mkdir(parents=True)
    shutil.copy(without, target)
    words = ["chat", "-m", model, "-c", "1024", "-n", "4", "-t", "1", "--kv-ratio", "0.2"]
    text = "the rain in the air is an art and the sun is on the ear " * 20
    first = call("", *words, stdin=f"{text}\n/save {tmp_path / 'talk'}\n/stats\n")
    assert first.exit_code == 0 and "q8_0" in first.stderr and "q5_1" not in first.stderr
    shutil.copy(known[1], target)
    again = call("", *words, stdin=f"/stats\n/load {tmp_path / 'talk'}\nand then?\n")
    assert again.exit_code == 0 and "q8_0/q5_1" in again.stderr
    assert "as it was saved: keeps 20 % of the memory, as q8_0, method auto" in again.stderr


def test_the_evaluators_auto_is_the_one_of_its_ratio(known):
    from edgekv_lab.eval.reader import Reader

    model, path = known
    with edgekv.Llama(
        model, n_ctx=768, n_threads=1, verbose=False, kv_profile=path, kv_ratio=0.5
    ) as llm:
        tokens = llm.tokenize(b"A line of text that is read again and again. " * 10)
        reader = Reader(llm, {"q8_0/q5_1": ["auto"], "q8_0/q4_0": ["auto"]})
        reader.read(tokens)
        reader.compress("auto", 0.2, "q8_0/q5_1")
        assert llm.engine.settings.preset.name == METHODS[0]
        reader.compress("auto", 0.1, "q8_0/q4_0")
        assert llm.engine.settings.preset.name == PLAIN


# ---- first use


@pytest.fixture
def fresh(tiny, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    texts = {"one": "the fog came in at nine. " * 12, "two": "nails, a saw, two rakes; " * 12}
    monkeypatch.setattr(probe_profile, "named_texts", lambda: texts)
    return str(tiny("llama-gqa"))


def test_first_use_holds_a_contest(fresh):
    edgekv.make_profile(fresh, n_threads=1)
    found = profiles.find(fresh)
    assert [one.ratio for one in found.contest.found] == sorted(RATIOS)
    assert found.calibration == probe_profile.hash_of(list(probe_profile.named_texts().values()))


def test_a_contest_that_is_stopped_leaves_a_profile_and_goes_on(fresh, monkeypatch):
    made = []
    make = probe_profile.make
    monkeypatch.setattr(
        probe_profile, "make", lambda *a, **more: (made.append(1), make(*a, **more))[1]
    )

    monkeypatch.setattr(contest, "cost", lambda llm: 8000)

    def stop(done, of):
        if done > of - 8000 + 4000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        edgekv.make_profile(fresh, stop, n_threads=1)
    assert edgekv.has_profile(fresh) and profiles.find(fresh).contest is None and made
    words = ["run", "-m", fresh, "-p", "x " * 200, "-n", "1", "--raw", "-c", "1024", "-t", "1"]
    result = call(*words, "--kv-ratio", "0.2", "--json")
    assert result.exit_code == 0 and "one-time preparation" in result.stderr
    assert len(made) == 1 and profiles.find(fresh).contest is not None
    again = call(*words, "--kv-ratio", "0.2", "--json")
    assert "preparation" not in again.stderr
    assert json.loads(again.stdout)["kv_method"] in METHODS


def test_a_contest_that_cannot_be_held_is_not_tried_again(fresh, monkeypatch, caplog):
    def fail(*args):
        raise edgekv.EdgeKVError("no room")

    monkeypatch.setattr(contest, "Reading", fail)
    edgekv.make_profile(fresh, n_threads=1)
    assert profiles.find(fresh).contest == Winners() and "no room" in caplog.text
    assert choose("auto", fresh, ratio=0.2).name == "kvzap-summary"


# ---- what is printed


def test_show_has_a_line_for_each_ratio(known):
    result = call("profile", "show", known[1])
    assert result.exit_code == 0 and f"{LINE} ({METHODS[0]}, q8_0/q5_1)" in result.stdout
    shown = json.loads(call("profile", "show", known[1], "--json").stdout)
    assert shown["contest"]["found"][1]["distance"] == {"text": 0.004, "answers": 0.02}


def test_show_takes_a_models_name_too(found, tmp_path):
    result = call("profile", "show", found)
    assert result.exit_code == 0 and LINE in result.stdout
    assert profiles.find(found).path in result.stdout
    assert call("profile", "show", "-m", found).stdout == result.stdout
    stranger = models.write("llama-mha", tmp_path)
    assert "no profile yet" in call("profile", "show", str(stranger)).stderr
    assert "no model 'nobody'" in call("profile", "show", "nobody").stderr
    (tmp_path / "text").write_text("a text")
    assert "is no profile" in call("profile", "show", str(tmp_path / "text")).stderr


def test_fit_quotes_it_and_plans_its_types(found):
    words = ["fit", "-m", found, "-c", "1024", "--ratios", "0.2", "--device", "CPU", "--json"]
    plan = json.loads(call(*words).stdout)["best"]
    assert plan["quality"].startswith(LINE) and (plan["type_k"], plan["type_v"]) == (
        "q8_0",
        "q5_1",
    )
    assert "-ctk" not in plan["command"]


# ---- the scores


def test_late_judges_a_row_by_those_that_see_it_and_by_its_value():
    stats = layer(60, (0, 0))
    got = Late().score(stats, replace(Late.params, kernel=1))
    for k in range(2):
        _, values = stats.rows(k)
        seen_by = np.minimum(60 - np.arange(60), min(LATE, 60))
        expected = stats.mean[k] * 60 / seen_by * np.linalg.norm(values, axis=1)
        np.testing.assert_allclose(got[k], expected, rtol=1e-5)


def test_joint_ranks_by_both():
    stats = layer(60, (0, 0))
    one, other = score_of("kvzap").score(stats), Late().score(stats)
    alone = Late().score(stats, replace(Late.params, kernel=1))
    joint = score_of("joint")
    for late, got in (
        (other, joint.score(stats)),
        (alone, joint.score(stats, replace(joint.params, kernel=1))),
    ):
        for k in range(2):
            ranks = [(x[k][:, None] > x[k]).sum(axis=1) / 60 for x in (one, late)]
            np.testing.assert_allclose(got[k], sum(ranks), atol=1e-5)


def test_late_is_asked_of_the_last_tokens(tiny, text):
    from tests.engine import load

    llm = load(tiny("llama-gqa"), kv_method="snapkv:queries=late", kv_ratio=0.3)
    other = load(
        tiny("llama-gqa"), kv_method="score=snapkv", kv_ratio=0.3, kv_window=LATE, kv_min_tokens=1
    )
    for one in (llm, other):
        one.eval(list(text(600)))
    assert llm.kv_stats().n_kept == other.kv_stats().n_kept
