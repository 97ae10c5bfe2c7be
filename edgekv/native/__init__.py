"""The native library: every ctypes call of the package (native/include/edgekv.h has the contracts).

Importing this package loads edgekv's build of llama.cpp. Its bindings are `edgekv.llama_cpp`; a
stock `llama_cpp` in the same process is another library.
"""

from __future__ import annotations

from edgekv.native.archive import Archive
from edgekv.native.bindings import llama_cpp
from edgekv.native.context import (
    OUTPUTS,
    ProductBytes,
    check_finite,
    clear,
    context_bytes,
    context_error,
    device_free,
    hidden_width,
    logits,
    model_heads,
    next_context,
    product_bytes,
    product_peak,
    rows_alike,
    stop_if_set,
    take_back,
    trim_heap,
    why_unsupported,
)
from edgekv.native.infos import LayerInfo, MemoryInfo
from edgekv.native.parked import Place
from edgekv.native.prefill import HIDDEN, Observer, Prefill
from edgekv.native.store import Store
