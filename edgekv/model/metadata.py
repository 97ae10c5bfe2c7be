"""Metadata of a model: what a loaded one says, and what the user overrides (llama.cpp's
--override-kv, `Llama`'s kv_overrides).

llama.cpp ends the process over numbers that no model has, and passes over an override of another
type than the file's without a word; both are refused here.
"""

from __future__ import annotations

import csv
import ctypes
import math
from collections.abc import Mapping
from typing import Any

from edgekv.errors import BadInput
from edgekv.model.header import header_of
from edgekv.native import llama_cpp

Value = bool | int | float | str
_KINDS: dict[str, type] = {"bool": bool, "int": int, "float": float, "str": str}
_BOOLS = {"true": True, "false": False}
_EXAMPLE = "write for example tokenizer.ggml.add_bos_token=bool:false (bool, int, float or str)"
_BYTES_MAX = 127
"""Bytes of a key, and of a text."""
_INT_MAX = 2**31 - 1
_LAYERS_MAX, _EXPERTS_MAX = 512, 1024
"""llama.cpp's own limits."""
_SCALINGS = ("none", "linear", "yarn", "longrope")


def of_model(model: Any) -> dict[str, str]:
    """The metadata of a model that is loaded, as text; bytes that are no UTF-8 are replaced."""
    return {
        _text(llama_cpp.llama_model_meta_key_by_index, model, i): _text(
            llama_cpp.llama_model_meta_val_str_by_index, model, i
        )
        for i in range(llama_cpp.llama_model_meta_count(model))
    }


def _text(function: Any, model: Any, i: int) -> str:
    size = 1024
    while True:
        buffer = ctypes.create_string_buffer(size)
        n_bytes = function(model, i, buffer, size)
        if n_bytes < size:
            return buffer.value.decode("utf-8", "replace")
        size = n_bytes + 1


def parse(text: str, name: str) -> list[tuple[str, Value]]:
    """Keys and values of KEY=TYPE:VALUE,... as llama.cpp writes it. name: the option's, in
    messages.

    Raises BadInput for anything else.
    """
    found = []
    for part in next(csv.reader([text]), []) or [text]:
        key, _, typed = part.partition("=")
        kind, colon, value = typed.partition(":")
        if not key or kind not in _KINDS or not colon:
            raise BadInput(f"{name}: '{part}' is no KEY=TYPE:VALUE; {_EXAMPLE}")
        try:
            found.append((key, _BOOLS[value] if kind == "bool" else _KINDS[kind](value)))
        except (KeyError, ValueError):
            raise BadInput(f"{name}: '{value}' is no {kind} for {key}; {_EXAMPLE}") from None
    return found


def check(overrides: Mapping[str, Value] | None, path: str) -> dict[str, Value]:
    """Return `overrides` for the model file `path`.

    Raises BadInput for keys and values that llama.cpp cannot be given, for one of another type than
    in the file, and for numbers that no model has.
    """
    given = {key: _checked(key, value) for key, value in (overrides or {}).items()}
    header = header_of(path) if given else None
    if header is None:
        return given
    for key, value in given.items():
        there = header.meta.get(key)
        kind = next((name for name, kind in _KINDS.items() if type(there) is kind), "")
        if kind and type(value) is not _KINDS[kind]:
            raise BadInput(f"the override of {key} is no {kind}, as in the model: write {kind}:...")
    _Shape(header.meta, given).check()
    return given


def n_ctx_train(overrides: Mapping[str, Value] | None) -> int:
    """The context that a model was trained with if it is overridden, else 0."""
    found = (n for key, n in (overrides or {}).items() if key.endswith(".context_length"))
    return int(next(found, 0))


def _checked(key: Any, value: Any) -> Value:
    """The value in Python's type. Raises BadInput for none of llama_model_kv_override's."""
    if not isinstance(key, str) or not 0 < len(key.encode(errors="replace")) <= _BYTES_MAX:
        raise BadInput(f"an override needs a key of 1 to {_BYTES_MAX} bytes, not '{key}'")
    kind = next((kind for kind in _KINDS.values() if isinstance(value, kind)), None)
    if kind is None:
        raise BadInput(f"the override of {key} is no bool, int, float or str: {value!r}")
    if isinstance(value, str) and len(value.encode(errors="replace")) > _BYTES_MAX:
        raise BadInput(f"the override of {key} is too long; give at most {_BYTES_MAX} bytes")
    if isinstance(value, float) and not math.isfinite(value):
        raise BadInput(f"the override of {key} is no number that can be used: {value}")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise BadInput(f"the override of {key} is too large; an int has 64 bits")
    plain: Value = kind(value)
    return plain


class _Shape:
    """A model's numbers with some of them overridden: those that llama.cpp asserts."""

    def __init__(self, meta: Mapping[str, Any], given: Mapping[str, Value]) -> None:
        self.arch = {**meta, **given}.get("general.architecture", "")
        self._values = _of(self.arch, {**meta, **given})
        self.given = _of(self.arch, given)

    def check(self) -> None:
        """Raises BadInput for what no model has."""
        for name, value in self.given.items():
            if type(value) is int:
                self._within(name, value, 0, _INT_MAX)
            if name.endswith("epsilon") and isinstance(value, float):
                self._within(name, value, 0, 1)
            if name == "rope.scaling.type" and value not in _SCALINGS:
                raise BadInput(
                    f"the override of {self.arch}.{name} cannot be '{value}'; choose one of:"
                    f" {', '.join(_SCALINGS)}"
                )
        limits = self._limits()
        if limits.keys() & self.given.keys():
            for name, (low, high) in limits.items():
                self._within(name, self._number(name), low, high)
        if "rope.dimension_count" in self.given:
            n = self._number("rope.dimension_count")
            self._within("rope.dimension_count", n, 2, self._number("attention.key_length", 2**12))
            if n % 2:
                raise BadInput(
                    f"the override of {self.arch}.rope.dimension_count is {n}; give an even number"
                )

    def _limits(self) -> dict[str, tuple[int, int]]:
        """name -> the least and the most that it may be, as the others are."""
        n_expert, n_groups = self._number("expert_count"), self._number("expert_group_count")
        divides = n_groups < 2 or n_expert % n_groups == 0
        return {
            "block_count": (1, _LAYERS_MAX),
            "nextn_predict_layers": (0, self._number("block_count")),
            "expert_count": (0, _EXPERTS_MAX),
            "expert_used_count": (min(n_expert, 1), n_expert),
            "expert_group_count": (0, max(n_expert - 1, 0) if divides else 1),
            "expert_group_used_count": (1, n_groups - 1) if n_groups > 1 else (0, _INT_MAX),
        }

    def _number(self, name: str, default: int = 0) -> int:
        """A number of the model; the default where there is none, or one for each layer."""
        value = self._values.get(name)
        return value if type(value) is int else default

    def _within(self, name: str, value: float, low: float, high: float) -> None:
        if not low <= value <= high:
            raise BadInput(
                f"the overrides make {self.arch}.{name} {value}, and it has to be {low} to {high:,}"
            )


def _of(arch: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of an architecture, by their names in it."""
    start = f"{arch}."
    return {k[len(start) :]: v for k, v in values.items() if k.startswith(start)}
