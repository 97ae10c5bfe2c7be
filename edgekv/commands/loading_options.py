"""llama.cpp's options that say how a model's weights are loaded, for every command that does it."""

from __future__ import annotations

import csv
import math

import click

from edgekv.commands.declare import Decorator, llama, option
from edgekv.commands.values import INT_MAX
from edgekv.model.adapters import Adapter
from edgekv.model.loading import SPLIT_MODES

GPUS_MAX = 16
"""llama.cpp's own limit."""


def _placements(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> tuple[str, ...]:
    """Click callback: the texts as they are. Raises BadInput for what is no REGEX=BUFFER."""
    from edgekv.model.placement import parse

    for text in values:
        parse(text, param.opts[-1])
    return values


def _servers(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
    """Click callback: HOST:PORT of each server. Raises BadInput."""
    from edgekv.model.rpc import endpoints

    return tuple(endpoints(value)) if value else ()


def _shares(ctx: click.Context, param: click.Parameter, value: str) -> tuple[float, ...]:
    """Click callback: numbers with commas or slashes between them, as llama.cpp reads them."""
    try:
        shares = tuple(float(part) for part in value.replace("/", ",").split(",") if value)
    except ValueError:
        shares = (math.nan,)
    if len(shares) > GPUS_MAX or not all(0 <= share < math.inf for share in shares):
        raise click.BadParameter(
            f"give at most {GPUS_MAX} numbers, none below 0, with commas between them, such as 3,1",
            ctx,
            param,
        )
    return shares


def _adapters(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> tuple[Adapter, ...]:
    """Click callback: files with commas between them, in quotation marks if they have one."""
    return tuple(Adapter(path) for text in values for path in _words(text) if path)


def _scaled_adapters(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> tuple[Adapter, ...]:
    """Click callback: the same, each with a colon and a number behind it. Raises BadParameter."""
    found = []
    for word in (word for text in values for word in _words(text)):
        path, _, number = word.rpartition(":")
        try:
            scale = float(number)
        except ValueError:
            scale = math.nan
        if not path or not math.isfinite(scale):
            raise click.BadParameter("give FILE:SCALE, such as style.gguf:0.5", ctx, param)
        found.append(Adapter(path, scale))
    return tuple(found)


def _overrides(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> tuple[tuple[str, bool | int | float | str], ...]:
    """Click callback: keys and values, of a key the first one. Raises BadInput."""
    from edgekv.model.metadata import parse

    return tuple(pair for text in values for pair in parse(text, param.opts[-1]))


def _words(text: str) -> list[str]:
    """Values with commas between them, as a row of CSV."""
    return next(csv.reader([text]), [])


EXPERTS: tuple[Decorator, ...] = (
    llama(
        "-ot --override-tensor override_tensor",
        multiple=True,
        metavar="REGEX=BUFFER,...",
        callback=_placements,
        help=(
            "Put tensors whose name matches REGEX into buffers of this type: CPU, or llama.cpp's"
            " name of a GPU's, such as CUDA0. The first match counts; again for more."
        ),
    ),
    llama(
        "-cmoe --cpu-moe cpu_moe",
        is_flag=True,
        help="Keep the experts' weights of all layers in main memory, the rest on the GPU.",
    ),
    llama(
        "-ncmoe --n-cpu-moe n_cpu_moe",
        type=click.IntRange(0, 1024),
        default=0,
        help="Keep the experts' weights of the first N layers in main memory.",
    ),
)
"""Those that a plan of memory depends on too."""
PLACES: tuple[Decorator, ...] = (
    *EXPERTS,
    llama(
        "--rpc rpc",
        default="",
        metavar="HOST:PORT,...",
        callback=_servers,
        help=(
            "llama.cpp's RPC servers, which take a share of the layers; the cache is then not"
            " compressed. Nothing is encrypted: use them in networks that you trust."
        ),
    ),
    llama(
        "-sm --split-mode split_mode",
        type=click.Choice(SPLIT_MODES),
        default="layer",
        help=(
            "Spread a model over several GPUs: none takes one (-mg), layer gives each some layers"
            " with their cache, row cuts weights into rows."
        ),
    ),
    llama(
        "-ts --tensor-split tensor_split",
        default="",
        metavar="N0,N1,...",
        callback=_shares,
        help="Share of the model that each GPU takes, such as 3,1; without it: as much as is free.",
    ),
    llama(
        "-mg --main-gpu main_gpu",
        type=click.IntRange(0, INT_MAX),
        default=0,
        metavar="INDEX",
        help="The GPU of -sm none; with -sm row the one for small tensors and results.",
    ),
    llama(
        "--mmap/--no-mmap mmap",
        default=True,
        help=(
            "Map the model's file into memory, or read it, which takes longer; weights may then be"
            " repacked or pinned."
        ),
    ),
    llama(
        "--mlock mlock",
        is_flag=True,
        help="Keep the weights in main memory: the system must not swap them out.",
    ),
    llama(
        " /-nr",
        "--repack/--no-repack repack",
        default=None,
        help=(
            "Repack weights in main memory for the processor; without it: if the whole model fits"
            " into free memory."
        ),
    ),
)
"""Those that change where weights lie, and nothing else."""
LOADING: tuple[Decorator, ...] = (
    *PLACES,
    option(
        "--lora lora",
        multiple=True,
        metavar="FILE,...",
        callback=_adapters,
        help="A LoRA adapter, a GGUF file; again for more.",
    ),
    option(
        "--lora-scaled lora_scaled",
        multiple=True,
        metavar="FILE:SCALE,...",
        callback=_scaled_adapters,
        help="A LoRA adapter, and by how much of it the weights change.",
    ),
    option(
        "--override-kv override_kv",
        multiple=True,
        metavar="KEY=TYPE:VALUE,...",
        callback=_overrides,
        help=(
            "Read the model's metadata as if they had this value; TYPE is bool, int, float or str."
            " Again for more."
        ),
    ),
)
