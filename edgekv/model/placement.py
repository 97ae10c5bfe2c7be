"""Where tensors of a model go: llama.cpp's --override-tensor, --cpu-moe and --n-cpu-moe.

A pattern is a regular expression that llama.cpp looks for in each tensor's name; the first one that
is found names the type of buffer that the tensor lies in. What was named by hand goes first.
"""

from __future__ import annotations

import ctypes
import os
import re
import warnings
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from edgekv.errors import BadInput
from edgekv.model import backends

CPU = "CPU"
"""ggml's name of the buffers in main memory."""
EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
"""llama.cpp's pattern of the experts' weights (common/common.h)."""
LAYERS_MAX = 1024
"""More than llama.cpp takes of any model; each layer is a pattern that every tensor is held
against."""

PATTERN_MAX = 1000
"""Characters of an expression: the C++ library's own stack ends at some 50,000."""


class Placement(NamedTuple):
    """Tensors whose name has `pattern` in it lie in buffers of the type `buffer`."""

    pattern: str
    buffer: str

    def matches(self, tensor: str) -> bool:
        """As llama.cpp finds it, but for the few expressions that Python reads in another way."""
        return _compiled(self.pattern).search(tensor) is not None


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of [[:alpha:]], which is llama.cpp's to understand
        return re.compile(pattern)


def placements(
    override_tensor: str | Sequence[str] | None = None, cpu_moe: bool = False, n_cpu_moe: int = 0
) -> list[Placement]:
    """What the arguments of these names mean, the first that matches counts.

    Raises BadInput for what is no REGEX=BUFFER, no expression, or no number of layers.
    """
    texts = [override_tensor] if isinstance(override_tensor, str) else override_tensor or ()
    found = [one for text in texts for one in parse(text, "override_tensor")]
    if not isinstance(n_cpu_moe, int) or not 0 <= n_cpu_moe <= LAYERS_MAX:
        raise BadInput(
            f"n_cpu_moe {n_cpu_moe} is no number of layers; give one from 0 to {LAYERS_MAX:,}"
        )
    found += [Placement(EXPERTS, CPU)] if cpu_moe else []
    return found + [Placement(rf"blk\.{il}{EXPERTS}", CPU) for il in range(n_cpu_moe)]


def parse(text: str, name: str) -> list[Placement]:
    """Placements from REGEX=BUFFER[,...]. name: the option's, in messages. Raises BadInput."""
    found = []
    for part in text.split(","):
        pattern, equals, buffer = part.partition("=")
        if not (pattern and equals and buffer):
            raise BadInput(
                f"{name}: '{part}' is no REGEX=BUFFER; write for example exps=CPU (there is no"
                " comma within an expression)"
            )
        if len(pattern) > PATTERN_MAX:
            raise BadInput(
                f"{name}: an expression of {len(pattern):,} characters is too long; give at most"
                f" {PATTERN_MAX:,}, and others behind a comma"
            )
        try:
            _compiled(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise BadInput(
                f"{name}: '{pattern}' is no regular expression ({error}); write for example"
                " exps=CPU, with \\ before a dot or a bracket that is meant as such"
            ) from None
        found.append(Placement(pattern, buffer))
    return found


def on_host(tensors: Sequence[str], placed: Sequence[Placement], unplaced: str) -> list[str]:
    """The tensors that lie in main memory where all layers are on a GPU. unplaced: the one that
    llama.cpp leaves there by itself."""
    found = []
    for tensor in tensors:
        one = next((p for p in placed if p.matches(tensor)), None)
        if tensor == unplaced if one is None else one.buffer == CPU:
            found.append(tensor)
    return found


def buffer_types() -> dict[str, int]:
    """name -> address of the buffer type of each device, the CPU's among them."""
    return {one.buffer: one.buffer_type for one in backends.devices() if one.buffer_type}


def check_buffers(placed: Sequence[Placement]) -> dict[str, int]:
    """The buffer types there are. Raises BadInput if another one is wanted."""
    known = buffer_types() if placed else {}
    for one in placed:
        if one.buffer not in known:
            raise BadInput(
                f"there is no buffer type '{one.buffer}' for the tensors '{one.pattern}'; choose"
                f" one of: {', '.join(sorted(known))}"
            )
    return known


class _Override(ctypes.Structure):
    """llama.h's llama_model_tensor_buft_override."""

    _fields_ = [("pattern", ctypes.c_char_p), ("buffer", ctypes.c_void_p)]


def as_array(placed: Sequence[Placement]) -> ctypes.Array[_Override] | None:
    """`llama_model_params.tensor_buft_overrides`: it has to live until the model is loaded; None
    for no placements. Raises BadInput for a buffer type that there is not.
    """
    if not placed:
        return None
    known = check_buffers(placed)
    array = (_Override * (len(placed) + 1))()  # a pattern of NULL ends it
    for entry, one in zip(array, placed, strict=False):
        entry.pattern, entry.buffer = os.fsencode(one.pattern), known[one.buffer]
    return array
