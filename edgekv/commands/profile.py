"""edgekv profile: make, look at and exchange tables of which KV heads get the rows."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgekv.commands import lab
from edgekv.commands.declare import option
from edgekv.commands.named import model_named
from edgekv.commands.profile_options import (
    OUTPUT,
    RATIOS,
    Source,
    check_output,
    command_line,
    given,
    make_and_write,
    read_text,
    source_options,
    summary,
)
from edgekv.commands.profile_shared import get, pack
from edgekv.commands.values import ratio
from edgekv.errors import BadInput
from edgekv.model import kind
from edgekv.model.header import header_of

if TYPE_CHECKING:
    from edgekv.profiles import Profile


FILE = click.argument("file", metavar="FILE")


@click.group("profile")
def command() -> None:
    """Make, show and exchange profiles: which share of its rows each KV head keeps."""


# ---- make


@command.command("probe")
@source_options
@OUTPUT
@option(
    "--contexts",
    multiple=True,
    metavar="FILE",
    help="A text to learn from, may be repeated; without it: those that come with edgekv.",
)
@option(
    "--tokens n_tokens",
    type=click.IntRange(min=64),
    default=1536,
    help="Tokens of each text that are read, at most.",
)
@RATIOS
def probe(
    source: Source,
    output: str,
    contexts: Sequence[str],
    n_tokens: int,
    grid: tuple[float, ...] | None,
) -> None:
    """Make a profile by letting the model repeat a few texts.

    It serves every score. In the end methods and cache types compete on the model: 'auto' follows
    what comes nearest to the full cache. Stopped with Ctrl-C, the same command goes on where it
    was.
    """
    from edgekv.learn import probe_profile

    path = source.path
    check_output(output)
    texts = [read_text(name) for name in contexts] or probe_profile.texts()
    llm = probe_profile.load(path, n_tokens, **source.arguments(path))
    recorded = command_line(
        "probe",
        path,
        *(w for name in contexts for w in ("--contexts", Path(name).name)),
        *given("--tokens", n_tokens if n_tokens != probe_profile.N_TOKENS else None),
        *given("--ratios", grid),
    )
    ratios = grid or probe_profile.RATIOS
    make = partial(
        probe_profile.with_contest, llm, texts, ratios, n_tokens=n_tokens, command=recorded
    )
    profile = make_and_write(partial(make, output), output, not source.verbose)
    for line in contest_lines(profile):
        click.echo(line)


for name in ("lukv", "evolkv"):
    command.add_command(lab.command(name))


# ---- look


@command.command("show")
@model_named()
@option(
    "--kv-ratio share", default="0.2", metavar="R", callback=ratio, help="The global ratio to show."
)
@option(
    "-o --output",
    metavar="PNG",
    help="Draw it into this file instead of the terminal; needs matplotlib.",
)
@option("--json as_json", is_flag=True, help="Print one JSON object.")
def show(model: str, share: float, output: str | None, as_json: bool) -> None:
    """Show what a model's profile says: for which model, how it was made, and a heat map of the
    shares at one ratio. A profile's file may stand for the model.
    """
    profile = profile_of(model)
    if output:
        from edgekv.base import plots
        from edgekv.profiles import draw

        plots.check(output)
        draw.image(profile, share, output)
    elif as_json:
        click.echo(
            json.dumps(
                describe(profile)
                | {
                    "ratio": share,
                    "contest": asdict(profile.contest) if profile.contest else None,
                    "shares": profile.shares_at(share).round(6).tolist(),
                },
                indent=2,
            )
        )
    else:
        from edgekv.commands.report import table
        from edgekv.profiles import draw

        click.echo(
            table([(key, words(value)) for key, value in describe(profile).items() if value != ""])
            + "\n\n"
            + "\n".join([*contest_lines(profile), summary(profile, share)])
        )
        draw.heat_map(profile, share)


def profile_of(name: str) -> Profile:
    """The profile that a model has, or the one in a file. Raises BadInput."""
    from edgekv.commands.load import model_path
    from edgekv.profiles import Profiles, read

    if os.path.isfile(name) and not is_model(name):
        return replace(read(name), path=name)
    path = model_path(name)
    if not is_model(path):
        raise BadInput(f"'{name}' is neither a model nor a profile; 'edgekv models' lists models")
    profiles = Profiles(path)
    found = profiles.find(predicts=True) or profiles.find()
    if found is None:
        raise BadInput(
            f"{name} has no profile yet: 'edgekv chat {name} --kv-ratio 0.2' makes it on first use"
        )
    return found


def is_model(path: str) -> bool:
    """Whether a file is a model, and not a profile or anything else."""
    header = header_of(path)
    return header is not None and not kind.not_a_model(header)


def contest_lines(profile: Profile) -> Sequence[str]:
    """What the model's contest found, if one was held."""
    return profile.contest.lines() if profile.contest else []


def words(value: Any) -> str:
    """One cell for people."""
    if isinstance(value, list):
        return f"{value[0]:g} to {value[-1]:g}, {len(value)} of them"
    return str(value)


def describe(profile: Profile) -> dict[str, Any]:
    model = profile.model
    return {
        "file": profile.path,
        "architecture": model.arch,
        "layers": model.n_layer,
        "kv_heads": max(model.n_head_kv),
        "embedding": model.embedding[:16],
        "attention": model.attention[:16],
        "kind": profile.kind,
        "score": profile.score or "any",
        "sink": profile.sink,
        "window": profile.window,
        "ratios": list(profile.ratios),
        "maps": "kvzap" if profile.surrogate else "",
        "calibration": profile.calibration[:16],
        "command": profile.command,
        "made_by": profile.made_by,
    }


# ---- exchange


command.add_command(pack)
command.add_command(get)


@command.command("import")
@model_named("CURVE.npy", least=1, most=1)
@OUTPUT
@option(
    "--score",
    default="",
    metavar="NAME",
    help="The score that the curve was made for; without it: any.",
)
def import_curve(words: tuple[str, ...], model: str, output: str, score: str) -> None:
    """Read a published LU-KV curve: the share that each head loses, [99, layers, KV heads], for
    0.01 to 0.99 lost.
    """
    from edgekv.commands.load import model_path
    from edgekv.profiles import curves, identify, write

    (curve,), path = words, model_path(model)
    recorded = command_line("import", path, Path(curve).name, *given("--score", score or None))
    check_output(output)
    profile = curves.read_curve(curve, identify(path), score, recorded)
    write(profile, output)
    click.echo(summary(profile))


@command.command("export")
@FILE
@click.argument("curve", metavar="CURVE.npy")
def export_curve(file: str, curve: str) -> None:
    """Write a profile as a curve that LU-KV's authors' code reads."""
    from edgekv.profiles import curves, read

    curves.write_curve(read(file), curve)
