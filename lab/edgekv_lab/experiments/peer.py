"""A process of llama-server's loop, from xllamacpp, beside which `edgekv serve` is measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from edgekv.commands.declare import option
from edgekv_lab.experiments.server import Server, serving

PEER_PATH = option("--peer-path", default="", metavar="FOLDER", help="It has xllamacpp.")

_CODE = """
import json, sys, threading, xllamacpp
values, port = json.loads(sys.argv[1]), int(sys.argv[2])
given = xllamacpp.CommonParams()
given.model.path, n_threads = values.pop("model"), values.pop("n_threads")
given.cpuparams.n_threads = given.cpuparams_batch.n_threads = n_threads
given.port, given.sampling.temp = port, 0
for name, value in values.items():
    setattr(given, name, value)
server = xllamacpp.Server(given)
threading.Event().wait()
"""


class _Peer(Server):
    def start(self, words: list[str], **more: Any) -> subprocess.Popen[bytes]:
        values, _, port = words
        command = [sys.executable, "-c", _CODE, values, port]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, **more)


@contextmanager
def serving_peer(folder: str, **values: Any) -> Iterator[Server]:
    """It answers greedily, with its defaults elsewhere, and ends with the block.

    values: `model` (a file), `n_threads`, and others of xllamacpp's CommonParams.
    """
    env = {**os.environ, "PYTHONPATH": folder}
    with serving([json.dumps(values)], _Peer, env=env) as server:
        yield server
