"""Model files looked at in a process of its own: llama.cpp ends the process for some damaged ones,
and a list of models must not end with it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import edgekv
from edgekv.base.defaults import whole_ctx
from edgekv.commands.fit import preset_of
from edgekv.errors import BadInput, EdgeKVError
from edgekv.model.header import DAMAGE, Header, files_of, opened
from edgekv.model.outline import outline
from edgekv.models.found.judged import Judged

if TYPE_CHECKING:
    from edgekv.methods import Preset
    from edgekv.model.blueprint import Blueprint

CRASHED = "it is damaged: llama.cpp breaks down when it reads it; download it again"
PATIENCE_S = 60.0
"""No header takes longer."""


class Judge:
    """A process that is asked, started when it is needed or has ended. A context manager."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def ask(self, path: str, n_ctx: int, is_gpu: bool, has_profile: bool) -> Judged:
        """See `judge`. Raises BadInput."""
        child = self._child or self._start()
        assert child.stdin and child.stdout
        clock = threading.Timer(PATIENCE_S, child.kill)
        clock.start()
        try:
            child.stdin.write(json.dumps([path, n_ctx, is_gpu, has_profile]) + "\n")
            child.stdin.flush()
            line = child.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            clock.cancel()
        if not line:
            self._end()
            return Judged(no_model=CRASHED)
        answer = json.loads(line)
        if "refused" in answer:
            raise BadInput(answer["refused"])
        return Judged.of(answer)

    def _start(self) -> subprocess.Popen[str]:
        """Raises EdgeKVError if there can be no such process."""
        # the same package, whatever lies in the current folder
        root = str(Path(edgekv.__file__).parent.parent)
        code = (
            f"import sys; sys.path[0] = {root!r}; "
            "from edgekv.commands.judging import serve; serve()"
        )
        self._child = child = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            env={**os.environ, "GGML_NO_BACKTRACE": "1"},
        )
        assert child.stdout
        if not child.stdout.readline():
            self._end()
            raise EdgeKVError("no process can be started to look at models; see 'edgekv info'")
        return child

    def _end(self) -> None:
        child, self._child = self._child, None
        if child:
            child.kill()
            with suppress(OSError), child:  # it may not have read what was written
                pass


def serve() -> None:
    """Answers until its input ends. What libraries print goes nowhere."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        print("ready", file=out, flush=True)
        for line in sys.stdin:
            print(json.dumps(_answer(*json.loads(line))), file=out, flush=True)


def _answer(*question: Any) -> dict[str, Any]:
    try:
        return asdict(judge(*question))
    except EdgeKVError as error:
        return {"refused": str(error)}


def judge(path: str, n_ctx: int, is_gpu: bool, has_profile: bool = True) -> Judged:
    """What llama.cpp and the planner say of a model file, without its weights. has_profile: it may
    have one, which is looked for.

    Raises BadInput for a file that is damaged or no model.
    """
    from edgekv import methods
    from edgekv.choice.choose import UNPREPARED
    from edgekv.commands.info import bytes_per_token
    from edgekv.memory.fit import PICKED, TYPES, Planner, Wish
    from edgekv.memory.hidden import AUTO
    from edgekv.model import facts, kind

    def preset(ratio: float | None) -> Preset:
        return preset_of("auto", path, ratio) if has_profile else methods.get(UNPREPARED)

    facts.check_gguf(path)
    with ExitStack() as stack:
        try:
            header = Header(stack.enter_context(opened(path)))
        except (OSError, *DAMAGE):
            raise BadInput("it is damaged or incomplete; download it again") from None
        if kind.is_embedder(header):
            return Judged(str(header.meta.get("general.architecture", "")), no_model=kind.EMBEDDER)
        blueprint = stack.enter_context(_blueprint(path, header, is_gpu))
        fitting = whole_ctx(min(n_ctx, blueprint.n_ctx_train))
        types = [PICKED, *((name, name) for name in TYPES[1:])]
        planner = Planner(
            blueprint,
            preset(None),
            Wish(0, fitting, types=types, hidden=(AUTO,)),
            on_gpu=is_gpu,
            auto=preset,
        )
        return Judged(
            blueprint.shape["arch"],
            bytes_per_token(blueprint.shape, *facts.cache_types["f16"][1:]) or 0,
            fitting,
            blueprint.why,
            tuple((point.ratio, point.type_k, point.peak) for point in planner.ways(fitting)),
        )


@contextmanager
def _blueprint(path: str, header: Header, is_gpu: bool) -> Iterator[Blueprint]:
    """The model without weights, and if possible without its vocabulary, which takes longest."""
    from edgekv.model.blueprint import Blueprint

    with ExitStack() as stack:
        found = None
        if len(files_of(path)) == 1:
            # where this does not do, the whole file does, or says what is wrong
            with suppress(OSError, BadInput, *DAMAGE):
                short = stack.enter_context(outline(header))
                found = stack.enter_context(Blueprint(short, on_gpu=is_gpu))
        yield found or stack.enter_context(Blueprint(path, on_gpu=is_gpu))
