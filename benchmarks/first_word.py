"""Seconds until the first word, words a second, and memory: edgekv beside the unpatched library and
OpenVINO GenAI, which reads the same GGUF.

    python benchmarks/first_word.py -m MODEL.gguf -f TEXT.txt [--tokens 2000,4000] [--ratio 0.2]
                                    [--method auto] [--n-gen 32] [--threads 2] [--rounds 3]
                                    [--openvino PYTHON]

Each prompt is the beginning of the text, in a process of its own that has loaded the model. A round
has every side once; the sides take turns in it, backwards in every second round. First word: from
the prompt's tokens to the first token. Process: the largest resident size, weights and all, from
the start. PYTHON: of an environment that has openvino-genai; without it this side is left out.
For `auto` a profile is made before, if there is none. Medians; x: of the
quotients to the unpatched library's of the same round. Markdown goes to standard output, progress
to standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]
sys.path.append(str(HERE.parent))

STOCK, OURS, OPENVINO = "unpatched, f16", "edgekv", "OpenVINO GenAI"


def main() -> None:
    options = parse()
    if options.child:
        print(json.dumps(CHILDREN[options.child](json.load(sys.stdin))))
        return
    from process import heading

    import edgekv

    print(heading("first_word.py"))
    print(
        "| tokens | side | first word, s | x | tokens/s | process, MiB |\n"
        "| ---: | --- | ---: | ---: | ---: | ---: |",
        flush=True,
    )
    if not edgekv.has_profile(options.model):
        edgekv.make_profile(options.model)
    sides = [STOCK, OURS, *[OPENVINO] * bool(options.openvino)]
    for n in map(int, options.tokens.split(",")):
        rounds = []
        for i in range(options.rounds):
            order = sides[:: -1 if i % 2 else 1]
            rounds.append({side: measured(options, side, n) for side in order})
        for side in sides:
            got = [found[side] for found in rounds]
            cells = [
                f"{median(x['first'] for x in got):.2f}",
                f"{median(r[STOCK]['first'] / r[side]['first'] for r in rounds):.2f}",
                f"{median(x['speed'] for x in got):.1f}",
                f"{max(x['process'] for x in got) / 2**20:,.0f}",
            ]
            print(f"| {n:,} | {side} | {' | '.join(cells)} |", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model")
    parser.add_argument("-f", "--file")
    parser.add_argument("--tokens", default="2000,4000")
    parser.add_argument("--ratio", type=float, default=0.2)
    parser.add_argument("--method", default="auto")
    parser.add_argument("--n-gen", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--openvino", metavar="PYTHON")
    parser.add_argument("--child", choices=list(CHILDREN))
    return parser.parse_args()


def measured(options: argparse.Namespace, side: str, n: int) -> dict[str, float]:
    from process import stock_environment

    request = {
        "model": options.model,
        "text": Path(options.file).read_text(encoding="utf-8")[: 12 * n],
        "n": n,
        "n_gen": options.n_gen,
        "threads": options.threads,
        "ratio": options.ratio if side == OURS else None,
        "method": options.method,
    }
    done = subprocess.run(
        [
            options.openvino if side == OPENVINO else sys.executable,
            __file__,
            "--child",
            "openvino" if side == OPENVINO else "llama",
        ],
        input=json.dumps(request),
        text=True,
        stdout=subprocess.PIPE,
        env=stock_environment() if side == STOCK else dict(os.environ),
        check=True,
    )
    got = json.loads(done.stdout.splitlines()[-1])
    print(n, side, got, file=sys.stderr, flush=True)
    return got


def with_llama(request: dict[str, Any]) -> dict[str, float]:
    more: dict[str, Any] = {}
    if request["ratio"] is None:
        from edgekv.llama_cpp import Llama
    else:
        from edgekv import Llama  # type: ignore[assignment]

        more = {"kv_ratio": request["ratio"], "kv_method": request["method"]}
    llm = Llama(
        request["model"],
        n_ctx=request["n"] + request["n_gen"] + 8,
        n_threads=request["threads"],
        n_threads_batch=request["threads"],
        flash_attn=True,
        verbose=False,
        **more,
    )
    tokens = llm.tokenize(request["text"].encode(), add_bos=False)[: request["n"]]
    assert len(tokens) == request["n"], "the text is too short"
    begin, times = time.perf_counter(), []
    for _ in llm.generate(tokens, temp=0.0):
        times.append(time.perf_counter() - begin)
        if len(times) == request["n_gen"]:
            break
    return found(times[0], (len(times) - 1) / (times[-1] - times[0]))


def with_openvino(request: dict[str, Any]) -> dict[str, float]:
    import numpy as np
    import openvino
    import openvino_genai

    pipe = openvino_genai.LLMPipeline(
        request["model"], "CPU", INFERENCE_NUM_THREADS=request["threads"]
    )
    encode, text = pipe.get_tokenizer().encode, request["text"]
    pieces = [text[i : i + 8000] for i in range(0, len(text), 8000)]  # it cuts long texts off
    ids = np.concatenate(
        [encode(piece, add_special_tokens=False).input_ids.data for piece in pieces], axis=1
    )[:, : request["n"]].copy()
    assert ids.shape[1] == request["n"], "the text is too short"
    config = openvino_genai.GenerationConfig(
        max_new_tokens=request["n_gen"], do_sample=False, ignore_eos=True
    )
    tokens = openvino_genai.TokenizedInputs(
        openvino.Tensor(ids), openvino.Tensor((ids * 0 + 1).astype("int64"))
    )
    metrics = pipe.generate(tokens, config).perf_metrics
    return found(metrics.get_ttft().mean / 1e3, 1e3 / metrics.get_tpot().mean)


def found(first: float, speed: float) -> dict[str, float]:
    status = Path("/proc/self/status").read_text()
    peak = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
    return {"first": first, "speed": speed, "process": int(peak) * 1024}


CHILDREN = {"llama": with_llama, "openvino": with_openvino}

if __name__ == "__main__":
    main()
