"""What commands that make profiles share: options, and how they record and show their work."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgekv.commands.declare import given_by, grouped, llama_field, option
from edgekv.commands.loading_options import PLACES
from edgekv.commands.named import model_named
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


@dataclass(frozen=True)
class Source:
    """The model that a profile is of, and how it is loaded. Fields are the options' names."""

    model: str
    threads: int | None = llama_field(
        "-t --threads",
        type=int,
        metavar="N",
        help="CPU threads; 0: all there are; without it: the physical cores.",
    )
    gpu_layers: int = llama_field(
        "-ngl --gpu-layers",
        env="N_GPU_LAYERS",
        type=int,
        default=-1,
        metavar="N",
        help="Layers to put on a GPU; -1: all.",
    )
    loading: Loading = given_by(*PLACES, made=Loading)
    verbose: bool = llama_field(
        "-v --verbose", is_flag=True, help="Print what llama.cpp logs, and no bar."
    )

    @property
    def path(self) -> str:
        """The model's file. Raises BadInput if it is no model that can have a profile."""
        from edgekv.commands.load import model_path
        from edgekv.profiles import identify

        path = model_path(self.model)
        identify(path)
        return path

    def arguments(self, path: str) -> dict[str, Any]:
        """Keyword arguments of `Llama` for the file. Raises BadInput for no such buffer type."""
        from edgekv.commands.load import count_threads

        n = count_threads(self.threads)
        self.loading.check(path)
        counts = {"n_threads": n, "n_threads_batch": n, "n_gpu_layers": self.gpu_layers}
        return {**counts, "verbose": self.verbose, **self.loading.places()}


def source_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds a model with the options for loading it, and passes them as `source`."""
    return model_named()(grouped("source", Source)(command))


def command_line(what: str, path: str, *words: str) -> str:
    """What is recorded in a profile of the model `path`."""
    return "edgekv profile " + shlex.join([what, "-m", Path(path).name, *words])


def given(flag: str, value: Any) -> list[str]:
    """A flag and its value as words, none without a value."""
    if value is None:
        return []
    return [flag, ",".join(f"{x:g}" for x in value) if isinstance(value, tuple) else str(value)]


def check_output(output: str) -> None:
    """Raises BadInput if a profile cannot be put there: before minutes of work, not after."""
    from edgekv.base import files
    from edgekv.profiles.file import IS_PROFILE

    files.check(output, IS_PROFILE, "profile")


def read_text(name: str) -> str:
    """A text to learn from, or questions about one. Raises BadInput for what is no text."""
    from edgekv.documents.plain import read_document

    return read_document(name)


def make_and_write(make: Callable[..., Profile], output: str, has_bar: bool) -> Profile:
    """Write and return what make(partial=, progress=) makes, behind a bar on standard error or a
    line that says how long it takes; after Ctrl-C a line says what is kept."""
    from edgekv.commands.progress import WorkBar
    from edgekv.profiles import write

    partial = Path(output + ".partial")
    bar = WorkBar(lambda about: f"edgekv: profile: {about}", has_bar=has_bar)
    with note_what_is_kept(partial), bar as progress:
        profile = make(partial=partial, progress=progress)
    write(profile, output)
    click.echo(summary(profile))
    return profile


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
