"""Another process that judges models' files, because llama.cpp ends the process over some damaged
ones. It is started when it is needed, and again after such a file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import edgekv
from edgekv.errors import BadInput, EdgeKVError
from edgekv.models_found.judged import Judged

DAMAGED = "llama.cpp stops at it: it is damaged, download it again"


class Judge:
    """`ask` about one file after the other, then `close`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def ask(self, path: str, n_ctx: int, is_gpu: bool, has_profile: bool) -> Judged:
        """What `edgekv.commands.judging.judge` says of a file.

        Raises BadInput as it does, and for a file over which the process ends.
        """
        process = self._process = self._process or _start()
        assert process.stdin and process.stdout
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps([path, n_ctx, is_gpu, has_profile]) + "\n")
            process.stdin.flush()
        line = process.stdout.readline()
        if not line.endswith("\n"):
            self.close()
            raise BadInput(DAMAGED)
        answer = json.loads(line)
        if isinstance(answer, str):
            raise BadInput(answer)
        return Judged(**{**answer, "ways": tuple(map(tuple, answer["ways"]))})

    def close(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        with process:  # closes its pipes, and waits for it
            pass


def _start() -> subprocess.Popen[str]:
    # the same package, whatever lies in the current folder
    root = str(Path(edgekv.__file__).parent.parent)
    # Ctrl-C reaches both processes, and one of them says enough
    quiet = "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL)"
    code = (
        f"{quiet}; import sys; sys.path[0] = {root!r}; "
        "from edgekv.commands import judge; judge.main()"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},
    )


def main() -> None:
    """Answer each line of standard input with one of standard output."""
    from edgekv.commands.judging import judge

    for line in sys.stdin:
        try:
            answer: object = asdict(judge(*json.loads(line)))
        except (EdgeKVError, OSError) as error:
            answer = str(error)
        print(json.dumps(answer), flush=True)
