"""Memory of models with recurrent layers or sliding windows, with random weights.

    python benchmarks/hybrids.py [--shapes qwen3.5-0.8b] [--methods auto] [--tokens 8000]
                                 [--threads 2]

A fresh process reads a short prompt, so that weights and compute buffers are in memory, forgets it,
and reads a long one: with the full cache, and at a ratio of 0.2. Its largest resident size (VmHWM,
set back before) over what it had before the long prompt stands beside `kv_stats().n_bytes_peak` and
the full f16 cache. Process: the largest resident size itself, weights and all.
Markdown goes to standard output, progress to standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(Path(__file__).resolve().parent)]
sys.path.append(str(ROOT))

from process import heading, python  # noqa: E402

from edgekv_lab.bench import synthetic  # noqa: E402

MIB = 2**20
RATIO, N_WARM_UP = 0.2, 700
FULL = "full"
METHODS = f"{FULL},snapkv,auto"
"""snapkv stores f16, auto q8_0. The full cache is llama.cpp's with as little memory as it can:
flash attention, and of sliding windows what they need."""


def main() -> None:
    options = parse()
    if options.child:
        print(json.dumps(memory(json.load(sys.stdin))))
        return
    print(heading("hybrids.py"))
    print_memory(options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="qwen3.5-0.8b,gemma4-1b,lfm2-moe-1b,deepseek2-1b")
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--child", action="store_true")
    return parser.parse_args()


@contextmanager
def models(options: argparse.Namespace) -> Iterator[Iterator[tuple[str, str]]]:
    """(shape, file), written one after the other, in a folder that is the home of profiles too."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        yield (written(text, Path(folder) / "model.gguf") for text in options.shapes.split(","))


def written(text: str, path: Path) -> tuple[str, str]:
    shape, kind = synthetic.parse(text)
    synthetic.write(path, shape, kind)
    return f"{text.partition(':')[0]}, {kind}", str(path)


def child(**request: Any) -> dict[str, Any]:
    print(json.dumps(request), file=sys.stderr, flush=True)
    return json.loads(python([__file__, "--child"], json.dumps(request), dict(os.environ)))


def load(request: dict[str, Any], **options: Any) -> Any:
    """The model, its weights in memory of the process."""
    from edgekv import Llama

    return Llama(
        request["model"],
        n_ctx=request["tokens"] + 256,
        n_threads=request["threads"],
        n_threads_batch=request["threads"],
        use_mmap=False,
        verbose=False,
        **options,
    )


def tokens(llm: Any, n: int, seed: int) -> list[int]:
    import numpy as np

    return np.random.default_rng(seed).integers(259, llm.n_vocab(), n).tolist()


def print_memory(options: argparse.Namespace) -> None:
    print(
        "| model | method | type | full f16 cache | kept | reported peak | measured peak |"
        " process | recurrent state |\n| --- | --- | --- |" + 6 * " ---: |",
        flush=True,
    )
    with models(options) as files:
        for name, path in files:
            if "auto" in options.methods:
                child(model=path, prepare=True)
            for method in options.methods.split(","):
                more = {"tokens": options.tokens, "threads": options.threads}
                got = child(model=path, method=method, **more)
                heads = ("kept", "reported", "measured", "process", "recurrent")
                cells = [mib(got[x]) for x in heads]
                print(
                    f"| {name} | {got['method']} | {got['type']} | {mib(got['full'])} |"
                    f" {' | '.join(cells)} |",
                    flush=True,
                )


def memory(request: dict[str, Any]) -> dict[str, Any]:
    """Bytes of reading one prompt, in this process."""
    import edgekv
    from edgekv import native
    from edgekv.base.machine import rss_now, rss_peak

    if request.get("prepare"):
        edgekv.make_profile(request["model"])
        return {}
    method = request["method"]
    plain = {"kv_ratio": 1.0, "flash_attn": True, "swa_full": False}
    llm = load(request, **plain if method == FULL else {"kv_ratio": RATIO, "kv_method": method})
    llm.eval(tokens(llm, N_WARM_UP, 1))
    llm.reset()
    native.trim_heap()
    prompt = tokens(llm, request["tokens"], 2)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = rss_now()
    llm.eval(prompt)
    stats, peak = llm.kv_stats(), rss_peak() or 0
    return {
        "method": FULL if method == FULL else stats.method,
        "type": stats.type_k,
        "full": stats.n_bytes_full,
        "kept": stats.n_bytes,
        "reported": stats.n_bytes_peak,
        "measured": peak - before,
        "process": peak,
        "recurrent": stats.n_bytes_recurrent,
    }


def mib(n: int) -> str:
    return f"{n / MIB:.1f}"


if __name__ == "__main__":
    main()
