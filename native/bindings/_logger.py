"""What llama.cpp logs: nothing, or everything on standard error.

This module takes the place of llama-cpp-python's own, which sets a callback in Python. A Ctrl-C
inside such a callback is lost, and threads that log wait for the interpreter. The callback here
is native (native/src/edgekv-log.cpp) and set once, when the library is loaded.
"""

from __future__ import annotations

import logging

from edgekv.library import set_verbose

__all__ = ["logger", "set_verbose"]

logger = logging.getLogger("llama-cpp-python")
