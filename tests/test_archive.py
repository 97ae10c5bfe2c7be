"""The archive: a prompt behind all tokens, the way back to any of them, and tokens that are
recalled. What is compared with is the full cache, or attention in numpy.
"""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from edgekv.errors import BadInput
from tests import gemma3n, mla, recurrent
from tests.engine import feed, load, logits

LIMITS = {"kv_ratio": 0.1, "kv_method": "snapkv", "kv_tail": 64}
NEAR = {"f16": 5e-5, "q8_0": 1e-4, "q5_1,q4_0": 1e-4}
"""NMSE to the full f16 cache: attention is the same but for the order of sums, and where a new
token's own rows are rounded."""


def archived(path, tmp_path, kind="f16", **more):
    return load(path, kind, kv_archive=str(tmp_path), **{**LIMITS, **more})


@pytest.mark.parametrize("kind", NEAR)
@pytest.mark.parametrize("name", ["llama-gqa", "gemma3", "llama-d128", "qwen2"])
def test_a_later_prompt_sees_all_tokens(tiny, text, tmp_path, nmse, name, kind):
    first, second = text(500), text(30, seed=1)
    full = logits(load(tiny(name), after=[*first, *second]))
    llm = archived(tiny(name), tmp_path, kind, after=first)
    before = llm.engine.kept().sum()
    llm.eval(list(second))
    assert nmse(full, logits(llm)) < NEAR[kind]
    without = load(tiny(name), kind, after=first, **LIMITS)
    without.eval(list(second))
    assert nmse(full, logits(without)) > 10 * NEAR[kind]
    assert llm.engine.kept().sum() < 1.3 * before  # what stays in memory is as little as before
    rows = (llm.engine.store.layers[il] for il in llm.engine.full_layers)
    in_f16 = 2 * 530 * sum(x.n_head_kv * (x.d_k + x.d_v) for x in rows)
    assert llm.kv_stats().n_bytes_archive == in_f16


@pytest.mark.parametrize("kind", NEAR)
def test_what_was_written_is_archived_before_it_is_rounded_or_evicted(
    tiny, text, tmp_path, nmse, kind
):
    """The answer is longer than what waits in f16, and than the recent buffer."""
    path, first, answer, second = tiny("llama-gqa"), text(200), text(260, seed=1), text(20, seed=2)
    llm = archived(path, tmp_path, kind, after=first, kv_ratio=0.9)
    for token in answer:
        llm.eval([token])
    llm.eval(list(second))
    full = load(path, after=first)
    for token in answer:
        full.eval([token])
    full.eval(list(second))
    # the answer's own rows were computed with what memory had
    assert nmse(logits(full), logits(llm)) < 0.05
    assert llm.engine.store.memory().has_archive
    assert llm.kv_stats().n_bytes_archive == llm.engine.bytes_full(len(first) + 280)


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_a_conversation_goes_back_to_any_token(tiny, text, tmp_path, nmse, kind):
    path, first, second = tiny("llama-gqa"), text(400), text(30, seed=1)
    llm = archived(path, tmp_path, kind, after=[*first, *second])
    for n in (400, 300, 77, 1):
        prompt = [*first[:n], *text(40, seed=n)]
        before = llm.n_evaluated
        next(llm.generate(prompt, temp=0))
        assert llm.n_evaluated - before == len(prompt) - n  # what is new
        full = load(path, after=prompt)
        assert nmse(logits(full), logits(llm)) < NEAR[kind], n
        assert llm.engine.store.memory().n_past == len(prompt)


def test_of_a_prompt_that_ends_within_another_a_window_is_read(tiny, text, tmp_path, nmse):
    """As many queries choose what stays as in a fresh reading."""
    llm, tokens = archived(tiny("llama-gqa"), tmp_path, after=text(400)), text(400)[:250]
    before = llm.n_evaluated
    next(llm.generate(tokens, temp=0))
    assert llm.n_evaluated - before == llm.settings.window
    assert nmse(logits(load(tiny("llama-gqa"), after=tokens)), logits(llm)) < NEAR["f16"]


def test_a_prompt_that_is_cancelled_leaves_archive_and_conversation(tiny, text, tmp_path, nmse):
    path, first, second = tiny("llama-gqa"), text(400), text(300, seed=1)
    llm = archived(path, tmp_path, after=first)

    class Stop(Exception):
        pass

    def stop(done, total):
        if done > total // 2:
            raise Stop

    llm.kv_progress = stop
    with pytest.raises(Stop):
        llm.eval(list(second))
    llm.kv_progress = None
    llm.eval(list(second)[:50])
    assert nmse(logits(load(path, after=[*first, *second[:50]])), logits(llm)) < NEAR["f16"]


@pytest.mark.parametrize("write", [mla.write, recurrent.write, gemma3n.write])
def test_models_of_other_kinds_read_behind_the_archive_too(text, tmp_path, nmse, write):
    path = write(tmp_path / "m.gguf")
    first, second = text(400), text(100, seed=1)
    llm = archived(path, tmp_path, after=first)
    llm.eval(list(second))
    full = load(path, after=first)
    full.eval(list(second))
    assert nmse(logits(full), logits(llm)) < 1e-4


# ---- recall


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q5_1,q4_0"])
def test_the_more_is_recalled_the_nearer_is_the_full_cache(tiny, text, nmse, kind):
    path, tokens, answer = tiny("llama-gqa"), text(400), text(20, seed=1)
    full = load(path, after=tokens)
    expected = feed(full, answer)
    found = []
    for share in (0, 0.05, 0.2, 0.5, 0.99):
        options = {**LIMITS, "kv_ratio": 0.2, "kv_archive": "temporary", "kv_recall": share}
        found.append(nmse(expected, feed(load(path, kind, after=tokens, **options), answer)))
    assert sorted(found, reverse=True) == found
    assert found[1] < 0.5 * found[0] and found[-1] < {"f16": 1e-5, "q8_0": 1e-4}.get(
        kind, 0.01
    )  # what memory has is rounded


def test_recall_goes_on_as_long_as_an_answer(tiny, text, nmse):
    """An answer that is longer than its prompt: keys that come do not take those before along."""
    path, prompt, answer = tiny("llama-gqa"), text(120), text(160, 7)
    own, full = (
        load(path, after=prompt, **how)
        for how in ({"kv_ratio": 0.3, "kv_recall": 0.05}, {"kv_ratio": 1})
    )
    far = [nmse(feed(own, [token]), feed(full, [token])) for token in answer]
    assert max(far[128:]) < 0.1, far[128:]


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_tokens_of_one_step_recall_what_each_recalls_alone(tiny, text, nmse, kind):
    """But for the order of sums in products with these weights, which are not quantised."""
    path, answer = tiny("llama-gqa"), text(16, seed=1)
    alone, together = (
        load(path, kind, after=text(400), **LIMITS, kv_recall=0.05) for _ in range(2)
    )
    found = [feed(alone, [token]) for token in answer]
    together.check(answer[0], answer[1:])
    assert max(nmse(together.logits(i - 16), x) for i, x in enumerate(found)) < 1e-9
    looked_up = [x.engine.store.memory().bytes_recalled for x in (alone, together)]
    assert looked_up[1] == pytest.approx(looked_up[0], rel=0.01) and looked_up[0] > 0


def test_what_tokens_look_up_is_counted(tiny, text):
    """A token looks up four times the share at most, of each head."""
    path = tiny("llama-gqa")
    llm, without = (
        load(path, after=text(1000), **LIMITS, kv_recall=share) for share in (0.05, 0.0)
    )
    assert llm.engine.store.memory().bytes_recalled == 0  # a prompt attends to all tokens
    for token in text(10, seed=1):
        before = llm.engine.store.memory().bytes_recalled
        for one in (llm, without):
            one.eval([token])
        more = llm.engine.store.memory().bytes_recalled - before
        assert 0 < more <= 0.2 * llm.engine.bytes_full(1000)
    assert without.engine.store.memory().bytes_recalled == 0
    llm.reset()
    assert llm.engine.store.memory().bytes_recalled == 0


def test_the_index_counts_as_a_part_of_the_cache(tiny, text):
    path, tokens, limits = tiny("llama-gqa"), text(1000), {**LIMITS, "kv_ratio": 0.3}
    without, llm = (
        load(path, "q8_0", after=tokens, **limits, kv_recall=share) for share in (0, 0.05)
    )
    before, stats = without.kv_stats(), llm.kv_stats()
    assert stats.n_bytes_used == pytest.approx(before.n_bytes_used, rel=0.05)
    assert stats.n_kept < before.n_kept
    rows = stats.n_kept * stats.n_bytes_full / 1000 * 17 / 32
    assert stats.n_bytes_used - rows == pytest.approx(llm.engine.index_bytes(1000), rel=0.02)


def test_a_twentieth_of_the_bytes_is_enough_for_an_index(tiny, text):
    llm = load(
        tiny("llama-gqa"),
        "q8_0",
        n_ctx=4096,
        after=text(3600),
        **{**LIMITS, "kv_ratio": 0.05, "kv_recall": 0.05},
    )
    stats = llm.kv_stats()
    assert stats.n_bytes_used <= 0.055 * stats.n_bytes_full
    assert llm.engine.store.memory().bytes_index == llm.engine.index_bytes(3600)


# ---- where there is none


def test_a_full_disk_costs_the_archive_and_nothing_else(tiny, tmp_path):
    """In a process of its own, whose files may not grow."""
    code = f"""
import logging, resource
from tests.engine import load, logits
logging.basicConfig(format="%(message)s")
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
options = dict(kv_ratio=0.1, kv_method="snapkv")
tokens = [7 + i * i % 90 for i in range(500)]
llm, other = (load({str(tiny("llama-gqa"))!r}, **options, **more) for more in
              ({{"kv_archive": {str(tmp_path)!r}}}, {{}}))
for one in (llm, other):
    one.eval(tokens)
    one.eval(tokens[:100])
assert (logits(llm) == logits(other)).all()
assert not llm.engine.store.memory().has_archive
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("this conversation has no archive") == 1


def test_a_state_that_was_loaded_goes_on_without(tiny, text, tmp_path, caplog):
    path, first, second = tiny("llama-gqa"), text(300), text(100, seed=1)
    llm = archived(path, tmp_path, after=first)
    llm.load_state(llm.save_state())
    with caplog.at_level(logging.WARNING, "edgekv"):
        llm.eval(list(second))
    assert "has no archive (it was saved without one)" in caplog.text
    other = load(path, after=first, **LIMITS)
    other.eval(list(second))
    assert (logits(other) == logits(llm)).all()


def test_files_have_no_name(tiny, text, tmp_path):
    archived(tiny("llama-gqa"), tmp_path, after=text(300))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kv_ratio": 1.0, "kv_recall": 0.05}, "nothing is evicted"),
        ({"kv_ratio": 1.0, "kv_archive": "temporary"}, "nothing is evicted"),
        ({"kv_method": "full", "kv_recall": 0.05}, "nothing is evicted"),
        ({"kv_recall": 1.0}, "kv_recall 1.0"),
        ({"kv_recall": "much"}, "kv_recall much"),
        ({"kv_archive": ""}, "kv_archive"),
        ({"kv_archive": "/dev/null/x"}, "cannot be made"),
        ({"kv_ratio": 0.02, "kv_recall": 0.05}, "index of kv_recall alone takes 2.6 %"),
    ],
)
def test_what_makes_no_sense_is_one_line(tiny, options, says):
    with pytest.raises(BadInput, match=says) as error:
        load(tiny("llama-gqa"), **{**LIMITS, **options})
    assert "\n" not in str(error.value)
