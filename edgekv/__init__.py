"""edgekv: llama.cpp with a KV cache that is physically a fraction of its full size, compressed
while the prompt is read.

    from edgekv import Llama
    llm = Llama("model.gguf", n_ctx=8192, kv_ratio=0.2)

Importing the package loads no library; that happens with the first use of `Llama` or
`edgekv.native`.
"""

from edgekv.base import quiet

if quiet.is_ours():
    quiet.begin()

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgekv.errors import BadInput, Cancelled, EdgeKVError, Unsupported
from edgekv.version import __version__

if TYPE_CHECKING:
    from edgekv.base.stats import KVStats
    from edgekv.choice.config import KVConfig
    from edgekv.conversation.pool import Conversations
    from edgekv.conversation.talk import Talk
    from edgekv.learn.prepare import has_profile, make_profile
    from edgekv.llama.llama import Llama

__all__ = [
    "BadInput",
    "Cancelled",
    "Conversations",
    "EdgeKVError",
    "KVConfig",
    "KVStats",
    "Llama",
    "Talk",
    "Unsupported",
    "__version__",
    "has_profile",
    "make_profile",
]


if os.environ.get("EDGEKV_LIB"):
    # The bindings lie beside the libraries: in a folder of their own in a build, as in this package
    # where edgekv is installed.
    _beside = Path(os.environ["EDGEKV_LIB"]).absolute().parent
    __path__ += [str(_beside / "bindings"), str(_beside)]
elif not (Path(__file__).parent / "lib").is_dir():
    # The sources of a checkout, in whose folder Python was started: an installed package has what
    # they lack.
    _others = [Path(entry).absolute() / "edgekv" for entry in sys.path]
    __path__ += [str(one) for one in _others if (one / "lib").is_dir()][:1]


LAZY = {
    "Conversations": "edgekv.conversation.pool",
    "KVConfig": "edgekv.choice.config",
    "KVStats": "edgekv.base.stats",
    "Llama": "edgekv.llama.llama",
    "Talk": "edgekv.conversation.talk",
    "has_profile": "edgekv.learn.prepare",
    "make_profile": "edgekv.learn.prepare",
}
"""Names that bring their module along with their first use."""


MODULES = ("llama_cpp", "native")
"""Modules that their first use loads."""


def __getattr__(name: str) -> Any:
    if name in MODULES:
        return import_module(f"edgekv.{name}")
    if name not in LAZY:
        raise AttributeError(f"module 'edgekv' has no attribute '{name}'")
    return getattr(import_module(LAZY[name]), name)
