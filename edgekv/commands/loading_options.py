"""llama.cpp's options that say where a model's weights go, for every command that loads one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import Any

import click

from edgekv.commands.declare import Decorator, llama
from edgekv.model.loading import Loading


def _placements(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> tuple[str, ...]:
    """Click callback: the texts as they are. Raises BadInput for what is no REGEX=BUFFER."""
    from edgekv.model.placement import parse

    for text in values:
        parse(text, param.opts[-1])
    return values


EXPERTS: tuple[Decorator, ...] = (
    llama(
        "-ot",
        "--override-tensor",
        "override_tensor",
        env="OVERRIDE_TENSOR",
        multiple=True,
        metavar="REGEX=BUFFER,...",
        callback=_placements,
        help=(
            "Put the tensors whose name has REGEX in it into buffers of this type: CPU, or as"
            " llama.cpp calls a GPU's, such as CUDA0. Of several that match the first counts."
            " May be given more than once."
        ),
    ),
    llama(
        "-cmoe",
        "--cpu-moe",
        "cpu_moe",
        env="CPU_MOE",
        is_flag=True,
        help="Keep the experts' weights of all layers in main memory, the rest on the GPU.",
    ),
    llama(
        "-ncmoe",
        "--n-cpu-moe",
        "n_cpu_moe",
        env="N_CPU_MOE",
        type=click.IntRange(0, 1024),
        default=0,
        metavar="N",
        help="Keep the experts' weights of the first N layers in main memory.",
    ),
)
"""Those that a plan of memory depends on too."""
LOADING: tuple[Decorator, ...] = EXPERTS


def take_loading(values: dict[str, Any]) -> Loading:
    """Take the options above out of a command's values, those that it has."""
    return Loading(**{x.name: values.pop(x.name) for x in fields(Loading) if x.name in values})


def expert_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that adds EXPERTS to a command and passes it their values as `loading`."""

    @wraps(command)
    def call(**values: Any) -> Any:
        return command(loading=take_loading(values), **values)

    decorated: Callable[..., Any] = call
    for one in reversed(EXPERTS):
        decorated = one(decorated)
    return decorated
