"""What llama.cpp and the planner say of a model's file, without its weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from edgekv import methods
from edgekv.commands.fit import UNPREPARED, preset_of
from edgekv.commands.info import bytes_per_token
from edgekv.errors import BadInput
from edgekv.memory.fit import PICKED, STEP, TYPES, Planner, Wish
from edgekv.memory.hidden import AUTO
from edgekv.methods import Preset
from edgekv.model import facts, kind
from edgekv.model.blueprint import Blueprint
from edgekv.model.header import DAMAGE, Header, files_of, opened
from edgekv.model.outline import outline
from edgekv.models_found.judged import Judged


def judge(path: str, n_ctx: int, is_gpu: bool, has_profile: bool = True) -> Judged:
    """What llama.cpp and the planner say of a model file, without its weights. has_profile: it may
    have one, which is looked for.

    Raises BadInput for a file that is damaged or no model.
    """

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
        fitting = -(-min(n_ctx, blueprint.n_ctx_train) // STEP) * STEP
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
    with ExitStack() as stack:
        found = None
        if len(files_of(path)) == 1:
            # where this does not do, the whole file does, or says what is wrong
            with suppress(OSError, BadInput, *DAMAGE):
                short = stack.enter_context(outline(header))
                found = stack.enter_context(Blueprint(short, on_gpu=is_gpu))
        yield found or stack.enter_context(Blueprint(path, on_gpu=is_gpu))
