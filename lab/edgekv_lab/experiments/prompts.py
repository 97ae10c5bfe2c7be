"""Prompts and models to read: of generated text, or of random tokens and weights."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from edgekv_lab.bench import synthetic
from edgekv_lab.eval.sentences import sentences
from edgekv_lab.experiments.checkout import side
from edgekv_lab.experiments.experiment import say
from edgekv_lab.sides.reading import Measurement


def measured(what: Measurement) -> dict[str, Any]:
    """One measurement, with the libraries of its side."""
    found: dict[str, Any] = side("reading:measured", asdict(what), what.side == "stock")
    return found


def type_id(name: str) -> int:
    """ggml's number of a cache type."""
    return int(GGMLQuantizationType[name.upper()])


def text_tokens(model: str, n_tokens: int) -> list[int]:
    """n_tokens tokens of generated text from the model's own tokenizer."""
    text = " ".join(islice(sentences(Random(0)), n_tokens // 8))  # a sentence has about 20 tokens
    request = {"model": model, "text": text}
    found: list[int] = side("reading:tokens", request, is_stock=True)
    return found[:n_tokens]


def llama_1b(folder: Path, n_tokens: int) -> tuple[synthetic.Shape, str, list[int]]:
    """Llama-3.2-1B's shape, a file of it with random weights, and a prompt of random tokens."""
    shape, path = synthetic.SHAPES["llama-1b"], folder / "synthetic-1b.gguf"
    say("writing the synthetic model")
    synthetic.write(path, shape)
    tokens = np.random.default_rng(0).integers(300, shape.n_vocab, n_tokens).tolist()
    return shape, str(path), tokens


def saved(folder: Path, tokens: list[int]) -> str:
    """The file that measurements read tokens from."""
    file = folder / "tokens.json"
    file.write_text(json.dumps(tokens))
    return str(file)
