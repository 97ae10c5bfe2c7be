"""edgekv profile lukv: which tokens the answers to questions needed."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from edgekv.commands.declare import option
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
)
from edgekv.errors import BadInput
from edgekv_lab.commands.values import N_CTX


@click.command("lukv")
@source_options
@OUTPUT
@option(
    "--score",
    default="snapkv",
    metavar="NAME",
    help="The score to make it for; 'edgekv methods' lists them.",
)
@option(
    "--text text_file",
    metavar="FILE",
    help="A text to learn from; without it: four that come with edgekv.",
)
@option(
    "--questions question_file",
    metavar="FILE",
    help="Questions about --text, one on each line; behind a tab the right answer, if it is known.",
)
@RATIOS
@option(
    "--objective",
    type=click.Choice(["energy", "paper"]),
    default="energy",
    help="energy: squared importance, all layers and questions together; paper: plain importance, "
    "by layer and question.",
)
@N_CTX
def command(
    source: Source,
    output: str,
    score: str,
    text_file: str | None,
    question_file: str | None,
    grid: tuple[float, ...] | None,
    objective: str,
    n_ctx: int,
) -> None:
    """Make a LU-KV profile: let the model answer questions and see which tokens the answers needed.

    It serves the score that it was made for. Stopped with Ctrl-C, the same command goes on with the
    next text.
    """
    from edgekv_lab.makers import lukv

    if (text_file is None) != (question_file is None):
        raise BadInput("--text and --questions belong together; give both or none")
    path = source.path
    check_output(output)
    sources = lukv.sources()
    if text_file and question_file:
        sources = [
            lukv.Questioned.parse(read_text(text_file), read_text(question_file).splitlines())
        ]
    llm = lukv.load(path, score, n_ctx, **source.arguments(path))
    recorded = command_line(
        "lukv",
        path,
        "--score",
        score,
        *given("--text", text_file and Path(text_file).name),
        *given("--questions", question_file and Path(question_file).name),
        *given("--ratios", grid),
        "--objective",
        objective,
    )
    ratios = grid or lukv.RATIOS
    make = partial(lukv.make, llm, sources, ratios, objective=objective, command=recorded)
    make_and_write(make, output, not source.verbose)
