"""What is left of a model's first use: another process does it while somebody types."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from typing import Any

from edgekv.commands.options import EngineOptions

WHAT = "one-time preparation of this model"


class Later:
    """A process that lets methods compete on a model (`edgekv.learn.contest`), at most one. It
    stands still until `go_on`, and ends with the `with` block.

    takes_all: it makes the profile too, so that nothing is waited for.
    """

    def __init__(self, takes_all: bool = False) -> None:
        self.takes_all = takes_all
        self._process: Any = None

    def __enter__(self) -> Later:
        return self

    def __exit__(self, *details: object) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    @staticmethod
    def may(options: EngineOptions, path: str) -> bool:
        """Whether main memory has room for the model in two processes; a device's is not asked."""
        from edgekv.memory.room import fits_beside
        from edgekv.model.facts import is_offloaded

        return not is_offloaded(options.gpu_layers) and fits_beside(path)

    @property
    def has_begun(self) -> bool:
        return self._process is not None

    def begin(self, path: str, arguments: dict[str, Any]) -> None:
        """arguments: of `edgekv.learn.probe_profile.cache`, as JSON has them."""
        import psutil

        words = [sys.executable, "-m", "edgekv.learn.later", path, json.dumps(arguments)]
        nothing = subprocess.DEVNULL
        self._process = psutil.Popen(words, stdin=nothing, stdout=nothing, stderr=nothing)
        self.stand_still()

    def is_done(self) -> bool:
        return self._process is not None and self._process.poll() == 0

    @property
    def has_failed(self) -> bool:
        return self._process is not None and self._process.poll() not in (None, 0)

    def go_on(self) -> None:
        self._tell("resume")

    def stand_still(self) -> None:
        self._tell("suspend")

    def _tell(self, what: str) -> None:
        import psutil

        if self._process is not None:
            with suppress(psutil.Error):  # it has ended
                getattr(self._process, what)()
