"""Memory and second turns of models with recurrent layers or sliding windows, with random weights.

    python benchmarks/hybrids.py memory [--shapes qwen3.5-0.8b] [--tokens 8000] [--threads 2]
    python benchmarks/hybrids.py turns [--shapes qwen3.5-0.8b] [--tokens 4000] [--rounds 3]

memory: a fresh process reads a short prompt, so that weights and compute buffers are in memory,
forgets it, and reads a long one at a ratio of 0.2. Its largest resident size (VmHWM, set back
before) over what it had before the long prompt stands beside `kv_stats().n_bytes_peak` and the
full f16 cache. turns: the seconds of reading a later turn of 30 tokens, the least of the rounds.
Markdown goes to standard output, progress to standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(Path(__file__).resolve().parent)]
sys.path.append(str(ROOT))

from process import heading, python  # noqa: E402

from edgekv.bench import synthetic  # noqa: E402

MIB = 2**20
RATIO, N_WARM_UP, N_ANSWER, N_TURN = 0.2, 700, 16, 30
MEMORY = ("snapkv", "auto")
"""snapkv stores f16, auto q8_0."""


def main() -> None:
    options = parse()
    if options.child:
        print(json.dumps(CHILDREN[options.what](json.load(sys.stdin))))
        return
    print(heading("hybrids.py"))
    {"memory": print_memory, "turns": print_turns}[options.what](options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["memory", "turns"])
    parser.add_argument("--shapes", default="qwen3.5-0.8b,gemma4-1b,lfm2-moe-1b,deepseek2-1b")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=3)
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


def child(what: str, **request: Any) -> dict[str, Any]:
    print(json.dumps(request), file=sys.stderr, flush=True)
    return json.loads(python([__file__, what, "--child"], json.dumps(request), dict(os.environ)))


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


# ---- memory


def print_memory(options: argparse.Namespace) -> None:
    print(
        "| model | method | type | full f16 cache | kept | reported peak | measured peak |"
        " recurrent state |\n| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |",
        flush=True,
    )
    with models(options) as files:
        for name, path in files:
            for method in MEMORY:
                got = child(
                    "memory",
                    model=path,
                    method=method,
                    tokens=options.tokens,
                    threads=options.threads,
                )
                cells = [mib(got[x]) for x in ("kept", "reported", "measured", "recurrent")]
                print(
                    f"| {name} | {got['method']} | {got['type']} | {mib(got['full'])} |"
                    f" {' | '.join(cells)} |",
                    flush=True,
                )


def memory(request: dict[str, Any]) -> dict[str, Any]:
    """Bytes of reading one prompt, in this process."""
    import edgekv
    from edgekv import native
    from edgekv.memory.machine import rss_now, rss_peak

    if request["method"] == "auto" and not edgekv.has_profile(request["model"]):
        edgekv.make_profile(request["model"])
    llm = load(request, kv_ratio=RATIO, kv_method=request["method"])
    llm.eval(tokens(llm, N_WARM_UP, 1))
    llm.reset()
    native.trim_heap()
    prompt = tokens(llm, request["tokens"], 2)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = rss_now()
    llm.eval(prompt)
    stats = llm.kv_stats()
    return {
        "method": stats.method,
        "type": stats.type_k,
        "full": stats.n_bytes_full,
        "kept": stats.n_bytes,
        "reported": stats.n_bytes_peak,
        "measured": (rss_peak() or 0) - before,
        "recurrent": stats.n_bytes_recurrent,
    }


# ---- second turns


def print_turns(options: argparse.Namespace) -> None:
    print("| model | cache | first turn | goes on | answer replaced |")
    print("| --- | --- | ---: | ---: | ---: |", flush=True)
    with models(options) as files:
        for name, path in files:
            for ratio in (1.0, RATIO):
                got = child(
                    "turns",
                    model=path,
                    ratio=ratio,
                    tokens=options.tokens,
                    threads=options.threads,
                    rounds=options.rounds,
                )
                cells = " | ".join(f"{min(times):.2f}" for times in got.values())
                print(f"| {name} | {'full' if ratio == 1 else ratio} | {cells} |", flush=True)


def turns(request: dict[str, Any]) -> dict[str, list[float]]:
    """Seconds until the first token of a first turn, and of later turns whose text goes on, or has
    another answer in it, as where a template leaves thoughts out.
    """
    llm = load(request, kv_ratio=request["ratio"], kv_method="snapkv")
    seconds, answer = until_first_token(llm, said := tokens(llm, request["tokens"], 1))
    found: dict[str, list[float]] = {"first": [seconds], "on": [], "answer": []}
    for kind, n_said in (("on", N_ANSWER), ("answer", N_ANSWER // 2)):
        for seed in range(request["rounds"]):  # each behind the one before
            said = [*said, *answer[:n_said], *tokens(llm, N_TURN, 10 + seed)]
            seconds, answer = until_first_token(llm, said)
            found[kind].append(seconds)
    return found


def until_first_token(llm: Any, prompt: list[int]) -> tuple[float, list[int]]:
    """Seconds, and the first tokens of the answer."""
    begin, answer, seconds = time.perf_counter(), [], 0.0
    for token in llm.generate(prompt, temp=0.0):
        seconds = seconds or time.perf_counter() - begin
        answer.append(token)
        if len(answer) == N_ANSWER:
            break
    return seconds, answer


def mib(n_bytes: int) -> str:
    return f"{n_bytes / MIB:,.1f}"


CHILDREN = {"memory": memory, "turns": turns}

if __name__ == "__main__":
    main()
