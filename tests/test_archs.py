"""Every architecture that upstream's test-llama-archs can write a tiny random model of: how it is
read, and that a conversation whose entries are all kept answers as llama.cpp's own cache does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgekv import methods
from edgekv.engine.observer import QueryObserver
from edgekv.errors import BadInput, Cancelled, Unsupported
from edgekv.memory.footprint import rows_in_full
from edgekv.methods import budget
from tests import archs, gemma3n, gemma4
from tests.build import run
from tests.engine import MAX_NMSE as MAX_NMSE_OF
from tests.engine import feed, load, logits, read
from tests.lib import nmse
from tests.test_native import check_passed, program

MAX_NMSE = 1e-6
SMALL: dict[str, Any] = dict(n_ctx=256, n_ubatch=64, n_batch=128)
N_PROMPT, N_TURN, N_DECODE = 120, 70, 4
"""Together they stay below the 256 tokens that models with learned positions know."""
ALL = 100_000
"""A budget of more tokens than there are: the store holds them all."""
METHODS = [
    name
    for name, preset in methods.REGISTRY.items()
    if not preset.keeps_all
    and not isinstance(preset.budget, budget.ProfileBudget)
    and name != "kvzap"
]
"""Those that need no profile."""
PROBED = [name for name in METHODS if methods.get(name).observe.probe]
N_PARTS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The folder of all models."""
    return archs.write(tmp_path_factory.mktemp("archs"))


def plain(path: Path, kind: str = "f16", **sizes: Any) -> Any:
    """llama.cpp's own cache. Its flash attention adds f16 values up in f16, which alone makes an
    NMSE of 1e-5 in models that normalise what attention gives: f16 is compared without it.
    """
    return load(path, kind, **{"flash_attn": kind != "f16", **SMALL, **sizes})


def tokens(llm: Any, n: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(6, llm.n_vocab(), n).tolist()


def compressed(
    folder: Path, kind: str, part: int = 0, n_parts: int = 1, **options: Any
) -> Iterator[tuple[str, Any]]:
    """(name, Llama) of every model, or of one in n_parts, that has a store with this cache type."""
    for path in sorted(folder.glob("*.gguf"))[part::n_parts]:
        try:
            llm = load(path, kind, **{**SMALL, **options})
        except BadInput:  # it writes no text, or its heads do not fill this type's blocks
            continue
        if llm.engine is not None:
            yield path.stem, llm
        llm.close()


def cancelled(llm: Any, turn: Sequence[int]) -> bool:
    """Whether reading a turn was cancelled, in its second layer or what comes closest."""

    def stop(done: int, total: int) -> None:
        if done * 2 > total:
            llm.kv_cancel()

    llm.kv_progress = stop
    try:
        llm.eval(list(turn))
    except Cancelled:
        return True
    finally:
        llm.kv_progress = None
    return False


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_what_keeps_everything_answers_as_llama_cpp_does(folder, monkeypatch, kind):
    """A prompt, tokens behind it, a turn that is cancelled, the turn again, a state that is saved
    and loaded. llama.cpp rounds rows at once.
    """
    monkeypatch.setenv("EDGEKV_RECENT", "rounded")
    worst = {}
    for name, llm in compressed(folder, kind, kv_budget=ALL):
        reference = plain(folder / f"{name}.gguf", kind)
        found = []
        for n, seed in ((N_PROMPT, 1), (N_TURN, 2)):
            prompt, more = tokens(llm, n, seed), tokens(llm, N_DECODE, seed + 10)
            assert cancelled(llm, prompt), name
            found.append(nmse(read(llm, prompt, more), read(reference, prompt, more)))
        saved = llm.save_state()
        llm.reset()
        llm.load_state(saved)
        more = tokens(llm, N_DECODE, 20)
        found.append(nmse(feed(llm, more), feed(reference, more)))
        worst[name] = max(found)
        reference.close()
    assert {name: x for name, x in worst.items() if not x < MAX_NMSE} == {}
    assert len(worst) > 100


@pytest.mark.slow
def test_all_layers_at_once_answer_as_layer_by_layer(folder):
    """`--kv-hidden whole`, which `auto` may choose, with later turns and recurrent layers."""
    options = dict(kv_ratio=0.4, kv_method="streaming", kv_window=8)
    differing, n_models = [], 0
    for name, llm in compressed(folder, "f16", kv_hidden="whole", **options):
        layers = load(folder / f"{name}.gguf", **SMALL, **options)
        for n, seed in ((N_PROMPT, 1), (N_TURN, 2)):
            prompt, more = tokens(llm, n, seed), tokens(llm, N_DECODE, seed + 10)
            if not np.array_equal(read(llm, prompt, more), read(layers, prompt, more)):
                differing.append(name)
        assert llm.kv_stats().hidden == "whole", name
        n_models += 1
        layers.close()
    assert not differing and n_models > 100


@pytest.mark.slow
def test_a_tail_that_is_compressed_again_and_again_loses_nothing_that_is_kept(folder):
    for name, llm in compressed(folder, "f16", kv_budget=ALL, kv_tail=40, kv_window=8):
        reference = plain(folder / f"{name}.gguf")
        prompt, more = tokens(llm, 80, 1), tokens(llm, 130, 2)
        assert nmse(read(llm, prompt, more), read(reference, prompt, more)) < MAX_NMSE, name
        begin = llm.engine.turn.past.compressed_at
        assert begin > 80 + 40, f"{name}: the tail was compressed last at {begin} tokens"
        reference.close()


@pytest.fixture(scope="module")
def gemma(tmp_path_factory) -> Callable[[int, bool], Path]:
    """gemma(n_shared, per_layer): path of a Gemma 4 of nine layers, see `gemma4.write`."""
    here = tmp_path_factory.mktemp("gemma4")
    return cache(lambda *options: gemma4.write(here / f"{options}.gguf", 9, *options))


@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize("n_shared", [0, 3])
def test_gemma_4(gemma, n_shared, per_layer):
    """Heads of two sizes, each with a rotation of its own in a quantised cache; layers that read
    the K and V of others, and are the last slice with them.
    """
    check_conversation(gemma(n_shared, per_layer))


@pytest.fixture(scope="module")
def streams(tmp_path_factory) -> Path:
    """A Gemma 3n, see `gemma3n.write`."""
    return gemma3n.write(tmp_path_factory.mktemp("gemma3n") / "gemma3n.gguf")


def test_gemma_3n(streams):
    """Hidden states of four streams, and layers that read the K and V of others."""
    check_conversation(streams)


def check_conversation(path: Path) -> None:
    """Where everything is kept a conversation is llama.cpp's, and every method runs at 0.2."""
    for kind, limit in (("f16", 1e-5), ("q8_0", MAX_NMSE_OF["q8_0"])):
        options = dict(kv_budget=ALL, kv_tail=40, kv_window=8)
        llm, reference = load(path, kind, **options, **SMALL), plain(path, kind)
        assert llm.engine is not None and llm.engine.by_layer is True
        for seed in (1, 2):
            prompt, more = tokens(llm, 70, seed), tokens(llm, 45, seed + 10)
            assert cancelled(llm, prompt)
            assert nmse(read(llm, prompt, more), read(reference, prompt, more)) < limit
        saved = llm.save_state()
        llm.reset()
        llm.load_state(saved)
        more = tokens(llm, N_DECODE, 20)
        assert nmse(feed(llm, more), feed(reference, more)) < limit
        llm.reset()
        llm.kv_set(ratio=0.2)
        for method in METHODS:
            llm.kv_set(method=method)
            llm.eval(tokens(llm, 60, 3))
            assert np.isfinite(logits(llm)).all()
            llm.reset()
        llm.close()
        reference.close()


@pytest.mark.parametrize("n_shared", [0, 3])
def test_the_peak_of_gemma_4_is_the_one_that_shapes_tell(gemma, n_shared):
    check_peak(gemma(n_shared, False), n_shared > 0)


def test_the_peak_of_gemma_3n_is_the_one_that_shapes_tell(streams):
    """Each of its four streams waits."""
    check_peak(streams, True)


def check_peak(path: Path, shares: bool) -> None:
    llm = load(path, kv_ratio=0.3, kv_method="snapkv", **SMALL)
    kv, prompt = llm.engine, tokens(llm, 200, 1)
    expected = kv.prompt_bytes(QueryObserver(kv.settings, prompt, None), kv.plan(len(prompt)))
    llm.eval(prompt)
    peak = kv.store.memory().bytes_peak
    # layers that are read together are kept when the hidden states are gone: the plan has a margin
    assert 0.95 * peak < expected.peak < (1.1 if shares else 1.05) * peak


@pytest.mark.parametrize("how", ["", "graph"])
@pytest.mark.parametrize("n_shared, hidden", [(0, "f32"), (3, "f32"), (0, "whole")])
def test_windows_slide_under_a_long_prompt(gemma, monkeypatch, n_shared, hidden, how):
    """Of a window its own rows stand beside a chunk's, however long the prompt is."""
    monkeypatch.setenv("EDGEKV_ATTEND", how)  # graph: the CPU goes the way of devices
    path, n, n_ubatch = gemma(n_shared, False), 1000, 64
    sizes = dict(n_ctx=2048, n_ubatch=n_ubatch, n_batch=128)
    for kind, limit in (("f16", 1e-5), ("q8_0", MAX_NMSE_OF["q8_0"])):
        options = dict(kv_budget=ALL, kv_hidden=hidden)
        llm, reference = load(path, kind, **options, **sizes), plain(path, kind, **sizes)
        for seed in (1, 2):  # 1,000 tokens, the last chunk being a part of one, and 300 behind them
            prompt, more = tokens(llm, n if seed == 1 else 300, seed), tokens(llm, 10, seed + 10)
            assert cancelled(llm, prompt)
            assert nmse(read(llm, prompt, more), read(reference, prompt, more)) < limit
        layers = llm.engine.store.layers
        windows = [x for x in layers if x.n_swa and x.n_head_kv]
        assert all(llm.engine.store.length(layers.index(x)).max() <= 32 + 64 + 20 for x in windows)
        few = load(path, kind, kv_ratio=0.2, kv_hidden=hidden, **sizes)
        kv, prompt = few.engine, [6] * n
        observer = QueryObserver(kv.settings, prompt, None)
        expected, what = kv.prompt_bytes(observer, kv.plan(n)), observer.extent(n_ubatch)
        assert rows_in_full(windows[0], what, 0, n_ubatch) == 2 * (32 + 64) + n_ubatch
        kv.prefill(prompt)
        peak = kv.store.memory().bytes_peak
        assert how or 0.95 * peak < expected.peak < 1.1 * peak
        for x in (llm, few, reference):
            x.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["gemma4", "qwen35-dense", "falcon-h1-dense", "kimi-linear-moe", "llama4-moe"],
)
def test_the_c_api_on_shared_and_recurrent_layers(folder, gemma, name):
    path = gemma(3, True) if name == "gemma4" else folder / f"{name}.gguf"
    check_passed(run(program("test-engine"), path, 1, 1e-3 if name == "gemma4" else MAX_NMSE * 10))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-dense", "qwen35-dense"])
def test_two_thousand_tokens_behind_a_tail_of_bounded_length(folder, name):
    sizes = dict(n_ctx=2560, n_ubatch=64, n_batch=128)
    llm = load(folder / f"{name}.gguf", kv_budget=ALL, kv_tail=128, kv_window=16, **sizes)
    reference = plain(folder / f"{name}.gguf", **sizes)
    prompt, more = tokens(llm, 200, 1), tokens(llm, 2000, 2)
    assert nmse(read(llm, prompt, more), read(reference, prompt, more)) < MAX_NMSE
    assert llm.engine.turn.past.compressed_at > 2000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "how", "turns"),
    [
        ("f16", "", ((8050, 4), (70, 80))),  # tokens one by one cross the border
        ("f16", "", ((8050, 4), (200, 4))),  # a turn does
        ("q8_0", "graph", ((8050, 4), (200, 4))),
    ],
)
def test_windows_that_begin_anew_after_every_8192_tokens(folder, monkeypatch, kind, how, turns):
    """Llama 4's, as our kernel sees them, and as masks of a device tell."""
    monkeypatch.setenv("EDGEKV_ATTEND", how)
    sizes = dict(n_ctx=8704, n_ubatch=256, n_batch=512)
    llm = load(folder / "llama4-moe.gguf", kind, kv_budget=ALL, **sizes)
    reference = plain(folder / "llama4-moe.gguf", kind, **sizes)
    for n, n_more in turns:
        prompt, more = tokens(llm, n, n), tokens(llm, n_more, n + 1)
        assert nmse(read(llm, prompt, more), read(reference, prompt, more)) < MAX_NMSE
    assert llm.n_tokens > 8192


@pytest.mark.slow
@pytest.mark.parametrize("part", range(N_PARTS))
def test_every_method_runs_on_every_architecture(folder, part):
    n_run, refused = 0, set()
    for name, llm in compressed(folder, "f16", part, N_PARTS, kv_ratio=0.2, kv_window=16):
        for method in METHODS:
            llm.reset()
            llm.kv_set(method=method)
            try:
                llm.eval(tokens(llm, N_PROMPT, 1))
                feed(llm, tokens(llm, 2, 2))
                llm.eval(tokens(llm, N_TURN, 3))
            except (Unsupported, BadInput) as error:
                refused.add((name, method, "positions" in str(error)))
                continue
            assert np.isfinite(logits(llm)).all(), (name, method)
            n_run += 1
    assert n_run > 20 * len(METHODS)
    # of models with ALiBi or learned positions: no rotation of queries tells what comes later, and
    # of 256 positions a probe wants more
    assert all(about_positions for *_, about_positions in refused), refused
    assert {method for _, method, _ in refused} <= {"expected", *PROBED}


def test_the_table_of_architectures_is_up_to_date(folder):
    text = archs.PAGE.read_text(encoding="utf-8")
    assert archs.updated(text, archs.rows(folder)) == text, "write it anew: python -m tests.archs"
