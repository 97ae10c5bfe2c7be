"""The first word behind a prompt, by llama.cpp or by OpenVINO GenAI.

The latter runs this file in an environment of its own, which has no edgekv.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def with_llama(request: dict[str, Any]) -> dict[str, float]:
    """Seconds until the `first` token behind n tokens of `text`, tokens a second of n_gen, bytes of
    the process. cache: as of `load.llama`."""
    from edgekv_lab.sides.load import llama

    n, n_gen = request["n"], request["n_gen"]
    llm = llama(request["model"], n + n_gen + 8, request["threads"], request["cache"])
    tokens = llm.tokenize(request["text"].encode(), add_bos=False)[:n]
    assert len(tokens) == n, "the text is too short"
    begin, times = time.perf_counter(), []
    for _ in llm.generate(tokens, temp=0.0):
        times.append(time.perf_counter() - begin)
        if len(times) == n_gen:
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


if __name__ == "__main__":
    print(json.dumps(with_openvino(json.load(sys.stdin))))
