"""What can be said about the models that lie on this computer.

Headers are looked at in a process apart. llama.cpp ends a process over some damaged files: such
a file is said to be damaged, and another process goes on with the next.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import edgekv
from edgekv.errors import EdgeKVError
from edgekv.models_found.found import Found

DAMAGED = "llama.cpp stops at it: it is damaged, download it again"


@dataclass(frozen=True)
class Fits:
    """ratio: share of the bytes of a full f16 cache; n_ctx: tokens of the context."""

    ratio: float
    type_k: str
    type_v: str
    n_ctx: int


@dataclass(frozen=True)
class Overview:
    """name: as the command line takes it; path: of its first file; size_bytes: of all its files;
    kv_bytes_per_token: of an f16 cache; uncompressed_because: why it is not compressible; profile:
    whether it has been prepared; why_not: why it cannot be used. What is unknown is empty or None.
    """

    name: str
    source: str
    path: str
    size_bytes: int = 0
    architecture: str = ""
    kv_bytes_per_token: int | None = None
    compressible: bool = False
    uncompressed_because: str = ""
    fits: Fits | None = None
    profile: bool = False
    why_not: str = ""


@dataclass(frozen=True)
class Listing:
    """device: where weights and cache would go; memory: bytes of it that may be taken; models: in
    the order in which they were named."""

    device: str
    memory: int
    models: list[Overview]


def look_at(found: Sequence[Found], n_ctx: int) -> Listing:
    """What the models' headers say. n_ctx: tokens that have to fit. Raises EdgeKVError if nothing
    can be looked at, because the library is missing for example.
    """
    rest, known = list(found), []
    machine: dict[str, Any] = {}
    while rest or not machine:
        lines, error = _worker(rest, n_ctx)
        if not lines:
            raise EdgeKVError(f"the models cannot be looked at: {error}")
        machine, *records = lines
        known += [_overview(record) for record in records]
        rest = rest[len(records) :]
        if rest:
            one = rest.pop(0)
            known.append(Overview(one.name, one.source, one.path, why_not=DAMAGED))
    return Listing(machine["device"], machine["memory"], known)


def _overview(record: dict[str, Any]) -> Overview:
    fits = record.pop("fits")
    return Overview(**record, fits=Fits(**fits) if fits else None)


def _worker(models: Sequence[Found], n_ctx: int) -> tuple[list[dict[str, Any]], str]:
    """The lines that a worker prints, and the last one of its errors."""
    # the same package, whatever lies in the current folder
    root = str(Path(edgekv.__file__).parent.parent)
    # Ctrl-C reaches both processes, and one of them says enough
    quiet = "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL)"
    code = (
        f"{quiet}; import sys; sys.path[0] = {root!r}; "
        "from edgekv.commands import overview_worker; overview_worker.main()"
    )
    request = {"n_ctx": n_ctx, "models": list(map(asdict, models))}
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(request),
        text=True,
        capture_output=True,
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},
    )
    errors = done.stderr.strip().splitlines()
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return lines, errors[-1] if errors else f"it ends with code {done.returncode}"
