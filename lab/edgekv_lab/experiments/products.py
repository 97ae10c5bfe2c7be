"""What a prompt's tokens are multiplied in: products with quantised weights, and attention.

Both read a text by `snapkv` at 0.2, in this process, with a variable set and unset in turn:
`--off EDGEKV_PRODUCTS=0` (llama.cpp's products), `--off EDGEKV_ATTEND=f32` (attention in f32).
`precision` compares the last token's logits with those of a copy that has the same weights as f32:
NMSE, the median of n passages.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import numpy as np

import edgekv
import edgekv.llama_cpp as llama_cpp
from edgekv.commands.declare import option
from edgekv.commands.values import COUNT
from edgekv_lab.experiments.experiment import MODEL, Options, experiment, many, sheet

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


def speed(o: Options, text: bytes) -> None:
    llm = load(o.model, max(o.tokens) + 64)
    tokens = llm.tokenize(text)
    columns = [(x, "{:.2f}") for x in (f"{o.off}, processor s", "without, processor s", "x")]
    with sheet(("tokens", "{:,}"), *columns, name="speed") as table:
        for n in o.tokens:
            rounds = [[read(llm, tokens[:n], side, o.off)[0] for side in SIDES] for _ in range(o.n)]
            without, with_it = map(float, np.median(rounds, axis=0))
            table.add(n, without, with_it, without / with_it)


def precision(o: Options, text: bytes) -> None:
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = 0, True
    columns = [(x, "{:.1e}") for x in (f"{o.off}, NMSE", "without, NMSE")]
    nearer = ("without nearer", "{} of {}")
    with (
        tempfile.TemporaryDirectory() as folder,
        sheet(("tokens", "{:,}"), *columns, nearer, name="precision") as table,
    ):
        copy = str(Path(folder) / "f32.gguf")
        llama_cpp.llama_model_quantize(o.model.encode(), copy.encode(), ctypes.byref(params))
        exact, llm = load(copy, max(o.tokens) + 64, 1.0), load(o.model, max(o.tokens) + 64)
        tokens = llm.tokenize(text)
        for length in o.tokens:
            passages = [tokens[i * length : (i + 1) * length] for i in range(o.n)]
            right = [read(exact, x, "off", o.off)[1] for x in passages]
            errors = np.array(
                [
                    [
                        np.sum((read(llm, x, side, o.off)[1] - y) ** 2) / np.sum(y**2)
                        for side in SIDES
                    ]
                    for x, y in zip(passages, right, strict=True)
                ]
            )
            n_nearer = int((errors[:, 1] < errors[:, 0]).sum())
            table.add(length, *map(float, np.median(errors, axis=0)), [n_nearer, o.n])


@experiment(
    click.argument("what", type=click.Choice(["speed", "precision"])),
    MODEL,
    option("-f --file", required=True, help="A text."),
    option("-n n", type=COUNT, default=3, help="Rounds, or passages."),
    option("--tokens", default="2000", callback=many(int), help="Lengths of the prompts."),
    option("--off", default="EDGEKV_PRODUCTS=0", help="The variable of the first side."),
)
def command(o: Options) -> None:
    {"speed": speed, "precision": precision}[o.what](o, Path(o.file).read_bytes())
