"""Ctrl-C ends the program without a traceback, wherever it comes: before its handlers are there,
and behind its last line. For programs of ours alone.
"""

import sys
from types import TracebackType


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)


def is_ours() -> bool:
    """Whether this process was started as 'edgekv' or 'python -m edgekv'."""
    name, *_ = [*sys.argv, ""]
    if name == "-m":  # Python looks for the package's `__main__`
        return "edgekv" in sys.orig_argv
    return name.replace("\\", "/").rpartition("/")[2] in ("edgekv", "edgekv.exe")


def begin() -> None:
    sys.excepthook = _hook
