"""A function in a process of its own, so that its memory, its libraries and its environment are its
own.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import edgekv
import edgekv_lab
from edgekv.errors import BadInput, EdgeKVError

ROOTS = [str(Path(*package.__path__[:1]).parent) for package in (edgekv, edgekv_lab)]
"""Folders of the packages, so that a process has the same, whatever lies in the current folder."""


def edgekv_line(*words: str) -> list[str]:
    """The command line `edgekv WORDS` of this very edgekv."""
    code = f"import sys; sys.path[:1] = {ROOTS!r}; from edgekv.__main__ import main; main()"
    return [sys.executable, "-c", code, *words]


def call(
    function: str,
    request: Mapping[str, Any],
    what: str = "",
    environment: Mapping[str, str] | None = None,
) -> Any:
    """What a function returns for `request`, both as JSON. function: "package.module:name"; what:
    its name in errors; environment: variables that the process has, None: those of this one.

    Raises BadInput if the function refuses the request, EdgeKVError if the process dies.
    """
    what = what or function
    # Ctrl-C reaches both processes, and one of them says enough
    quiet = "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL)"
    code = (
        f"{quiet}; import sys; sys.path[:1] = {ROOTS!r}; "
        f"from edgekv_lab.process import answer; answer({function!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(request),
        text=True,
        stdout=subprocess.PIPE,
        env=environment,
    )
    # it may be gone before this process has heard of the Ctrl-C
    if done.returncode == -signal.SIGINT:
        raise KeyboardInterrupt
    if done.returncode == -9:
        raise EdgeKVError(f"{what} was killed: the machine has not the memory")
    if done.returncode != 0 or not done.stdout.strip():
        raise EdgeKVError(f"{what} ended with code {done.returncode}; its errors stand above")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    if "error" in result:
        raise BadInput(f"{what}: {result['error']}")
    return result["value"]


def answer(function: str) -> None:
    """The other end of `call`: a mistake of the user comes back as {"error": "one line"}."""
    module, _, name = function.partition(":")
    request = json.load(sys.stdin)
    try:
        result = {"value": getattr(import_module(module), name)(request)}
    except EdgeKVError as error:
        result = {"error": str(error)}
    print(json.dumps(result))
