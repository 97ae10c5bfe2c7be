"""LoRA adapters: small files that change what a model's weights do, several at once if need be.

The bindings take one, and read the whole model into memory for it. Here the model's file stays
mapped, and a context that takes the place of another one gets the same adapters.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from edgekv.errors import BadInput
from edgekv.library import logged_error
from edgekv.model.header import DAMAGE, Header, Tensor, files_of, header_of, opened

KINDS = (
    *("F32", "F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"),
    *("Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K"),
)
"""What an adapter may be stored as; llama.cpp computes nothing with other numbers, and crashes."""
PARTS = (".lora_a", ".lora_b")
_WORDS = {"general.type": "adapter", "adapter.type": "lora"}
_TAUGHT = "adapter.alora.invocation_tokens"


class Adapter(NamedTuple):
    """A file, and by how much of it weights change."""

    path: str
    scale: float = 1.0


def chosen(paths: Any, scales: Any) -> list[Adapter]:
    """What `Llama`'s lora_path and lora_scale mean: one of each or several; one scale is for all.

    Raises BadInput for another number of scales, or for one that is no number.
    """
    if not paths:
        return []
    files = [os.fspath(x) for x in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]
    factors = list(scales) if isinstance(scales, Sequence) else [scales] * len(files)
    if len(factors) != len(files):
        raise BadInput(f"lora_scale has {len(factors)} numbers for {len(files)} adapters")
    for factor in factors:
        if not isinstance(factor, (int, float)) or not math.isfinite(factor):
            raise BadInput(f"lora_scale {factor} is no number; give one such as 0.5")
    return [Adapter(*pair) for pair in zip(files, map(float, factors), strict=True)]


def check(path: str, model: str | None = None) -> None:
    """Raises BadInput if a file is no LoRA adapter that can be used, or not one of `model`."""
    try:
        with opened(path) as data:
            header = Header(data)
    except OSError as error:
        why = error.strerror or "it is no regular file"
        raise BadInput(f"the LoRA {path} cannot be read ({why}); name a .gguf file") from None
    except DAMAGE:
        raise BadInput(
            f"the LoRA {path} is damaged or no GGUF file; llama.cpp's convert_lora_to_gguf.py makes"
            " one"
        ) from None
    if any(header.meta.get(name) != word for name, word in _WORDS.items()):
        raise BadInput(f"{path} is no LoRA adapter; give the model itself with -m")
    if _TAUGHT in header.meta:
        raise BadInput(f"the LoRA {path} begins at certain words (aLoRA): it cannot be used here")
    arch, alpha = header.meta.get("general.architecture"), header.meta.get("adapter.lora.alpha")
    if not isinstance(arch, str) or not isinstance(alpha, (float, type(None))):
        raise BadInput(f"the LoRA {path} is damaged: download it again")
    _check_tensors(path, header.tensors, _tensors(model) if model else {})


def _check_tensors(path: str, tensors: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
    """Raises BadInput for tensors that llama.cpp would take and then crash on."""
    from gguf import GGMLQuantizationType

    kinds = {GGMLQuantizationType[name] for name in KINDS}
    for name, tensor in tensors.items():
        if tensor.kind not in kinds:
            raise BadInput(f"the LoRA {path} stores {name} as a type that cannot be computed with")
        weight = weights.get(name.removesuffix(PARTS[0]).removesuffix(PARTS[1]))
        stacked = weight is not None and _stacked(tensor) != _stacked(weight)
        if min(tensor.dims, default=0) < 1 or stacked and name.endswith(PARTS):
            raise BadInput(f"the LoRA {path} is of another model: {name} has another shape")


def _stacked(tensor: Tensor) -> tuple[int, ...]:
    """How many matrices a tensor has, of experts for example."""
    return (*tensor.dims[2:], 1, 1)[:2]


def _tensors(model: str) -> dict[str, Tensor]:
    """A model's tensors; fewer if whoever loads it has to say what is wrong with it."""
    found: dict[str, Tensor] = {}
    for file in files_of(model):
        if header := header_of(file):
            found |= header.tensors
    return found


class Adapters:
    """The adapters of one loaded model."""

    def __init__(self, files: Sequence[Adapter]) -> None:
        self.files = list(files)
        self._loaded: list[Any] = []
        self._free: Callable[[Any], None] | None = None

    def load(self, model: Any) -> None:
        """Read the files for a llama_model. Raises BadInput for one that is not for this model."""
        from edgekv.native import llama_cpp

        self._free = llama_cpp.llama_adapter_lora_free  # nothing is imported when Python ends
        for file in self.files:
            logged_error()  # an older one explains nothing
            loaded = llama_cpp.llama_adapter_lora_init(model, os.fsencode(file.path))
            if not loaded:
                why = logged_error() or "it does not fit the model"
                raise BadInput(f"the LoRA {file.path} cannot be used: {why}")
            self._loaded.append(loaded)

    def attach(self, ctx: Any) -> None:
        """Let a llama_context compute with them."""
        from edgekv.native import llama_cpp

        n = len(self._loaded)
        if n:
            pointers = (llama_cpp.llama_adapter_lora_p_ctypes * n)(*self._loaded)
            scales = (ctypes.c_float * n)(*(file.scale for file in self.files))
            llama_cpp.llama_set_adapters_lora(ctx, pointers, n, scales)

    def close(self) -> None:
        """Give their memory back; no context computes any more."""
        while self._loaded and self._free:
            self._free(self._loaded.pop())
