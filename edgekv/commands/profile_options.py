"""What the commands that make profiles share: their options, and how they record and show what they
do.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgekv.commands.declare import option
from edgekv.commands.loading_options import PLACES, loading_options
from edgekv.commands.values import ratio
from edgekv.model.loading import Loading

if TYPE_CHECKING:
    from edgekv.profiles import Profile


def ratios(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> tuple[float, ...] | None:
    """Click callback: comma-separated shares to keep, sorted. Raises BadInput."""
    return (
        None
        if value is None
        else tuple(sorted({ratio(ctx, param, share.strip()) for share in value.split(",")}))
    )


OUTPUT = option("-o --output", required=True, metavar="FILE", help="Where to write it.")
RATIOS = option(
    "--ratios grid",
    metavar="RS",
    callback=ratios,
    help="Shares of the cache to learn, with commas; without it: a fine grid.",
)
THREADS = option(
    "-t --threads",
    env="LLAMA_ARG_THREADS",
    type=int,
    metavar="N",
    help="CPU threads; 0: all there are; without it: the physical cores.",
)
GPU_LAYERS = option(
    "-ngl --gpu-layers",
    env="LLAMA_ARG_N_GPU_LAYERS",
    type=int,
    default=-1,
    metavar="N",
    help="Layers to put on a GPU; -1: all.",
)
VERBOSE = option(
    "-v --verbose",
    env="LLAMA_ARG_VERBOSE",
    is_flag=True,
    help="Print what llama.cpp logs, and no bar.",
)


PLACEMENT = loading_options(PLACES)


def loading_arguments(
    path: str, n_threads: int, gpu_layers: int, loading: Loading, verbose: bool
) -> dict[str, Any]:
    """Keyword arguments of `Llama` for the model `path`. Raises BadInput for a buffer type that
    there is not.
    """
    loading.check(path)
    return {
        "n_threads": n_threads,
        "n_threads_batch": n_threads,
        "n_gpu_layers": gpu_layers,
        "verbose": verbose,
        **loading.places(),
    }


def command_line(*words: str) -> str:
    """What is recorded in a profile."""
    return "edgekv profile " + shlex.join(words)


def given(flag: str, value: Any) -> list[str]:
    """A flag and its value as words, none without a value."""
    if value is None:
        return []
    return [flag, ",".join(f"{x:g}" for x in value) if isinstance(value, tuple) else str(value)]


def check_output(output: str) -> None:
    """Raises BadInput if a profile cannot be put there: before minutes of work, not after."""
    from edgekv import files
    from edgekv.profiles.file import IS_PROFILE

    files.check(output, IS_PROFILE, "profile")


def read_text(name: str) -> str:
    """A text to learn from, or questions about one. Raises BadInput for what is no text."""
    from edgekv.commands.text import read_document

    return read_document(name)


@contextmanager
def progress_bar(
    label: str, partial: Path, has_bar: bool = True
) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error, or a line that says how long it takes; after Ctrl-C one that says
    what is kept."""
    from edgekv.commands.progress import WorkBar

    bar = WorkBar(lambda about: f"edgekv: {label}: {about}", has_bar=has_bar)
    with note_what_is_kept(partial), bar as progress:
        yield progress


@contextmanager
def note_what_is_kept(partial: Path) -> Iterator[None]:
    """After Ctrl-C a line says what the same command will go on from."""
    try:
        yield
    except KeyboardInterrupt:
        if partial.is_file():
            click.echo(
                f"edgekv: stopped; what is done is in {partial}, and the same command goes on from"
                " there",
                err=True,
            )
        raise


def summary(profile: Profile, share: float = 0.2) -> str:
    """One line: how uneven the shares are."""
    import numpy as np

    shares = profile.shares_at(share)[profile.heads]
    low, middle, high = np.quantile(shares, (0, 0.5, 1))
    return (
        f"at {share:g} kept, the share of a head is {low:.3f} at least, {middle:.3f} in the middle,"
        f" {high:.3f} at most ({len(shares)} heads)"
    )
