"""edgekv: llama.cpp with a KV cache that is physically a fraction of its full size, compressed while the prompt is read.

    from edgekv import Llama
    llm = Llama("model.gguf", n_ctx=8192, kv_ratio=0.2)

Importing the package loads no library; that happens with the first use of `Llama` or `edgekv.native`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgekv.errors import BadInput, Cancelled, EdgeKVError, Unsupported

if TYPE_CHECKING:
    from edgekv.llama import Llama
    from edgekv.profiles.prepare import has_profile, make_profile
    from edgekv.stats import KVStats

__version__ = "0.1.0"
__all__ = [
    "BadInput", "Cancelled", "EdgeKVError", "KVStats", "Llama", "Unsupported", "__version__",
    "has_profile", "make_profile",
]


if os.environ.get("EDGEKV_LIB"):
    # The bindings lie beside the libraries: in a folder of their own in a build, as in this package where edgekv is installed.
    _beside = Path(os.environ["EDGEKV_LIB"]).absolute().parent
    __path__ += [str(_beside / "bindings"), str(_beside)]


def __getattr__(name: str) -> Any:
    if name == "Llama":
        from edgekv.llama import Llama

        return Llama
    if name == "KVStats":
        from edgekv.stats import KVStats

        return KVStats
    if name in ("has_profile", "make_profile"):
        from edgekv.profiles import prepare

        return getattr(prepare, name)
    raise AttributeError(f"module 'edgekv' has no attribute '{name}'")
