"""Experts in main memory beside the stand-in for a GPU, in a process of its own: a backend once
loaded stays.

`python -m tests.experts MODEL DEVICE` writes as JSON how far logits are from those of the CPU, and
llama.cpp's log of the last model on standard error.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from edgekv.errors import EdgeKVError
from edgekv.model.placement import buffer_types
from tests.device import load_device, tokens
from tests.engine import load, read
from tests.lib import nmse

PLACES: dict[str, dict[str, Any]] = {
    "nowhere": {},
    "two layers": {"n_cpu_moe": 2},
    "all": {"cpu_moe": True},
    "mixed": {"override_tensor": r"blk\.0\.ffn_.*_exps=Fake", "cpu_moe": True},
}

REFUSED: dict[str, dict[str, Any]] = {
    "heads over GPUs": {"split_mode": 3},
    "rows over GPUs": {"split_mode": 2},
    "a GPU that there is not": {"split_mode": 0, "main_gpu": 5},
}


def refusal(path: Path, **options: Any) -> str:
    """What is said of a model that cannot be loaded like this."""
    try:
        load(path, kv_ratio=0.3, n_gpu_layers=99, **options)
    except EdgeKVError as error:
        return str(error)
    return ""


def conversation(path: Path, **options: Any) -> np.ndarray:
    """Logits behind a prompt that was compressed, and behind the tokens after it."""
    llm = load(path, kv_ratio=0.3, kv_method="random", **options)
    rows = read(llm, tokens(500, 0), tokens(3, 1))
    llm.close()
    return rows


def main() -> None:
    path, device = Path(sys.argv[1]), sys.argv[2]
    expected = conversation(path)
    load_device(device)
    found = {}
    for name, where in PLACES.items():
        print(f"-- {name} --", file=sys.stderr, flush=True)
        got = conversation(path, n_gpu_layers=99, verbose=name == "mixed", **where)
        found[name] = nmse(got, expected)
    said = {name: refusal(path, **where) for name, where in REFUSED.items()}
    print(json.dumps({"buffers": sorted(buffer_types()), "nmse": found, "said": said}))


if __name__ == "__main__":
    main()
