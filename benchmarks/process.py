"""What the benchmarks share: measurements in processes of their own, and the lines above a
table.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

from measure import Measurement  # noqa: E402

from tests.lib import stock_folder  # noqa: E402

if TYPE_CHECKING:
    from edgekv_lab.bench.synthetic import Shape

TYPES = {
    "f32": 0,
    "f16": 1,
    "bf16": 30,
    "q8_0": 8,
    "q5_1": 7,
    "q5_0": 6,
    "q4_1": 3,
    "q4_0": 2,
    "iq4_nl": 20,
}
"""ggml's numbers."""


def measured(what: Measurement) -> dict[str, Any]:
    """One measurement, with the libraries of its side."""
    environment = stock_environment() if what.side == "stock" else dict(os.environ)
    return json.loads(python([str(HERE / "measure.py")], json.dumps(asdict(what)), environment))


def stock_environment() -> dict[str, str]:
    return {**os.environ, "EDGEKV_LIB": str(stock_folder())}


def python(words: list[str], text: str, environment: dict[str, str]) -> str:
    """The last line that a Python process prints; its errors come through."""
    done = subprocess.run(
        [sys.executable, *words], input=text, text=True, env=environment, stdout=subprocess.PIPE
    )
    if done.returncode != 0:
        raise SystemExit(
            f"{Path(words[0]).name} failed with exit code {done.returncode}; what it was doing"
            " stands above"
        )
    return done.stdout.strip().splitlines()[-1]


def demo_path() -> Path:
    from edgekv.models.demo import demo_path as find

    return Path(find())


def text_tokens(model: str, n_tokens: int) -> list[int]:
    """n_tokens tokens of generated text from the model's own tokenizer, in a process of its own."""
    from edgekv_lab.eval.sentences import sentences

    text = " ".join(islice(sentences(Random(0)), n_tokens // 8))  # a sentence has about 20 tokens
    code = (
        "import sys; from edgekv.llama_cpp import Llama\nprint(Llama(sys.argv[1], vocab_only=True,"
        " verbose=False).tokenize(sys.stdin.buffer.read(), add_bos=False))"
    )
    return json.loads(python(["-c", code, model], text, stock_environment()))[:n_tokens]


def llama_1b(folder: Path, n_tokens: int) -> tuple[Shape, str, list[int]]:
    """Llama-3.2-1B's shape, a file of it with random weights, and a prompt of random tokens."""
    import numpy as np

    from edgekv_lab.bench import synthetic

    shape, path = synthetic.SHAPES["llama-1b"], folder / "synthetic-1b.gguf"
    print("writing the synthetic model", file=sys.stderr, flush=True)
    synthetic.write(path, shape)
    tokens = np.random.default_rng(0).integers(300, shape.n_vocab, n_tokens).tolist()
    return shape, str(path), tokens


def saved(folder: Path, tokens: list[int]) -> str:
    """The file that measurements read tokens from."""
    file = folder / "tokens.json"
    file.write_text(json.dumps(tokens))
    return str(file)


def heading(script: str) -> str:
    """Machine, commit and command line."""
    command = shlex.join(["python", f"benchmarks/{script}", *sys.argv[1:]])
    commit = _git("rev-parse", "--short", "HEAD") or os.environ.get("EDGEKV_COMMIT", "unknown")
    return (
        f"`{command}`, commit {commit}{' with changes' if _git('status', '--porcelain') else ''},"
        f" {machine()}\n"
    )


def _git(*words: str) -> str:
    try:
        return subprocess.run(
            ["git", *words], cwd=HERE.parent, capture_output=True, text=True
        ).stdout.strip()
    except OSError:  # no git here
        return ""


def machine() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    names = (
        [
            line.split(":")[1].strip()
            for line in cpuinfo.read_text().splitlines()
            if line.startswith("model name")
        ]
        if cpuinfo.exists()
        else []
    )
    return (
        f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()}"
        f" processors, {platform.system()}"
    )
