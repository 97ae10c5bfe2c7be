"""Reading a prompt, and then one token after the other, through `eval`."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgekv_lab.sides.load import llama

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Measurement:
    """What to run: a prompt of n_prompt tokens (from the file `tokens`), then n_decode timed
    tokens. type: ggml type id of K and V.
    """

    side: str
    """"stock", the unpatched library by its own bindings ($EDGEKV_LIB names it), or "edgekv"."""
    model: str
    tokens: str
    n_prompt: int
    n_decode: int
    type: int
    n_threads: int
    n_ubatch: int = 512
    ratio: float = 1.0
    hidden: str = "f32"
    method: str = "snapkv"
    flash: bool = True
    logits: str = ""
    """Where the logits of each prompt's last token go (.npy), if anywhere."""
    n_prompts: int = 1
    """So many prompts, one behind the other in the file, each in an empty cache; the times are
    those of all.
    """
    n_gpu_layers: int = 0


def measured(request: dict[str, Any]) -> dict[str, Any]:
    """What comes out of a Measurement, whose fields the request is: seconds, tokens a second and
    bytes."""
    from edgekv.base.machine import rss_peak  # loads no library

    what = Measurement(**request)
    tokens = json.loads(Path(what.tokens).read_text())
    llm = load(what)
    start, busy = time.perf_counter(), time.process_time()
    logits = []
    for i in range(0, what.n_prompts * what.n_prompt, what.n_prompt):
        llm.reset()
        llm.eval(tokens[i : i + what.n_prompt])
        synchronize(llm)
        if what.logits:
            logits.append(last_logits(llm))
    result: dict[str, Any] = {
        "prefill_s": time.perf_counter() - start,
        "prefill_cpu_s": time.process_time() - busy,
        "rss_prefill_bytes": rss_peak(),
    }
    if what.logits:
        np.save(what.logits, logits)
    # before decoding: the tails are still empty
    stats = llm.kv_stats() if what.side == "edgekv" else None
    for token in tokens[:WARM_UP_TOKENS]:
        llm.eval([token])
    synchronize(llm)
    start = time.perf_counter()
    for token in tokens[WARM_UP_TOKENS : WARM_UP_TOKENS + what.n_decode]:
        llm.eval([token])
    synchronize(llm)
    if what.n_decode:
        result["decode_tps"] = what.n_decode / (time.perf_counter() - start)
    result["rss_bytes"] = rss_peak()
    if stats:
        result |= {
            name: getattr(stats, name)
            for name in (
                "n_bytes",
                "n_bytes_peak",
                "n_bytes_full",
                "prefill_ms",
                "compress_ms",
                "stage_ms",
                "mode",
                "method",
            )
        }
        result["n_kept"] = float(stats.n_kept)
    return result


def synchronize(llm: Any) -> None:
    """Wait for a device, which may still be at what it was given last."""
    import edgekv.llama_cpp as llama_cpp

    llama_cpp.llama_synchronize(llm.ctx)


def last_logits(llm: Any) -> np.ndarray:
    import edgekv.llama_cpp as llama_cpp

    return np.ctypeslib.as_array(
        llama_cpp.llama_get_logits_ith(llm.ctx, -1), (llm.n_vocab(),)
    ).copy()


def load(what: Measurement) -> Any:
    """The side's model with room for all tokens."""
    return llama(
        what.model,
        -(-(what.n_prompt + what.n_decode + WARM_UP_TOKENS) // 256) * 256,
        what.n_threads,
        None
        if what.side == "stock"
        else dict(kv_ratio=what.ratio, kv_hidden=what.hidden, kv_method=what.method),
        n_batch=what.n_ubatch,
        n_ubatch=what.n_ubatch,
        flash_attn=what.flash,
        type_k=what.type,
        type_v=what.type,
        n_gpu_layers=what.n_gpu_layers,
    )


def tokens(request: dict[str, Any]) -> list[int]:
    """Those of a text by a model's tokenizer, without a beginning."""
    from edgekv.llama_cpp import Llama

    llm = Llama(request["model"], vocab_only=True, verbose=False)
    found: list[int] = llm.tokenize(request["text"].encode(), add_bos=False)
    return found
