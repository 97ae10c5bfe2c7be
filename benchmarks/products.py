"""What a prompt's tokens are multiplied in: products with quantised weights, and attention.

    python benchmarks/products.py speed -m MODEL.gguf --tokens 512,2000,7000
    python benchmarks/products.py precision -m MODEL.gguf -n 60 --tokens 200

Both read a text by `snapkv` at 0.2, in this process, with a variable set and unset in turn:
`--off EDGEKV_PRODUCTS=0` (llama.cpp's products), `--off EDGEKV_ATTEND=f32` (attention in f32).
`precision` compares the last token's logits with those of a copy that has the same weights as f32:
NMSE, the median of n passages. Tables go to standard output.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import numpy as np  # noqa: E402

import edgekv  # noqa: E402
import edgekv.llama_cpp as llama_cpp  # noqa: E402
from edgekv.base.markdown import table  # noqa: E402
from edgekv.models.demo import demo_path  # noqa: E402

SIDES = ("off", "on")


def load(path: str, n_ctx: int, ratio: float = 0.2) -> Any:
    method = "snapkv" if ratio < 1 else "full"
    return edgekv.Llama(path, n_ctx=n_ctx, kv_ratio=ratio, kv_method=method, verbose=False)


def read(llm: Any, tokens: list[int], side: str, off: str) -> tuple[float, Any]:
    """Seconds of this process's processors, and the last token's logits."""
    name, value = off.split("=")
    os.environ[name] = value if side == "off" else ""
    llm.reset()
    begin = time.process_time()
    llm.eval(tokens)
    seconds = time.process_time() - begin
    logits = llama_cpp.llama_get_logits(llm.ctx)
    return seconds, np.ctypeslib.as_array(logits, (llm.n_vocab(),)).astype(np.float64)


def speed(model: str, text: bytes, lengths: list[int], n: int, off: str) -> str:
    llm, rows = load(model, max(lengths) + 64), []
    tokens = llm.tokenize(text)
    for length in lengths:
        rounds = [[read(llm, tokens[:length], side, off)[0] for side in SIDES] for _ in range(n)]
        without, with_it = np.median(rounds, axis=0)
        rows.append((f"{length:,}", f"{without:.2f}", f"{with_it:.2f}", f"{without / with_it:.2f}"))
    return table(("tokens", f"{off}, processor s", "without, processor s", "x"), rows)


def precision(model: str, text: bytes, lengths: list[int], n: int, off: str) -> str:
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = 0, True
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        copy = str(Path(folder) / "f32.gguf")
        llama_cpp.llama_model_quantize(model.encode(), copy.encode(), ctypes.byref(params))
        exact, llm = load(copy, max(lengths) + 64, 1.0), load(model, max(lengths) + 64)
        tokens = llm.tokenize(text)
        for length in lengths:
            passages = [tokens[i * length : (i + 1) * length] for i in range(n)]
            right = [read(exact, x, "off", off)[1] for x in passages]
            errors = np.array(
                [
                    [np.sum((read(llm, x, side, off)[1] - y) ** 2) / np.sum(y**2) for side in SIDES]
                    for x, y in zip(passages, right, strict=True)
                ]
            )
            middle = np.median(errors, axis=0)
            nearer = f"{(errors[:, 1] < errors[:, 0]).sum()} of {n}"
            rows.append((f"{length:,}", f"{middle[0]:.1e}", f"{middle[1]:.1e}", nearer))
    return table(("tokens", f"{off}, NMSE", "without, NMSE", "without nearer"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["speed", "precision"])
    parser.add_argument("-m", default="demo")
    parser.add_argument("-f", required=True, help="a text")
    parser.add_argument("-n", type=int, default=3)
    parser.add_argument("--tokens", default="2000")
    parser.add_argument("--off", default="EDGEKV_PRODUCTS=0", help="the variable of the first side")
    args = parser.parse_args()
    model = str(demo_path()) if args.m == "demo" else args.m
    lengths = [int(x) for x in args.tokens.split(",")]
    measure = {"speed": speed, "precision": precision}[args.what]
    print(measure(model, Path(args.f).read_bytes(), lengths, args.n, args.off))


if __name__ == "__main__":
    main()
