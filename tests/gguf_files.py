"""GGUF files that lie beside models and are none: a header, and tensors of a few numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests import models


def write(path: Path, arch: str, tensors: tuple[str, ...] = (), **meta: Any) -> Path:
    """Write a file with these metadata; `__` in a name stands for a dot."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(str(path), arch)
    for name, value in meta.items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        add(name.replace("__", "."), value)
    if not tensors:
        models.add_tokenizer(writer)
    for name in tensors:
        writer.add_tensor(name, np.ones(4, np.float32))
    models.finish(writer)
    return path


def others(folder: Path) -> dict[str, Path]:
    """One file of each kind, by what a refusal of it says."""
    one = ("a",)
    return {
        "mmproj": write(folder / "mmproj.gguf", "clip", one, general__type="mmproj"),
        "--lora": write(folder / "lora.gguf", "llama", one, general__type="adapter"),
        "importance": write(folder / "imatrix.gguf", "imatrix", one),
        "--kv-profile": write(folder / "profile.gguf", "kvbudget", one, general__type="kvbudget"),
        "vocabulary": write(folder / "vocab.gguf", "llama"),
    }
