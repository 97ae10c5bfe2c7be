"""Runs a given folder of llama.cpp libraries in a process of its own and hands back logits.

The unpatched and the patched library cannot live in one process (same symbols), so every use of the
unpatched one goes
through here: the parent writes jobs as JSON to the child's standard input, the child (`python -m
tests.lib`) loads the libraries named by EDGEKV_LIB through the ctypes bindings and writes one array
per job to an .npz file.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
FLASH_ATTN = {"off": 0, "on": 1}


@dataclass(frozen=True)
class Job:
    """One prompt and what is decoded after it. Defaults are the ones the tests share with
    `edgekv.Llama`.

    tokens: the prompt; decode: tokens fed one by one after it (forced, so that two libraries see
    the same text);
    all_logits: logits of every prompt position instead of the last one; type_k, type_v: ggml type
    ids.
    """

    model: str
    tokens: tuple[int, ...]
    decode: tuple[int, ...] = ()
    all_logits: bool = False
    type_k: int = 1
    type_v: int = 1
    n_ctx: int = 2048
    n_batch: int = 512
    n_ubatch: int = 512
    n_threads: int = 2
    flash_attn: str = "on"


def stock_folder() -> Path:
    """Folder of the unpatched libraries: $EDGEKV_STOCK_LIB, or built once into build/stock."""
    named = os.environ.get("EDGEKV_STOCK_LIB")
    if named:
        return Path(named)
    folder = ROOT / "build" / "stock"
    command = [sys.executable, "native/upstream.py", "build-stock", "--out", str(folder)]
    with building():
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    return folder / "bin"


def building() -> AbstractContextManager[Any]:
    """Held by whoever writes into build/: builds unpack llama.cpp into one folder."""
    from filelock import FileLock

    (ROOT / "build").mkdir(exist_ok=True)
    return FileLock(ROOT / "build" / "tests.lock")


def run(lib: Path | str, jobs: list[Job], timeout: float = 300) -> list[np.ndarray]:
    """Logits of each job, float32 [n_rows, n_vocab]: the prompt's rows (all or the last), then one
    row per decoded token.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "logits.npz"
        request = {"out": str(out), "jobs": [asdict(job) for job in jobs]}
        env = {**os.environ, "EDGEKV_LIB": str(lib)}
        done = subprocess.run(
            [sys.executable, "-m", "tests.lib"],
            input=json.dumps(request),
            text=True,
            cwd=ROOT,
            env=env,
            capture_output=True,
            timeout=timeout,
        )
        if done.returncode != 0:
            raise RuntimeError(
                f"the library in {lib} failed ({done.returncode}):\n{done.stderr[-4000:]}"
            )
        with np.load(out) as arrays:
            return [arrays[str(index)] for index in range(len(jobs))]


def _logits(llama_cpp, job: Job) -> np.ndarray:
    model = llama_cpp.llama_model_load_from_file(
        job.model.encode(), llama_cpp.llama_model_default_params()
    )
    assert model, f"cannot load {job.model}"
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = job.n_ctx, job.n_batch, job.n_ubatch
    params.n_threads = params.n_threads_batch = job.n_threads
    params.type_k, params.type_v = job.type_k, job.type_v
    params.flash_attn_type = FLASH_ATTN[job.flash_attn]
    context = llama_cpp.llama_init_from_model(model, params)
    assert context, "cannot create the context"
    n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    rows = []
    for first in range(0, len(job.tokens), job.n_batch):
        chunk = job.tokens[first : first + job.n_batch]
        last = first + len(chunk) == len(job.tokens)
        wanted = [
            job.all_logits or (last and index == len(chunk) - 1) for index in range(len(chunk))
        ]
        rows += _decode(llama_cpp, context, chunk, first, wanted, n_vocab)
    for index, token in enumerate(job.decode):
        rows += _decode(llama_cpp, context, (token,), len(job.tokens) + index, [True], n_vocab)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return np.stack(rows)


def _decode(
    llama_cpp, context, tokens, first: int, wanted: list[bool], n_vocab: int
) -> list[np.ndarray]:
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for index, token in enumerate(tokens):
        batch.token[index], batch.pos[index] = token, first + index
        batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
        batch.logits[index] = wanted[index]
    status = llama_cpp.llama_decode(context, batch)
    assert status == 0, f"llama_decode returned {status}"
    rows = [
        np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, index), (n_vocab,)).copy()
        for index in range(len(tokens))
        if wanted[index]
    ]
    llama_cpp.llama_batch_free(batch)
    return rows


def _main() -> None:
    import edgekv.llama_cpp as llama_cpp

    @llama_cpp.llama_log_callback
    def log(level: int, text: bytes, user_data: ctypes.c_void_p) -> None:
        if level == 4:  # errors only (5 continues an earlier line)
            sys.stderr.write(text.decode(errors="replace"))

    llama_cpp.llama_log_set(log, ctypes.c_void_p(0))
    request = json.load(sys.stdin)
    jobs = [Job(**job) for job in request["jobs"]]
    np.savez(
        request["out"], **{str(index): _logits(llama_cpp, job) for index, job in enumerate(jobs)}
    )


if __name__ == "__main__":
    _main()


def nmse(got: np.ndarray, expected: np.ndarray) -> float:
    """Normalised mean squared error."""
    return float(((got - expected) ** 2).sum() / (expected**2).sum())
