"""Tiny random models of upstream's test-llama-archs, and the table of docs/models.md that says how
each architecture is read.

python -m tests.archs      writes the table anew
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from edgekv.errors import BadInput
from tests.build import run
from tests.engine import load
from tests.lib import ROOT
from tests.test_native import program

PAGE = ROOT / "docs" / "models.md"
HEAD = "| compressed | layers | architectures, with models people know |\n|---|---|---|\n"
FAMILIES = {
    "llama": "Llama 1 to 3, Mistral, SmolLM2, Yi",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen3": "Qwen3",
    "qwen3moe": "Qwen3 30B-A3B, Qwen3-Coder",
    "qwen35": "Qwen3.5, Qwen3.6",
    "qwen35moe": "Qwen3.5 and Qwen3.6 35B-A3B",
    "qwen3next": "Qwen3-Next, Qwen3-Coder-Next",
    "qwen2vl": "Qwen2-VL, Qwen2.5-VL (text)",
    "qwen3vl": "Qwen3-VL (text)",
    "gemma": "Gemma",
    "gemma2": "Gemma 2",
    "gemma3": "Gemma 3",
    "gpt-oss": "gpt-oss",
    "phi3": "Phi-3, Phi-4-mini",
    "lfm2": "LFM2",
    "lfm2moe": "LFM2-8B-A1B",
    "falcon-h1": "Falcon-H1",
    "granitehybrid": "Granite 4 H",
    "granite": "Granite 3, Granite 4",
    "nemotron_h": "Nemotron-H, Nemotron Nano 2",
    "nemotron_h_moe": "Nemotron 3 Nano",
    "jamba": "Jamba",
    "plamo2": "PLaMo 2",
    "minimax-01": "MiniMax-01",
    "minimax-m2": "MiniMax-M2",
    "minimax-m3": "MiniMax-M3",
    "deepseek2": "DeepSeek-V2, V3, R1, GLM-4.7-Flash, Kimi K2",
    "deepseek32": "DeepSeek-V3.2",
    "deepseek4": "DeepSeek-V4",
    "mistral3": "Ministral 3",
    "llama4": "Llama 4",
    "glm4": "GLM-4",
    "glm4moe": "GLM-4.5, 4.6",
    "kimi-linear": "Kimi Linear",
    "kimi-k3": "Kimi K3",
    "mistral4": "Mistral 4",
    "smollm3": "SmolLM3",
    "command-r": "Command R",
    "cohere2": "Command R7B, Command A",
    "olmo2": "OLMo 2",
    "exaone4": "EXAONE 4",
    "hunyuan-dense": "Hunyuan 0.5B to 7B",
    "ernie4_5": "ERNIE 4.5",
    "ernie4_5-moe": "ERNIE 4.5 21B-A3B",
    "grok": "Grok",
    "mamba": "Mamba",
    "mamba2": "Mamba 2",
    "step35": "Step 3.5",
    "seed_oss": "Seed-OSS",
    "dream": "Dream (diffusion)",
    "llada": "LLaDA (diffusion)",
    "stablelm": "StableLM",
    "starcoder2": "StarCoder 2",
    "phi2": "Phi-2",
    "gpt2": "GPT-2",
    "mpt": "MPT",
    "bloom": "BLOOM",
}


def write(folder: Path, *names: str) -> Path:
    """Write the models of some architectures, or of all, into `folder` and return it. Their weights
    are the same in every run: behind the prompt MPT's ALiBi goes through llama.cpp's flash
    attention, whose f16 sums lie beyond the tests' limit with some seeds.
    """
    for chosen in [["-a", name] for name in names] or [[]]:
        run(program("test-llama-archs"), *chosen, "-s", "1", "-o", folder, timeout=900)
    return folder


def rows(folder: Path) -> list[str]:
    """The table's lines: of two models of one architecture, the last is taken."""
    paths = sorted(folder.glob("*.gguf"))
    return lines({path.stem.rpartition("-")[0]: described(path) for path in paths})


def lines(found: dict[str, tuple[str, str]]) -> list[str]:
    """A line for all architectures that `described` says the same of, the most of them first."""
    alike: dict[tuple[str, str], list[str]] = {}
    for arch in sorted(found):
        known = f"{arch} ({FAMILIES[arch]})" if arch in FAMILIES else arch
        alike.setdefault(found[arch], []).append(known)
    order = sorted(alike.items(), key=lambda kind: (-len(kind[1]), kind[0]))
    return [f"| {how} | {layers} | {', '.join(names)} |" for (layers, how), names in order]


def described(path: Path) -> tuple[str, str]:
    """What layers a model has, and how edgekv reads it."""
    try:
        llm = load(path, kv_ratio=0.2, n_ctx=256, n_ubatch=64, n_batch=64)
    except BadInput as error:
        why = re.sub(r"^\S+\.gguf:? (\(\S+\) )?", "", str(error)).split(":")[0]
        return "", f"no: {why}"
    if llm.engine is None:
        why = llm._kv_note.partition(": ")[2]
        llm.close()
        return "", f"no: {why}"
    info, layers = llm.engine.store.memory(), llm.engine.store.layers
    kinds = [
        name
        for name, is_there in (
            ("attention", any(x.selects for x in layers)),
            ("windows", any(x.n_swa for x in layers)),
            ("recurrent", info.bytes_recurrent > 0),
        )
        if is_there
    ]
    llm.eval([7] * 65)
    how = "layer by layer" if llm.engine.by_layer else "read in full, then compressed"
    llm.close()
    return ", ".join(kinds), how


def updated(text: str, new: list[str]) -> str:
    """`text` of the page with new lines of the table in the place of the old ones."""
    begin = text.index(HEAD) + len(HEAD)
    end = text.find("\n\n", begin)
    return text[:begin] + "\n".join(new) + (text[end:] if end >= 0 else "\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        new = updated(PAGE.read_text(encoding="utf-8"), rows(write(Path(folder))))
    PAGE.write_text(new, encoding="utf-8")
