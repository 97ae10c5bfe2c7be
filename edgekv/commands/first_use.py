"""The first use of a model: its profile is made before the conversation begins, once."""

from __future__ import annotations

import sys
import time
from typing import Any

import click

from edgekv.choose import WITHOUT_PROFILE, foretells, learns
from edgekv.commands.options import EngineOptions
from edgekv.errors import BadInput, EdgeKVError, Unsupported

SAY_AFTER_S = 2.0
"""Seconds of work after which the rest is estimated, where no bar can be drawn."""


def make_profile(options: EngineOptions, path: str, threads: int) -> None:
    """Make the profile of the model at `path` if the method wants one, none is found, and none was named or refused.

    It says how long that takes. Ctrl-C leaves it for the next time: `auto` then goes without. What cannot be done is said in one line.
    """
    if not is_wanted(options, path):
        return
    from edgekv.profiles import probe_profile

    click.echo("edgekv: first use of this model: learning which of its KV heads need their rows; Ctrl-C skips that, --kv-profile none refuses it",
               err=True)
    try:
        with click.progressbar(length=1, label="profile", file=sys.stderr) as bar:
            probe_profile.cache(path, Report(bar), n_threads=threads, n_threads_batch=threads, n_gpu_layers=options.gpu_layers)
    except KeyboardInterrupt:
        click.echo(f"\nedgekv: skipped; {WITHOUT_PROFILE} is used, which takes more than twice as long to read a prompt. The next start goes on from here",
                   err=True)
    except (BadInput, Unsupported) as error:
        click.echo(f"edgekv: {error}", err=True)


def is_wanted(options: EngineOptions, path: str) -> bool:
    """Whether there is something to make."""
    from edgekv.facts import model_info
    from edgekv.profiles import find

    limits = (options.kv_budget, options.kv_budget_mb, options.kv_memory)
    compresses = options.kv_ratio < 1 or any(x is not None for x in limits)
    if not compresses or options.kv_profile is not None or not learns(options.kv_method):
        return False
    try:
        return find(path, foretells=foretells(options.kv_method)) is None and model_info(path)["mode"] == "layers"
    except EdgeKVError:
        return False  # whoever loads the model says what is wrong with it


class Report:
    """Progress on a bar that says how long it takes; where there is no terminal, in one line."""

    def __init__(self, bar: Any) -> None:
        self._bar, self._begin, self._silent = bar, time.monotonic(), not sys.stderr.isatty()

    def __call__(self, done: int, total: int) -> None:
        self._bar.length = total
        self._bar.update(done - self._bar.pos)
        elapsed = time.monotonic() - self._begin
        if self._silent and done and elapsed > SAY_AFTER_S:
            self._silent = False
            click.echo(f"edgekv: this takes about {elapsed * total / done:.0f} s", err=True)
