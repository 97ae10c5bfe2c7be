"""One model on the CPU and on the test device of native/tests/cuda/fake-device.cpp, in a process of
its own: a backend once loaded stays.

`python -m tests.device` reads one job as JSON from standard input, {"model", "kind", "device"}, and
writes what came out as JSON; with "fails" what a device that fails leads to. "hidden": where hidden
states wait. "brief": fewer tokens and methods, and no turn that is cancelled. Without a device it
is the GPU that the library was built for.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from edgekv.library import library_path
from edgekv.model import facts
from tests import models
from tests.engine import feed, load, logits, positions, random_profile, read, share
from tests.lib import nmse

N_PROMPT, N_BRIEF = 500, 300
"""Tokens of a prompt: more than one chunk, and more than any head keeps."""
LONG = (744, 616)
"""Tokens of two turns of many windows. The scratch slides just before the last eight of each."""
METHODS = ("snapkv", "cake", "h2o", "kvzap")
"""Between them they ask for every statistic of a layer, and for what is predicted of its rows."""
# fit: with keys as bad as `worst` lets them be, moved values would make much of a rounding
DRAWN = ("random", "score=random,merge=d2o", "score=random,merge=summary,worst=5,fit=1e9")
"""Rows are drawn, so that the same ones stay whatever a device rounds."""
TRIED = ("snapkv", "kvzap")
"""Before these two have run on a device all its kernels were tried, which counts as calls too."""
GPU = 1
"""ggml's GGML_BACKEND_DEVICE_TYPE_GPU."""
VERBS = ("attend", "score", "predict", "gather", "nearest", "fold")
"""Of `edgekv_cuda_calls`."""


def tokens(n: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(models.N_SPECIAL, models.N_VOCAB, n).tolist()


def ragged(path: Path, kind: str, method: str, n: int, **options: Any) -> np.ndarray:
    """Logits of a conversation over heads of different length: a prompt, single tokens, some at
    once, a turn, single tokens.
    """
    llm = load(path, kind, kv_ratio=share(0.3, kind), kv_method=method, **options)
    llm.kv_set(
        budget=np.random.default_rng(0)
        .integers(40, 300, llm.kv_stats().kept.shape)
        .astype(np.int32)
    )
    first = read(llm, tokens(n, 0), tokens(4, 1))
    llm.eval(tokens(10, 2))
    llm.eval(tokens(200, 3))
    return np.concatenate([first, feed(llm, tokens(70, 4))])  # tails grow


def kept(path: Path, kind: str, method: str, n: int, **options: Any) -> list[set[int]]:
    """Token indices that stay in each layer and head."""
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder, "profile.gguf")
        random_profile(path, profile)
        llm = load(
            path,
            kind,
            kv_ratio=share(0.3, kind),
            kv_method=method,
            kv_profile=str(profile),
            **options,
        )
    llm.eval(tokens(n, 0))
    return [set(rows.tolist()) for layer in positions(llm) for rows in layer]


def interrupted(path: Path, kind: str, **options: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits [4, n_vocab] behind a conversation that went on undisturbed, after turns that were
    cancelled at several points, and after it was saved and loaded into another context. Summary
    rows are in it: they are written when the prompt has ended.
    """
    from edgekv.errors import Cancelled

    first, *others = (
        load(path, kind, kv_ratio=share(0.3, kind), kv_method=DRAWN[-1], **options)
        for _ in range(3)
    )
    for llm in (first, others[0]):
        llm.eval(tokens(N_PROMPT, 0))
        llm.eval(tokens(5, 1))
    cancelled, loaded = others
    for at in (0.0, 0.3, 0.9):
        cancelled.kv_progress = lambda done, total, at=at: (
            cancelled.kv_cancel() if done >= at * total else None
        )
        try:
            cancelled.eval(tokens(400, 2))
            raise AssertionError(f"at {at:g} of a turn nothing was cancelled")
        except Cancelled:
            pass
    cancelled.kv_progress = None
    with tempfile.TemporaryDirectory() as folder:
        first.kv_save(str(Path(folder, "chat")))
        loaded.kv_load(str(Path(folder, "chat")))
    return tuple(feed(llm, tokens(4, 3)) for llm in (first, cancelled, loaded))


def recalling(
    path: Path, kind: str, folder: str, recall: float = 0.05, **options: Any
) -> dict[str, Any]:
    """A conversation whose tokens are recalled: prompt, tokens one by one, some at once, a turn
    behind all tokens, and, without windows, the same turn again behind the way back.

    logits: [.., n_vocab] of tokens that recall, turns: of tokens that need not; n_bytes: that were
    looked up, of the index, and of the archive.
    """
    llm = load(
        path,
        kind,
        kv_ratio=share(0.3, kind),
        kv_method="random",
        kv_archive=folder,
        kv_recall=recall,
        **options,
    )
    first = read(llm, tokens(N_PROMPT, 0), tokens(20, 1))
    llm.eval(tokens(8, 2))
    several = logits(llm)[None]
    turns, back = [], llm.n_tokens
    while not turns or (len(turns) < 2 and llm.back_to(back)):
        llm.eval(tokens(200, 3))
        turns.append(logits(llm))
    assert len(turns) == 2 or any(layer.n_swa for layer in llm.engine.store.layers)
    after = feed(llm, tokens(20, 4))
    memory = llm.engine.store.memory()
    return {
        "logits": np.concatenate([first, several, after]),
        "turns": np.array(turns),
        "n_bytes": [memory.bytes_recalled, memory.bytes_index, memory.bytes_archive],
    }


def beside(path: Path, kind: str, device: str, n_gpu_layers: int) -> dict[str, Any]:
    """What is recalled with layers on a device, beside the same on the CPU; without: how far it
    would be if nothing was recalled.
    """
    with tempfile.TemporaryDirectory() as folder:
        here = recalling(path, kind, folder)
        without = recalling(path, kind, folder, recall=0)
        load_device(device)
        there = recalling(path, kind, folder, n_gpu_layers=n_gpu_layers)
    return {
        "logits": nmse(there["logits"], here["logits"]),
        "turns": nmse(there["turns"], here["turns"]),
        "without": nmse(without["logits"], here["logits"]),
        "n_bytes": [there["n_bytes"], here["n_bytes"]],
    }


def failing(path: Path, kind: str, device: ctypes.CDLL, **options: Any) -> list[str]:
    """What reading a prompt says when the device does not compute its first graph, its second, ...,
    until there are no more; "": nothing.
    """
    from edgekv.errors import EdgeKVError

    # its kernels are tried
    load(path, kind, kv_ratio=share(0.3, kind), kv_method="snapkv", **options).eval(
        tokens(N_PROMPT, 0)
    )
    said: list[str] = []
    while True:
        llm = load(path, kind, kv_ratio=share(0.3, kind), kv_method="snapkv", **options)
        device.fake_metal_fails(len(said) + 1)
        what = ""
        try:
            llm.eval(tokens(N_PROMPT, 0))
        except EdgeKVError as error:
            what = str(error)
        if device.fake_metal_fails(0):  # it was not reached
            return said
        said.append(what)


def failing_tokens(path: Path, kind: str, device: ctypes.CDLL, **options: Any) -> dict[str, Any]:
    """A token that is decoded while the device fails at its first graph or call, its second, ...,
    until there are no more.

    said: what each failure said; "": nothing. same: whether the conversation was as before each
    time, and went on as if nothing had been. Metal's backend computes nothing more once something
    has failed.
    """
    from edgekv.conversation import state
    from edgekv.errors import EdgeKVError

    def conversation() -> Any:
        llm = load(path, kind, kv_ratio=share(0.3, kind), kv_method="snapkv", **options)
        llm.eval(tokens(N_PROMPT, 0))
        return llm

    goes_on = hasattr(device, "fake_device_fails")
    fails = device.fake_device_fails if goes_on else device.fake_metal_fails
    [token], after = tokens(1, 1), tokens(3, 2)
    undisturbed = conversation()
    before = state.take(undisturbed)
    expected = feed(undisturbed, [token, *after])
    llm, said, same = conversation(), [], []
    while True:
        llm = llm if goes_on else conversation()
        state.put(llm, before)
        rows = positions(llm)
        fails(len(said) + 1)
        what = ""
        try:
            llm.eval([token])
        except EdgeKVError as error:
            what = str(error)
        if fails(0):  # it was not reached
            return {"said": said, "same": bool(np.all(same))}
        said.append(what)
        if what:
            same.append(
                llm.n_tokens == N_PROMPT
                and all(map(np.array_equal, sum(positions(llm), []), sum(rows, [])))
            )
            same.append(not goes_on or np.array_equal(feed(llm, [token, *after]), expected))


def sliding(path: Path, kind: str, device: str) -> dict[str, float]:
    """A conversation of two turns, each many windows long, of which nothing is evicted but what the
    windows leave behind.

    nmse: how far its logits on a device are from those of llama.cpp's own cache on the CPU; n_rows:
    of the longest head with a window; peak: bytes at the peak of the first turn, as a share of what
    is planned for windows that slide.
    """
    from edgekv.engine.observer import QueryObserver

    sizes = dict(n_ubatch=32, n_batch=128)  # a few chunks fill the scratch of a window
    plain = load(path, kind, kv_ratio=1.0, **sizes)
    load_device(device)
    llm = load(path, kind, kv_ratio=0.9, n_gpu_layers=99, **sizes)
    llm.kv_set(budget=np.full(llm.kv_stats().kept.shape, sum(LONG), np.int32))
    turns = [(tokens(n, n), tokens(4, n + 1)) for n in LONG]
    kv, (first, second) = llm.engine, turns
    planned = kv.prompt_bytes(QueryObserver(kv.settings, first[0], None), kv.plan(LONG[0])).peak
    got = read(llm, *first)
    peak = kv.store.memory().bytes_peak
    got = np.concatenate([got, read(llm, *second)])
    expected = np.concatenate([read(plain, *turn) for turn in turns])
    windows = [il for il, layer in enumerate(kv.store.layers) if layer.n_swa]
    n_rows = max(int(kv.store.length(il).max()) for il in windows)
    return {"nmse": nmse(got, expected), "n_rows": n_rows, "peak": peak / planned}


def load_device(device: str) -> ctypes.CDLL:
    ggml = ctypes.CDLL(str(library_path("ggml")))
    ggml.ggml_backend_load.restype = ctypes.c_void_p
    assert ggml.ggml_backend_load(device.encode()), f"{device} cannot be loaded"
    return ctypes.CDLL(device)


def kernel_calls() -> dict[str, int] | None:
    """How often each kernel of ours was queued on CUDA devices; None where the first device has
    none that were compiled for it.
    """
    lib = {name: ctypes.CDLL(str(library_path(name))) for name in ("ggml", "ggml-base")}
    lib["ggml"].ggml_backend_dev_by_type.restype = ctypes.c_void_p
    device = lib["ggml"].ggml_backend_dev_by_type(GPU)
    if not device:
        return None
    registry = lib["ggml-base"].ggml_backend_dev_backend_reg
    function = lib["ggml-base"].ggml_backend_reg_get_proc_address
    registry.restype, registry.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    function.restype, function.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p]
    ready, calls = (
        function(registry(device), name) for name in (b"edgekv_cuda_ready", b"edgekv_cuda_calls")
    )
    if not calls or (ready and not ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(ready)(device)):
        return None
    count = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_char_p)(calls)
    return {verb: count(verb.encode()) for verb in VERBS}


def main() -> None:
    job = json.load(sys.stdin)
    path, kind = Path(job["model"]), job["kind"]
    if job.get("fails"):
        run = failing_tokens if job["fails"] == "tokens" else failing
        print(json.dumps(run(path, kind, load_device(job["device"]), n_gpu_layers=99)))
        return
    if layers := job.get("recalls"):
        print(json.dumps(beside(path, kind, job["device"], layers)))
        return
    if job.get("slides"):
        print(json.dumps(sliding(path, kind, job["device"])))
        return
    brief = job.get("brief", False)
    drawn, methods, n = (DRAWN[:2], TRIED, N_BRIEF) if brief else (DRAWN, METHODS, N_PROMPT)
    os.environ["EDGEKV_ATTEND"] = (
        "graph"  # a prompt goes through the same upstream attention as on a device
    )
    expected = {method: ragged(path, kind, method, n) for method in drawn}
    expected_rows = {method: kept(path, kind, method, n) for method in methods}
    del os.environ["EDGEKV_ATTEND"]
    device = load_device(job["device"]) if job["device"] else None
    there = {"n_gpu_layers": 99, "kv_hidden": job.get("hidden", "f32")}
    assert any(d["name"].upper() != "CPU" for d in facts.devices()), "there is no device"
    if not brief:
        for method in TRIED:
            kept(path, kind, method, n, **there)
    tried = kernel_calls()
    got = {method: ragged(path, kind, method, n, **there) for method in drawn}
    rows = {method: kept(path, kind, method, n, **there) for method in methods}
    calls = kernel_calls()
    result = {
        "nmse": {m: nmse(got[m], expected[m]) for m in drawn},
        "same": {
            m: sum(len(a & b) for a, b in zip(rows[m], expected_rows[m]))
            / sum(map(len, expected_rows[m]))
            for m in methods
        },
        "calls": calls and {verb: calls[verb] - tried[verb] for verb in VERBS},
        "n_ours": device.fake_device_n_ours() if device else None,
        "n_merges": device.fake_device_n_merges() if device else None,
        "n_attends": device.fake_metal_n_attends()
        if hasattr(device, "fake_metal_n_attends")
        else None,
        "n_predicted": device.fake_device_n_predicted()
        if hasattr(device, "fake_device_n_predicted")
        else None,
        "n_graphs": [device.fake_device_n_graphs(on) for on in (True, False)]
        if hasattr(device, "fake_device_n_graphs")
        else None,
        "n_pinned": device.fake_device_n_pinned(n * load(path, kind).n_embd() * 4)
        if hasattr(device, "fake_device_n_pinned")
        else None,
    }
    if not brief:
        # after what is counted
        undisturbed, cancelled, loaded = interrupted(path, kind, **there)
        result["harm"] = {
            "cancelled": nmse(cancelled, undisturbed),
            "loaded": nmse(loaded, undisturbed),
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
