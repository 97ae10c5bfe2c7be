"""edgekv profile evolkv: rows for each layer, found by evolution on a task."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgekv.commands.declare import option
from edgekv.commands.options import MODEL
from edgekv.commands.profile_options import (
    GPU_LAYERS,
    PLACEMENT,
    THREADS,
    VERBOSE,
    check_output,
    command_line,
    given,
    loading_arguments,
    note_what_is_kept,
    summary,
)
from edgekv.commands.values import lengths
from edgekv.errors import BadInput
from edgekv.model.loading import Loading

if TYPE_CHECKING:
    from edgekv.profiles.evolkv import Generation
    from edgekv.profiles.training import Example

TASK, CASES, LENGTHS = "needle", 16, "1000"


@click.command("evolkv")
@MODEL
@option(
    "-o --output",
    metavar="FILE",
    help="Where to write it; without it: in the user's cache, where --kv-method evolkv finds it.",
)
@option(
    "--task",
    default=TASK,
    metavar="needle|FILE.jsonl",
    help=(
        'What to learn from: needles, or a file whose lines have "prompt", or "context" and'
        ' "question", and "answers".'
    ),
)
@option(
    "--kv-budget target",
    type=click.IntRange(min=1),
    default=128,
    metavar="N",
    help="Rows per KV head, the mean over layers, at which it is learned; it serves every other.",
)
@option(
    "--setting",
    type=click.Choice(["aware", "agnostic"]),
    default="aware",
    help=(
        "aware: the question is in the prompt that is compressed; agnostic: it is asked after the"
        " text was compressed."
    ),
)
@option(
    "--fitness",
    type=click.Choice(["likelihood", "contained"]),
    default="likelihood",
    help=(
        "contained: share of answers found in what the model says; likelihood: the probability it"
        " gives to them, which still tells candidates apart where no answer is found."
    ),
)
@option(
    "--total",
    type=click.Choice(["fixed", "free"]),
    default="fixed",
    help=(
        "fixed: candidates are tried with --kv-budget rows; free: with as many as they have, which"
        " the cache score punishes, as in the paper."
    ),
)
@option(
    "--group",
    type=click.IntRange(min=2),
    default=8,
    metavar="N",
    help="Layers that are optimised together.",
)
@option(
    "--generations",
    type=click.IntRange(min=1),
    default=10,
    metavar="N",
    help="Generations for each group.",
)
@option(
    "--population",
    type=click.IntRange(min=3),
    metavar="N",
    help="Candidates of a generation; without it: 4 + 3 ln(group), as in the paper.",
)
@option(
    "--cases n_cases",
    type=click.IntRange(min=1),
    default=CASES,
    metavar="N",
    help="Needles, or lines of the file that count, from the front.",
)
@option(
    "--lengths n_tokens",
    default=LENGTHS,
    metavar="NS",
    callback=lengths,
    help="Lengths of the needles' texts, in tokens of this model.",
)
@option(
    "-s --seed",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Of the needles and of the search.",
)
@THREADS
@GPU_LAYERS
@PLACEMENT
@VERBOSE
@option(
    "-c --ctx-size n_ctx",
    type=click.IntRange(min=256),
    default=4096,
    metavar="N",
    help="Size of the context in tokens: text, question and answer have to fit.",
)
def evolkv(
    model: str,
    output: str | None,
    task: str,
    target: int,
    setting: str,
    fitness: str,
    total: str,
    group: int,
    generations: int,
    population: int | None,
    n_cases: int,
    n_tokens: tuple[int, ...],
    seed: int,
    threads: int | None,
    gpu_layers: int,
    loading: Loading,
    verbose: bool,
    n_ctx: int,
) -> None:
    """Make an EvolKV profile: let budgets per layer evolve on a task, and print the curve on
    standard error.

    Each text is read once; its full K and V stay in memory. It serves the score snapkv. Stopped
    with Ctrl-C, the same command goes on where it was, and so does one with more generations.
    """
    from edgekv.commands.load import count_threads, model_path
    from edgekv.profiles import evolkv as search
    from edgekv.profiles import identify, write
    from edgekv.profiles.training import Training

    path = model_path(model)
    out = output or str(_cached(path))
    check_output(out)
    identify(path)
    search.import_cma()
    n = count_threads(threads)
    options = loading_arguments(path, n, gpu_layers, loading, verbose)
    llm = search.load(path, n_ctx, **options)
    examples = _examples(
        task, seed, n_cases, n_tokens, lambda text: llm.tokenize(text.encode(), add_bos=False)
    )
    curve = Curve()
    training = Training(llm, examples, setting == "aware", fitness, curve.reading)
    needles = [*given("--lengths", n_tokens)] if task == TASK else []
    recorded = command_line(
        "evolkv",
        "-m",
        Path(path).name,
        "--task",
        Path(task).name,
        "--kv-budget",
        str(target),
        "--setting",
        setting,
        "--fitness",
        fitness,
        "--total",
        total,
        "--group",
        str(group),
        "--generations",
        str(generations),
        *given("--population", population),
        "--cases",
        str(len(examples)),
        *needles,
        "--seed",
        str(seed),
    )
    partial = Path(out + ".partial")
    with note_what_is_kept(partial):
        profile = search.make(
            training,
            target,
            group=group,
            generations=generations,
            population=population,
            seed=seed,
            total=total,
            partial=partial,
            report=curve.point,
            command=recorded,
        )
    write(profile, out)
    click.echo(summary(profile, min(1.0, target / training.n_tokens)))
    if output is None:
        click.echo(f"edgekv: written to {out}", err=True)


def _examples(
    task: str, seed: int, n: int, n_tokens: tuple[int, ...], tokenize: Callable[[str], list[int]]
) -> list[Example]:
    from edgekv.profiles import training

    if task == TASK:
        return training.needles(seed, n, n_tokens, tokenize)
    if not task.endswith(".jsonl"):
        raise BadInput(f"there is no task '{task}'; write {TASK}, or the name of a .jsonl file")
    return training.from_file(task)[:n]


def _cached(path: str) -> Path:
    from edgekv.profiles import identify, places

    target = places.cached(identify(path), "evolkv")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(
            f"{target.parent} cannot be made ({error.strerror}); name a file with -o"
        ) from None
    return target


class Curve:
    """Prints the curve on standard error, and before it how far the reading of the texts is."""

    def __init__(self) -> None:
        self._begin = time.monotonic()

    def reading(self, done: int, total: int) -> None:
        click.echo(f"{done} of {total} texts read", err=True)
        self._begin = time.monotonic()

    def point(self, at: Generation) -> None:
        click.echo(
            f"group {at.group}/{at.n_groups}, generation {at.number}/{at.n_generations}: best"
            f" {at.best:.4f}, mean {at.mean:.4f}, total {at.n_rows} rows"
            f" ({time.monotonic() - self._begin:.0f} s)",
            err=True,
        )
