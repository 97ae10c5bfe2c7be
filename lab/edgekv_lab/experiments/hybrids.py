"""Memory of models with recurrent layers or sliding windows, with random weights.

A fresh process reads a short prompt, so that weights and compute buffers are in memory, forgets it,
and reads a long one: with the full cache, and at a ratio of 0.2. Its largest resident size (VmHWM,
set back before) over what it had before the long prompt stands beside `kv_stats().n_bytes_peak` and
the full f16 cache. Process: the largest resident size itself, weights and all.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from edgekv.commands.declare import option
from edgekv_lab.bench import synthetic
from edgekv_lab.experiments.checkout import side
from edgekv_lab.experiments.experiment import (
    THREADS,
    Options,
    experiment,
    many,
    say,
    sheet,
    tokens,
)
from edgekv_lab.sides.hybrids import FULL

MIB = 2**20
SHAPES = "qwen3.5-0.8b,gemma4-1b,lfm2-moe-1b,deepseek2-1b"
METHODS = f"{FULL},snapkv,auto"
"""snapkv stores f16, auto q8_0. The full cache is llama.cpp's with as little memory as it can:
flash attention, and of sliding windows what they need."""
COLUMNS = (("model", ""), ("method", ""), ("type", ""), ("full f16 cache, MiB", "{:.1f}"))
BYTES = {
    "kept": "kept, MiB",
    "reported": "reported peak, MiB",
    "measured": "measured peak, MiB",
    "process": "process, MiB",
    "recurrent": "recurrent state, MiB",
}


@experiment(
    option("--shapes", default=SHAPES, callback=many(str), help="As of `edgekv bench`."),
    option("--methods", default=METHODS, callback=many(str), help="Methods, and full."),
    tokens(8000, "the prompt"),
    THREADS,
)
def command(o: Options) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        sheet(*COLUMNS, *((x, "{:.1f}") for x in BYTES.values())) as table,
    ):
        os.environ["XDG_CACHE_HOME"] = folder  # of profiles, too
        path = Path(folder) / "model.gguf"
        for text in o.shapes:
            shape, kind = synthetic.parse(text)
            synthetic.write(path, shape, kind)
            name = f"{text.partition(':')[0]}, {kind}"
            if "auto" in o.methods:
                side("hybrids:profile", {"model": str(path)}, is_stock=False)
            for method in o.methods:
                got = measured(o, str(path), method)
                about = name, got["method"], got["type"], got["full"] / MIB
                table.add(*about, *(got[x] / MIB for x in BYTES))


def measured(o: Options, path: str, method: str) -> dict[str, Any]:
    request = {"model": path, "method": method, "tokens": o.tokens, "threads": o.threads}
    say(request)
    found: dict[str, Any] = side("hybrids:memory", request, is_stock=False)
    return found
