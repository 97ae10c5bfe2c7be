"""`Llama` as an object: its arguments, its end, who may use it when, and how it is stopped."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from itertools import islice
from typing import Any

import numpy as np
import pytest

from edgekv import Cancelled, EdgeKVError, Llama, native
from edgekv.llama_cpp import Llama as Parent
from tests import embedders
from tests.engine import feed, load, logits
from tests.lib import ROOT

N_PROMPT = 300
WAYS: tuple[dict[str, Any], ...] = (
    dict(kv_ratio=0.2),
    dict(kv_ratio=1.0),
    dict(kv_ratio=1.0, logits_all=True),
)


AT_THE_END = """
import sys
from edgekv import Llama
llm = Llama(sys.argv[1], n_ctx=512, kv_ratio=0.5, verbose=False)
llm.eval(list(range(10, 200)))
Llama.last = llm  # goes with the module, when nothing can be imported any more
print(llm.n_tokens)
"""


def test_a_program_may_end_without_closing_its_model(tiny):
    done = subprocess.run(
        [sys.executable, "-c", AT_THE_END, str(tiny("llama-gqa"))],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "190\n", "")


# ---- arguments


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("kv_raito", "kv_ratio"),
        ("n_ctxx", "n_ctx"),
        ("ratio", "kv_ratio"),
        ("n_gpu_layer", "n_gpu_layers"),
    ],
)
def test_an_unknown_argument_is_refused_with_the_nearest_right_one(tiny, name, meant):
    with pytest.raises(EdgeKVError, match=f"no argument '{name}'; did you mean '{meant}'") as error:
        Llama(str(tiny("llama-gqa")), **{name: 1})
    assert isinstance(error.value, TypeError)


def test_an_argument_like_no_other_is_refused_too(tiny):
    with pytest.raises(EdgeKVError, match="no argument 'zzzzzz'"):
        Llama(str(tiny("llama-gqa")), zzzzzz=1)


# ---- the end


@pytest.mark.parametrize("options", WAYS)
def test_a_model_is_freed_when_nobody_refers_to_it(tiny, text, options):
    llm = load(tiny("llama-gqa"), **options)
    llm.eval(list(text(N_PROMPT)))
    llm.create_completion("the", max_tokens=3, logit_bias={5: 1.0})
    left = llm.generate([5, 6, 7])
    next(left)
    gone = weakref.ref(llm)
    gc.disable()
    try:
        del llm, left
        assert gone() is None, "only reference counting runs here"
    finally:
        gc.enable()


LOADS = """
import gc, sys, edgekv, psutil
gc.disable()
options = eval(sys.argv[2])
def resident(n):
    for _ in range(n):
        llm = edgekv.Llama(
            sys.argv[1], n_ctx=8192, n_threads=1, verbose=False, kv_profile="none", **options)
        llm.eval(list(range(10, 310)) * 4)
        llm.scores[:] = 1
        del llm
    return psutil.Process().memory_info().rss
resident(1)
print(resident(1), resident(10))
"""


@pytest.mark.parametrize("options", WAYS)
def test_ten_loads_take_what_one_takes(tiny, options):
    done = subprocess.run(
        [sys.executable, "-c", LOADS, str(tiny("llama-32k")), repr(options)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    after_one, after_ten = map(int, done.stdout.split())
    assert after_ten < 1.05 * after_one


@pytest.mark.parametrize("options", WAYS)
def test_a_closed_model_says_so(tiny, text, tmp_path, options):
    with load(tiny("llama-gqa"), **options) as llm:
        llm.eval(list(text(N_PROMPT)))
        llm.kv_save(str(tmp_path / "talk"))
    assert llm.scores.nbytes == llm.input_ids.nbytes == 0
    llm.close()
    for i, use in enumerate(USES):
        with pytest.raises(EdgeKVError, match="closed"):
            use(llm, tmp_path)
            print(f"use {i} was not refused")


USES = (
    lambda llm, folder: llm.eval([5]),
    lambda llm, folder: llm.reset(),
    lambda llm, folder: llm.kv_stats(),
    lambda llm, folder: llm.kv_save(str(folder / "x")),
    lambda llm, folder: llm.kv_load(str(folder / "talk")),
    lambda llm, folder: llm.kv_set(ratio=0.5),
    lambda llm, folder: llm.tokenize(b"a"),
    lambda llm, folder: llm.detokenize([5]),
    lambda llm, folder: llm.create_completion("a", max_tokens=1),
    lambda llm, folder: llm.create_chat_completion(
        [{"role": "user", "content": "a"}], max_tokens=1
    ),
    lambda llm, folder: next(iter(llm.generate([5]))),
    lambda llm, folder: llm.sample(),
    lambda llm, folder: llm.save_state(),
    lambda llm, folder: llm.n_ctx(),
    lambda llm, folder: llm.embed("a"),
)


def test_what_is_left_of_a_closed_model_says_so_too(tiny, text):
    """A prompt that is being read layer by layer, and the bindings' context."""
    llm = load(tiny("llama-gqa"), kv_ratio=0.5)
    context, tokens = llm._ctx, (native.llama_cpp.llama_token * 1)(5)
    reading = native.Prefill(context.ctx, text(N_PROMPT), [native.Observer(0, N_PROMPT, ("mean",))])
    reading.run(0)
    llm.close()
    for use in (
        lambda: reading.run(0),
        lambda: reading.stat(0, "mean"),
        lambda: reading.rows(0),
        reading.n_old,
        reading.end,
    ):
        with pytest.raises(EdgeKVError, match="closed"):
            use()
    reading.__exit__()
    assert (
        native.llama_cpp.llama_decode(context.ctx, native.llama_cpp.llama_batch_get_one(tokens, 1))
        < 0
    )
    assert "closed" in native.context_error()


# ---- models that write no text


@pytest.mark.parametrize("name", embedders.SHAPES)
@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_a_model_that_writes_no_text_is_refused(name, ratio, tmp_path):
    with pytest.raises(
        EdgeKVError, match="an encoder before" if name == "t5" else "gives embeddings"
    ):
        load(embedders.write(name, tmp_path), kv_ratio=ratio)


@pytest.mark.parametrize("name", ["llama-embed", "t5encoder"])
def test_its_embeddings_can_be_had(name, tmp_path):
    llm = load(embedders.write(name, tmp_path), embedding=True)
    assert np.isfinite(llm.embed("the rain")).all()
    with pytest.raises(EdgeKVError, match="leave kv_ratio at 1"):
        llm.kv_set(ratio=0.5)


# ---- threads and callbacks


class Reading:
    """A model that reads a prompt in a thread of its own and waits in the middle of it."""

    def __init__(self, llm: Llama, tokens: list[int]) -> None:
        self.inside, self.go_on, self.error = threading.Event(), threading.Event(), None
        llm.kv_progress = self._progress
        self._thread = threading.Thread(target=self._read, args=(llm, tokens))
        self._thread.start()
        assert self.inside.wait(60)

    def _progress(self, done: int, total: int) -> None:
        self.inside.set()
        self.go_on.wait(60)

    def _read(self, llm: Llama, tokens: list[int]) -> None:
        try:
            llm.eval(tokens)
        except EdgeKVError as error:
            self.error = error

    def end(self) -> EdgeKVError | None:
        self.go_on.set()
        self._thread.join(60)
        return self.error


@pytest.mark.parametrize("options", WAYS)
def test_another_thread_is_refused_while_a_prompt_is_read(tiny, text, tmp_path, options):
    llm, alone = load(tiny("llama-gqa"), **options), load(tiny("llama-gqa"), **options)
    tokens = list(text(N_PROMPT))
    reading = Reading(llm, tokens)
    for use in (*USES[:4], USES[5], USES[8], USES[12], lambda llm, folder: llm.close()):
        with pytest.raises(EdgeKVError, match="another thread"):
            use(llm, tmp_path)
    assert reading.end() is None
    alone.eval(tokens)
    assert np.array_equal(logits(llm), logits(alone))


@pytest.mark.parametrize("options", WAYS)
def test_nothing_can_be_done_from_the_progress_of_a_prompt(tiny, text, tmp_path, options):
    llm, alone, refused = load(tiny("llama-gqa"), **options), load(tiny("llama-gqa"), **options), []

    def progress(done: int, total: int) -> None:
        for use in (*USES[:6], *USES[8:13], lambda llm, folder: llm.close()):
            with pytest.raises(EdgeKVError, match="kv_progress cannot use"):
                use(llm, tmp_path)
            refused.append(use)

    tokens = list(text(N_PROMPT))
    llm.kv_progress = progress
    llm.eval(tokens)
    alone.eval(tokens)
    assert refused and np.array_equal(logits(llm), logits(alone))


@pytest.mark.parametrize("options", WAYS)
def test_an_answer_under_way_is_not_disturbed_by_another_thread(tiny, options):
    llm, alone = load(tiny("llama-gqa"), **options), load(tiny("llama-gqa"), **options)
    whole = list(islice(alone.generate([5, 6, 7], temp=0), 12))
    pieces, errors = [], []

    def disturb() -> None:
        try:
            llm.create_completion("another text", max_tokens=4)
        except EdgeKVError as error:
            errors.append(error)

    for token in islice(llm.generate([5, 6, 7], temp=0), 12):
        pieces.append(token)
        other = threading.Thread(target=disturb)
        other.start()
        other.join(60)
    assert pieces == whole and len(errors) == 12


def test_the_same_thread_may_leave_an_answer_and_begin_another(tiny):
    llm = load(tiny("llama-gqa"), kv_ratio=0.5)
    left = llm.generate([5, 6, 7])
    next(left)
    assert llm.create_completion("the sun", max_tokens=4)["usage"]["completion_tokens"]
    with pytest.raises(EdgeKVError, match="another prompt was given"):
        next(left)


def test_many_threads_make_only_python_errors(tiny):
    llm, ends = load(tiny("llama-gqa"), kv_ratio=0.5), []

    def use() -> None:
        for _ in range(20):
            try:
                ends.append(
                    llm.create_completion("the rain " * 20, max_tokens=3)["usage"][
                        "completion_tokens"
                    ]
                )
            except EdgeKVError as error:
                ends.append(str(error))

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(ends) == 80 and any(isinstance(end, int) for end in ends)


# ---- being stopped


@pytest.mark.parametrize("options", WAYS[:2])
def test_a_cancel_before_the_call_holds(tiny, text, options):
    llm, alone = load(tiny("llama-gqa"), **options), load(tiny("llama-gqa"), **options)
    llm.kv_cancel()
    with pytest.raises(Cancelled):
        llm.create_completion("the rain", max_tokens=4)
    same = [
        x.create_completion("the rain", max_tokens=4, temperature=0)["choices"]
        for x in (llm, alone)
    ]
    assert same[0] == same[1]
    llm.kv_cancel()
    llm.kv_cancel(False)
    assert llm.create_completion("the rain", max_tokens=4)["usage"]["completion_tokens"] > 0


def test_a_cancel_ends_a_step_of_llama_cpps_own(tiny, text, monkeypatch):
    """At ratio 1 a prompt goes through the model in steps of n_ubatch tokens, without a look."""
    tokens = text(2000)
    options = {"n_batch": 2048, "n_ubatch": 2048, "n_threads": 1}
    llm, alone = (load(tiny("llama-gqa"), **options) for _ in range(2))
    decode, ends = llm._ctx.decode, []

    def cancelled_within(batch):
        llm.kv_cancel()  # as another thread would, once the step has begun
        try:
            decode(batch)
        except RuntimeError as error:
            ends.append(str(error))
            raise

    with monkeypatch.context() as patch, pytest.raises(Cancelled):
        patch.setattr(llm._ctx, "decode", cancelled_within)
        llm.eval(tokens)
    assert len(ends) == 1 and llm.n_tokens == 0
    for one in (llm, alone):
        one.eval(tokens)
    assert (logits(llm) == logits(alone)).all()


def test_a_signal_within_a_cancel_may_cancel_too(tiny):
    """A handler runs between any two lines, those of `kv_cancel` included."""
    llm = load(tiny("llama-gqa"))

    def signalled(frame: Any, event: str, argument: Any) -> Any:
        if event == "line":
            sys.settrace(None)
            for _ in range(2):
                llm.kv_cancel()
                llm.kv_cancel(False)
            llm.kv_cancel()
            sys.settrace(signalled)
        return signalled

    def cancel() -> None:
        sys.settrace(signalled)
        llm.kv_cancel()
        llm.kv_cancel(False)
        sys.settrace(None)

    thread = threading.Thread(target=cancel, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize("options", WAYS[:2])
@pytest.mark.parametrize("stream", [True, False])
def test_a_cancel_holds_until_the_last_token(tiny, options, stream):
    llm = load(tiny("llama-gqa"), **options)
    seen = []

    def stop(tokens: Any, scores: Any) -> Any:
        seen.append(len(tokens))
        scores[2] = -np.inf  # no end
        if len(seen) == 5:
            llm.kv_cancel()
        return scores

    with pytest.raises(Cancelled):
        list(
            llm.create_completion(
                "the rain", max_tokens=500, stream=stream, logits_processor=[stop]
            )
        )
    assert len(seen) < 10
    assert llm.create_completion("the rain", max_tokens=2)["usage"]["completion_tokens"]


@pytest.mark.parametrize("options", WAYS[:2])
def test_a_cancel_that_comes_too_late_stops_nothing_else(tiny, options):
    llm = load(tiny("llama-gqa"), **options)
    chunks = llm.create_completion("the rain", max_tokens=3, stream=True)
    for chunk in chunks:
        if chunk["choices"][0]["finish_reason"]:
            llm.kv_cancel()
    llm.kv_cancel(False)
    assert llm.create_completion("the rain", max_tokens=3)["usage"]["completion_tokens"]


@pytest.mark.parametrize("options", WAYS[:2])
@pytest.mark.parametrize("n_calls", range(1, 6))
def test_ctrl_c_behind_a_decoded_token_loses_no_token(tiny, monkeypatch, options, n_calls):
    """The token is in the cache, but nobody has written it down."""
    llm, alone = load(tiny("llama-gqa"), **options), load(tiny("llama-gqa"), **options)
    expected = alone.create_completion("the rain in", max_tokens=6, temperature=0)["choices"][0][
        "text"
    ]
    calls, decode = [], type(llm._ctx).decode

    def interrupted(self: Any, batch: Any) -> None:
        decode(self, batch)
        calls.append(1)
        if len(calls) == n_calls:
            raise KeyboardInterrupt

    monkeypatch.setattr(type(llm._ctx), "decode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.create_completion("the rain in", max_tokens=6, temperature=0)
    again = llm.create_completion("the rain in", max_tokens=6, temperature=0)["choices"][0]["text"]
    assert again == expected


def test_modules_come_with_their_first_use():
    code = "import edgekv; print(edgekv.llama_cpp.llama_backend_init, edgekv.native.Store)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_the_parent_has_what_is_overridden_here():
    """A new release of the bindings that renames one of these would leave it unguarded."""
    for name in (
        "close",
        "reset",
        "eval",
        "generate",
        "sample",
        "embed",
        "save_state",
        "load_state",
        "create_chat_completion",
        "_create_completion",
    ):
        assert callable(getattr(Parent, name))
        assert getattr(Llama, name) is not getattr(Parent, name)


def test_tokens_go_on_as_before(tiny, text):
    """None of the guards changes what the model computes."""
    llm, parent = (
        load(tiny("llama-gqa"), kv_ratio=1.0),
        Parent(
            str(tiny("llama-gqa")),
            n_ctx=2048,
            n_batch=512,
            n_ubatch=256,
            n_threads=1,
            n_threads_batch=1,
            flash_attn=True,
            type_k=1,
            type_v=1,
            verbose=False,
        ),
    )
    llm.eval(list(text(200)))
    parent.eval(list(text(200)))
    for token in text(4, seed=1):
        parent.eval([token])
        assert np.array_equal(feed(llm, [token])[-1], logits(parent))


@pytest.mark.parametrize("options", [{}, {"kv_ratio": 0.5, "kv_method": "snapkv"}])
def test_a_cancelled_task_leaves_its_thread_which_kv_cancel_ends(tiny, text, options):
    """As docs/llama-cpp-python.md says."""
    import asyncio

    llm, reads = load(tiny("llama-gqa"), **options), threading.Event()

    def report(done, total):
        reads.set()
        time.sleep(0.05)

    async def use():
        task = asyncio.create_task(asyncio.to_thread(llm.eval, list(text(1500))))
        while not reads.is_set():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(EdgeKVError, match="another thread"):
            llm.eval([5])
        llm.kv_cancel()

    llm.kv_progress = report
    asyncio.run(use())  # waits for the thread
    llm.kv_progress = None
    assert llm.n_tokens == 0
    llm.eval([5])
