"""Drafts by a model's own heads (MTP): answers are those without them, whatever the heads say."""

from __future__ import annotations

import json
from functools import cache

import gguf
import numpy as np
import pytest

from edgekv.chat.drafts import Drafting
from edgekv.conversation.hidden import HiddenStates
from edgekv.errors import BadInput, Cancelled
from edgekv.native.mtp import WINDOW
from edgekv.serve.conversations import ServerConversations
from edgekv.serve.events import Done
from edgekv.serve.job import Job
from edgekv.serve.worker import Worker
from tests import mtp_models
from tests.cli import refused, typed
from tests.engine import load
from tests.test_drafts import Cheap, check_near, few, written, written_and_seen
from tests.test_serve_worker import Log, request

MTP = dict(spec_type="draft-mtp")
ARCHS = pytest.mark.parametrize("arch", mtp_models.ARCHS)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """model(arch, ...): the path of a tiny model with a head."""
    folder = tmp_path_factory.mktemp("mtp")

    @cache
    def make(arch, **more):
        return mtp_models.write(folder / f"{arch}-{len(list(folder.iterdir()))}.gguf", arch, **more)

    return make


def with_heads(path, kind="f16", **more):
    llm = load(path, kind, **MTP, **more)
    llm.costs = llm.draft._costs = Cheap()
    llm.drafts_made, made = [], llm._kv_draft

    def noted(tokens):
        draft = made(tokens)
        llm.drafts_made.append((len(tokens), draft.tolist()))
        return draft

    llm._kv_draft = noted
    return llm


def share_right(llm, text) -> float:
    """Of the first guesses of the drafts of a text; there are some."""
    firsts = [(n, draft[0]) for n, draft in llm.drafts_made if draft and n < len(text)]
    assert len(firsts) > 10, "nothing was drafted"
    return sum(text[n] == guess for n, guess in firsts) / len(firsts)


@ARCHS
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize("ratio", [0.2, 1.0])
def test_answers_are_those_without_heads(model, arch, tied, kind, ratio):
    """Where most guesses are right, and where nearly all are wrong; also where the recent buffer is
    compressed in the middle, and in a turn behind it.
    """
    path, more = model(arch, tied=tied), dict(kv_ratio=ratio, kv_tail=64)
    alone, llm = load(path, kind, **more), with_heads(path, kind, **more)
    prompt = few(300)
    expected, seen = written_and_seen(alone, prompt, 90)
    got, seen_too = written_and_seen(llm, prompt, 90)
    check_near(got, seen_too, expected, seen)
    right = share_right(llm, [*prompt, *got])
    assert right > 0.15 if tied else right < 0.1, right
    turn = [*prompt, *expected[:-1], *few(20, 4)]
    expected, seen = written_and_seen(alone, turn, 20)
    check_near(*written_and_seen(llm, turn, 20), expected, seen)


@pytest.mark.parametrize("arch", mtp_models.OTHERS)
def test_other_models_with_heads_write_the_same(model, arch):
    path, prompt, more = model(arch), few(300), dict(kv_ratio=0.3, kv_tail=64)
    expected, seen = written_and_seen(load(path, **more), prompt, 60)
    llm = with_heads(path, **more)
    got, seen_too = written_and_seen(llm, prompt, 60)
    check_near(got, seen_too, expected, seen)
    assert share_right(llm, [*prompt, *got]) > 0.15


def weights(path):
    """float32 arrays of a model file, [n_out, n_in] or [n], by name."""
    return {
        t.name: t.data.reshape(tuple(reversed(t.shape.tolist())))
        for t in gguf.GGUFReader(path).tensors
    }


@ARCHS
@pytest.mark.parametrize("ratio", [0.2, 1.0])
@pytest.mark.parametrize("n", [40, 300, 900])
def test_hidden_states_are_those_behind_the_last_layer(model, arch, ratio, n):
    """Of the window's tokens, which may lie in several chunks; a step comes behind them."""
    path, prompt = model(arch), few(n)
    whole = load(path, logits_all=True)
    whole.eval([*prompt, 50])
    llm = load(path, kv_ratio=ratio, **MTP)
    llm.eval(prompt)
    hidden = llm.turn.hidden
    assert hidden.begin == max(n - WINDOW, 0) and len(hidden.rows) == min(n, WINDOW)
    if ratio == 1 or n <= 64:
        llm.eval([50])
        assert hidden.begin == max(n + 1 - WINDOW, 0)
    logits = np.stack(hidden.rows) @ weights(path)["output.weight"].T
    expected = whole.scores[hidden.begin : hidden.begin + len(hidden.rows)]
    np.testing.assert_allclose(logits, expected, atol=0.02 * expected.std())


def rms(x, weight):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight


def rope(x, begin):
    """x: [n, n_head, d]."""
    d = x.shape[-1]
    angle = np.outer(begin + np.arange(len(x)), 1e6 ** (-np.arange(0, d, 2) / d))[:, None]
    a, b, cos, sin = x[..., : d // 2], x[..., d // 2 :], np.cos(angle), np.sin(angle)
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def silu(x):
    return x / (1 + np.exp(-x))


def head_of_qwen35(w, tokens, begin, hidden):
    """Logits [n, n_vocab] of the head for tokens that stand at `begin`, in float64, from hidden
    states of the tokens before them, and the hidden states that it makes: DeepSeek-V3 (2024),
    section 2.2, with Qwen3.5's gated attention.
    """
    blk = {name[6:]: x for name, x in w.items() if name.startswith("blk.4.")}
    embedded = rms(w["token_embd.weight"][tokens].astype(float), blk["nextn.enorm.weight"])
    hidden = rms(hidden.astype(float), blk["nextn.hnorm.weight"])
    x = np.concatenate([embedded, hidden], -1) @ blk["nextn.eh_proj.weight"].T
    y, n = rms(x, blk["attn_norm.weight"]), len(tokens)
    q = (y @ blk["attn_q.weight"].T).reshape(n, mtp_models.N_HEAD, 2, mtp_models.D_HEAD)
    k = (y @ blk["attn_k.weight"].T).reshape(n, mtp_models.N_HEAD_KV, mtp_models.D_HEAD)
    v = (y @ blk["attn_v.weight"].T).reshape(k.shape)
    query = rope(rms(q[:, :, 0], blk["attn_q_norm.weight"]), begin)
    k, group = rope(rms(k, blk["attn_k_norm.weight"]), begin), q.shape[1] // k.shape[1]
    k, v = (x.repeat(group, 1) for x in (k, v))
    scores = np.einsum("ihd,jhd->hij", query, k) / np.sqrt(mtp_models.D_HEAD)
    scores[:, np.triu(np.ones((n, n), bool), 1)] = -np.inf
    p = np.exp(scores - scores.max(-1, keepdims=True))
    out = np.einsum("hij,jhd->ihd", p / p.sum(-1, keepdims=True), v) / (1 + np.exp(-q[:, :, 1]))
    x = x + out.reshape(n, -1) @ blk["attn_output.weight"].T
    y = rms(x, blk["post_attention_norm.weight"])
    inner = silu(y @ blk["ffn_gate.weight"].T) * (y @ blk["ffn_up.weight"].T)
    made = rms(x + inner @ blk["ffn_down.weight"].T, w["output_norm.weight"])
    return made @ w["output.weight"].T, made


@pytest.mark.parametrize("tied", [True, False])
def test_guesses_are_those_of_the_heads(model, tied):
    """Behind a text that is read at once, in steps, or taken back from a draft."""
    path, text = model("qwen35", tied=tied), few(230)
    llm, w, user = load(path, **MTP), weights(path), object()
    heads, n = llm.draft, 150
    llm.eval(text[: n - 1])
    for n_more in (0, 1, 3, 1):
        if n_more:
            llm.eval(text[n - 1 : n + n_more - 1])
        n += n_more
        assert heads.follow(text[:n], user) > 1
        hidden = np.stack(llm.turn.hidden.rows[: n - 1])
        tokens, made = text[1:n], None
        for _ in range(3):
            logits, made = head_of_qwen35(w, tokens, 1, hidden)
            expected = logits[-1]
            got = heads._context.logits()
            np.testing.assert_allclose(got, expected, atol=0.02 * expected.std())
            token, p = heads.likeliest()
            assert token == expected.argmax() and 0 < p < 1
            heads.take(token)
            tokens, hidden = [*tokens, token], np.concatenate([hidden, made[-1:]])


@ARCHS
@pytest.mark.parametrize("ratio", [0.3, 1.0])
def test_heads_follow_a_conversation_that_waited(model, arch, ratio):
    """Two conversations take turns in the middle of their answers."""
    path = model(arch)
    alone, llm = (load(path, kv_ratio=ratio, **more) for more in ({}, MTP))
    llm.costs = llm.draft._costs = Cheap()
    texts, both = [few(120, 1), few(220, 2)], []
    for x in (alone, llm):
        said = [list(text) for text in texts]
        for _ in range(3):
            for text in said:
                with x.conversation():
                    text += written(x, text, 25)
        both.append(said)
    for got, expected in zip(*both):
        assert got == expected
    assert llm.n_evaluated > alone.n_evaluated, "nothing was drafted"
    assert len(llm.turn.hidden.rows) > 250, "those from before the wait, too"


@ARCHS
@pytest.mark.parametrize("ratio", [0.3, 1.0])
def test_a_conversation_that_is_loaded_goes_on(model, arch, ratio, tmp_path):
    llm = with_heads(model(arch), kv_ratio=ratio)
    prompt, file = few(120), str(tmp_path / "saved")
    first = written(llm, prompt, 30)
    llm.kv_save(file)
    expected = written(llm, [*prompt, *first, 7, 8, 9], 30)
    written(llm, few(80, 9), 30)
    llm.kv_load(file)
    assert written(llm, [*prompt, *first, 7, 8, 9], 30) == expected


@ARCHS
@pytest.mark.parametrize("ratio", [0.3, 1.0])
def test_an_answer_that_is_cancelled_is_as_before(model, arch, ratio, monkeypatch):
    """Also while heads read."""
    llm = with_heads(model(arch), kv_ratio=ratio)
    prompt, heads = few(120), llm.draft._context
    expected = written(llm, prompt, 40)
    llm.reset()
    read = heads.read

    def late(tokens, begin, before):
        if begin > 140:
            llm.kv_cancel()
        read(tokens, begin, before)

    monkeypatch.setattr(heads, "read", late)
    with pytest.raises(Cancelled):
        written(llm, prompt, 40)
    monkeypatch.undo()
    assert written(llm, prompt, 40) == expected
    llm.reset()
    answer = llm.generate(prompt, temp=0.0)
    assert [next(answer) for _ in range(10)] == expected[:10]
    llm.kv_cancel()
    with pytest.raises(Cancelled):
        list(answer)
    assert written(llm, [*prompt, *expected[:10]], 30) == expected[10:40]


@ARCHS
def test_an_answer_that_is_drawn_is_the_one_without_heads(model, arch):
    path, prompt, more = model(arch), few(200), dict(kv_ratio=0.5, seed=7)
    expected = written(load(path, **more), prompt, 60, temp=1.0)
    llm = with_heads(path, **more)
    assert written(llm, prompt, 60, temp=1.0) == expected
    share_right(llm, [*prompt, *expected])


def test_heads_go_on_where_their_cache_is_full(model, monkeypatch):
    """A text that is longer than it."""
    monkeypatch.setattr("edgekv.native.mtp.CELLS", 256)
    path, prompt = model("glm4moe"), few(100)
    expected = written(load(path), prompt, 300)
    llm = with_heads(path)
    assert written(llm, prompt, 300) == expected
    assert llm.draft._begin > 200
    assert share_right(llm, [*prompt, *expected]) > 0.15


def test_what_heads_take_stays_the_same(model):
    llm = with_heads(model("qwen35"), kv_ratio=0.3)
    written(llm, few(300), 30)
    n_bytes = llm.kv_stats().n_bytes_draft
    width = 4 * mtp_models.N_EMBD
    assert n_bytes > width * WINDOW + 1024 * 2 * 2 * mtp_models.N_HEAD_KV * mtp_models.D_HEAD
    written(llm, few(300, 5), 200)
    assert llm.kv_stats().n_bytes_draft == n_bytes


@pytest.mark.parametrize("n_parallel", [1, 3])
def test_a_server_writes_the_same(model, n_parallel):
    said = []
    for more in ({}, MTP):
        llm = load(model("qwen35"), n_ctx=1024, **more)
        llm.costs = Cheap()
        if llm.draft:
            llm.draft._costs = llm.costs
        worker = Worker(llm, ServerConversations(llm), n_parallel if more else 1)
        worker.start()
        try:
            logs = [Log() for _ in range(3)]
            for seed, log in enumerate(logs):
                worker.submit(Job(request(few(120, seed), 60), log))
            done = [log.wait() for log in logs]
            assert all(isinstance(x, Done) for x in done)
            said.append([log.text for log in logs])
        finally:
            worker.stop()
            worker.join()
            llm.close()
    assert said[0] == said[1]
    assert worker.totals.n_right > 60, "answers of 180 tokens"


def test_hidden_states_of_a_window_are_kept():
    states, row = HiddenStates(), np.arange(WINDOW + 40, dtype=np.float32)[:, None]
    assert states.between(0, 1) is None
    states.add(10, row[10:20])
    assert states.between(9, 12) is None and states.between(15, 21) is None
    np.testing.assert_array_equal(states.between(12, 20), row[12:20])
    states.add(15, -row[15:17])  # the conversation was taken back
    np.testing.assert_array_equal(states.between(14, 17), [[14], [-15], [-16]])
    assert states.between(16, 18) is None
    states.add(17, row[17:])
    assert states.begin == 40 and len(states.rows) == WINDOW
    states.add(5, row[5:8])
    assert states.begin == 5 and len(states.rows) == 3
    states.add(30, row[30:31])
    assert states.begin == 30 and len(states.rows) == 1


@pytest.mark.parametrize("more, why", [(dict(n_nextn=0), "has none"), (dict(n_nextn=2), "several")])
def test_a_model_without_heads_is_refused(model, tmp_path, more, why):
    path = model("qwen35", **more)
    with pytest.raises(BadInput, match=f"{why}.*ngram-simple"):
        load(path, **MTP)
    if more["n_nextn"] < 2:
        load(path).close()
    for command in ("run", "fit"):
        line = f"{command} -m {path} --spec-type draft-mtp{' a' * (command == 'run')}"
        assert "MTP" in refused(typed(line))


@ARCHS
def test_heads_are_planned_for_and_typed(model, arch):
    line = f"fit -m {model(arch)} --memory 16GiB -c 2048 --ratios 0.2 --kv-method snapkv --json"
    alone, both = (
        json.loads(typed(f"{line}{more}").stdout)["best"] for more in ("", " --spec-type draft-mtp")
    )
    assert both["command"].endswith("--spec-type draft-mtp") and both["kv"] == alone["kv"]
    grown = both["process"] - alone["process"]
    assert both["peak"] - alone["peak"] - grown == both["draft"]
    llm = load(model(arch), kv_ratio=0.2, **MTP)
    llm.eval(few(300))
    assert 2**20 < llm.kv_stats().n_bytes_draft <= both["draft"]


def test_options_that_go_not_together_are_refused():
    for wrong in (dict(draft_model="x"), {}):
        with pytest.raises(BadInput, match="own"):
            Drafting("draft-mtp" if wrong else "draft-mtp,draft-simple", **wrong)
    assert Drafting("ngram-simple,draft-mtp").types == ["ngram-simple", "draft-mtp"]
