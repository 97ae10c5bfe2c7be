"""The first use of a model: its profile is made before the conversation begins, once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import click

from edgekv.choice.choose import learns, wants_predictions
from edgekv.commands.later import WHAT, Later
from edgekv.commands.options import EngineOptions
from edgekv.errors import BadInput, EdgeKVError, Unsupported

SKIPPED = (
    "starting without the preparation: documents are read slower, the next start goes on with it"
)
BESIDE = (
    f"{WHAT} goes on beside the server while nobody asks; until it is done documents are read"
    " slower"
)


def make_profile(
    options: EngineOptions,
    path: str,
    threads: int,
    later: Later | None = None,
    before: Callable[[], None] | None = None,
) -> None:
    """Make the profile of the model at `path` if the method wants one, none is found, and none was
    named or refused.

    It says how long that takes. Ctrl-C leaves it for the next time: `auto` then goes without. What
    cannot be done is said in one line. later: takes the longer part if it may, since the profile
    can be used without. before: called before anything takes long; what it raises is passed on.
    """
    if (later and later.has_begun) or not is_wanted(options, path):
        return
    if before:
        before()
    from edgekv.commands.progress import WorkBar
    from edgekv.learn import probe_profile

    def line(about: str) -> str:
        return f"edgekv: {WHAT}, {about}; Ctrl-C starts now, documents are then read slower"

    arguments = {
        "n_threads": threads,
        "n_threads_batch": threads,
        "n_gpu_layers": options.gpu_layers,
        **options.loading.places(),
    }
    if later and not later.may(options, path):
        later = None
    try:
        if later and later.takes_all:
            _begin(later, path, arguments)
            click.echo(f"edgekv: {BESIDE}", err=True)
            return
        with WorkBar(line) as progress:
            probe_profile.cache(path, progress, holds_contest=not later, **arguments)
        if later:
            _begin(later, path, arguments)
            click.echo(f"edgekv: {WHAT} goes on while you type", err=True)
        elif not progress.said:
            click.echo(f"edgekv: {WHAT} is done", err=True)
    except KeyboardInterrupt:
        click.echo("\n" * sys.stderr.isatty() + f"edgekv: {SKIPPED}", err=True)  # behind the ^C
    except (BadInput, Unsupported) as error:
        click.echo(f"edgekv: {error}", err=True)


def _begin(later: Later, path: str, arguments: dict[str, Any]) -> None:
    later.begin(path, {**arguments, "repack": False})  # so that both map one file


def is_wanted(options: EngineOptions, path: str) -> bool:
    """Whether there is something to make."""
    from edgekv.model.facts import model_info
    from edgekv.profiles import find, identify
    from edgekv.profiles.places import cached

    kv = options.kv
    if not kv.compresses or kv.profile is not None or not learns(kv.method):
        return False
    try:
        found = find(path, predicts=wants_predictions(kv.method))
        is_done = found is not None and (
            found.contest is not None
            or found.surrogate is None
            or found.path != str(cached(identify(path)))
        )
        return not is_done and model_info(path)["mode"] == "layers"
    except EdgeKVError:
        return False  # whoever loads the model says what is wrong with it
