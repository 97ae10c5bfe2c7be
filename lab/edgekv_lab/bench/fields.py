"""The fields of a row: llama-bench's, by its names and kinds, then ours.

Source: `test::get_fields` and `get_field_type` in tools/llama-bench/llama-bench.cpp of llama.cpp
0c1e57098. Where these bindings have no such setting, the field holds llama-bench's default, which
is what runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from statistics import mean, stdev
from typing import Any

from edgekv.model.loading import Loading
from edgekv.model.placement import placements
from edgekv_lab.bench.spec import Case

LLAMA_BENCH: dict[str, type] = {
    "build_commit": str,
    "build_number": int,
    "cpu_info": str,
    "gpu_info": str,
    "backends": str,
    "model_filename": str,
    "model_type": str,
    "model_size": int,
    "model_n_params": int,
    "n_batch": int,
    "n_ubatch": int,
    "n_threads": int,
    "cpu_mask": str,
    "cpu_strict": bool,
    "poll": int,
    "type_k": str,
    "type_v": str,
    "n_gpu_layers": int,
    "n_cpu_moe": int,
    "split_mode": str,
    "main_gpu": int,
    "no_kv_offload": bool,
    "flash_attn": int,
    "devices": str,
    "tensor_split": str,
    "tensor_buft_overrides": str,
    "load_mode": str,
    "lazy_mode": str,
    "embeddings": bool,
    "no_op_offload": int,
    "no_host": bool,
    "repack": bool,
    "fit_target": int,
    "fit_min_ctx": int,
    "n_prompt": int,
    "n_gen": int,
    "n_depth": int,
    "test_time": str,
    "avg_ns": int,
    "stddev_ns": int,
    "avg_ts": float,
    "stddev_ts": float,
}
SAMPLES = ("samples_ns", "samples_ts")
"""Lists behind the fields, in JSON only."""
OURS: dict[str, type] = {
    "kv_method": str,
    "kv_ratio": float,
    "kv_tokens_full": int,
    "kv_tokens_kept": int,
    "kv_bytes_full": int,
    "kv_bytes_used": int,
    "kv_bytes_allocated": int,
    "kv_bytes_peak": int,
    "mem_peak_device": int,
    "mem_peak_host": int,
    "mem_computed_host": int,
    "read_bytes_weights": int,
    "read_bytes_kv": int,
    "mem_bandwidth": float,
    "compress_ms": float,
    "kv_fill": str,
    "n_parallel": int,
    "spec_type": str,
    "kv_recall": float,
    "kv_bytes_index": int,
    "kv_bytes_archive": int,
    "kv_bytes_recalled": int,
    "note": str,
}
"""Bytes, if nothing else is said.

kv_bytes_full: all tokens in a full f16 cache. kv_bytes_used: entries that attention reads;
kv_bytes_allocated: with the room for more. mem_peak_host: the process's largest resident size;
mem_computed_host: what it should be (see `expected`). read_bytes_weights, read_bytes_kv: what
writing a token reads at least, the mean over the test; 0 for tests that read a prompt.
mem_bandwidth: bytes per second that as many threads got from main memory; 0 if it was not measured.
kv_fill: how the depth got there, `repeat` if most of it was not read; peaks and compress_ms are 0
then. n_parallel: conversations; speeds, tokens and bytes of the cache are of all together, and what
writing a token reads is its share. spec_type: drafts of an answer, empty where random tokens are
written; with them a token's reads are not known, and 0. kv_recall: share of
the tokens that each new one looks up, 0: none; kv_bytes_index: part of kv_bytes_allocated by which
they are found; kv_bytes_archive: in a file; kv_bytes_recalled: rows that the test looked up there.
"""
DEFAULTS: dict[str, Any] = {
    "build_number": 0,
    "cpu_mask": "0x0",
    "cpu_strict": False,
    "poll": 50,
    "n_cpu_moe": 0,
    "split_mode": "layer",
    "main_gpu": 0,
    "no_kv_offload": False,
    "devices": "auto",
    "tensor_split": "0.00",
    "tensor_buft_overrides": "none",
    "load_mode": "auto",
    "lazy_mode": "auto",
    "embeddings": False,
    "no_op_offload": 0,
    "no_host": False,
    "repack": True,
    "fit_target": 0,
    "fit_min_ctx": 0,
}
FLASH_ATTN = {"auto": -1, "off": 0, "on": 1}
FIRSTS = (
    "kv_tokens_full",
    "kv_bytes_full",
    "kv_bytes_used",
    "kv_bytes_allocated",
    "read_bytes_weights",
    "read_bytes_kv",
    "kv_bytes_index",
    "kv_bytes_archive",
    "kv_bytes_recalled",
)
"""The same in every sample."""
PEAKS = ("kv_bytes_peak", "mem_peak_device")
FILLED = "filled, not read: no peak was measured"


def record(
    case: Case, samples: Sequence[dict[str, Any]], computed: int, bandwidth: float = 0.0
) -> dict[str, Any]:
    """One row from its samples (see `measure.sample`), fields in llama-bench's order, then ours,
    then the lists of samples.

    computed: bytes that this row should take in host memory, 0 if nobody knows. bandwidth: of the
    machine, bytes/s.
    """
    first = samples[0]
    ns = [s["ns"] for s in samples]
    ts = [1e9 * case.n_parallel * (case.n_prompt + case.n_gen) / x for x in ns]
    values = {
        **DEFAULTS,
        **{name: first[name] for name in LLAMA_BENCH if name in first},
        "model_filename": case.model,
        "n_batch": case.n_batch,
        "n_ubatch": case.n_ubatch,
        "n_threads": case.n_threads,
        "type_k": case.type_k,
        "type_v": case.type_v,
        "n_gpu_layers": case.n_gpu_layers,
        **loading(case.loading),
        "flash_attn": FLASH_ATTN[case.flash_attn] if case.is_full else 1,
        "n_prompt": case.n_prompt,
        "n_gen": case.n_gen,
        "n_depth": case.n_depth,
        "test_time": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "avg_ns": int(mean(ns)),
        "stddev_ns": int(deviation(ns)),
        "avg_ts": mean(ts),
        "stddev_ts": deviation(ts),
        **{name: first[name] for name in FIRSTS},
        **{name: max(s[name] for s in samples) for name in PEAKS},
        "repack": first.get("repack", True),
        "kv_method": first["method"],
        "kv_ratio": case.kv_ratio,
        "kv_tokens_kept": round(first["kv_tokens_kept"]),
        "mem_peak_host": max(s["mem_peak_host"] or 0 for s in samples),
        "mem_computed_host": computed,
        "mem_bandwidth": bandwidth,
        "compress_ms": round(mean(s["compress_ms"] for s in samples), 3),
        "kv_fill": "repeat" if case.is_filled else "read",
        "n_parallel": case.n_parallel,
        "spec_type": case.spec_type,
        "kv_recall": case.kv_recall,
        "note": FILLED if case.is_filled else "",
    }
    return {name: values[name] for name in (*LLAMA_BENCH, *OURS)} | {
        "samples_ns": ns,
        "samples_ts": ts,
    }


def loading(wish: Loading) -> dict[str, Any]:
    """Where the weights lie, in llama-bench's words."""
    placed = placements(wish.override_tensor, wish.cpu_moe)
    return {
        "n_cpu_moe": wish.n_cpu_moe,
        "tensor_buft_overrides": ",".join(f"{p}={buffer}" for p, buffer in placed) or "none",
        "split_mode": wish.split_mode,
        "main_gpu": wish.main_gpu,
        "tensor_split": "/".join(f"{share:.2f}" for share in wish.tensor_split or (0,)),
        "load_mode": wish.load_mode,
    }


def deviation(values: Sequence[float]) -> float:
    """The sample standard deviation, 0 of one value (as llama-bench)."""
    return stdev(values) if len(values) > 1 else 0.0
