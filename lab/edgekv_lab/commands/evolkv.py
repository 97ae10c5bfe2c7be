"""edgekv profile evolkv: rows for each layer, found by evolution on a task."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgekv.commands.declare import grouped, option
from edgekv.commands.profile_options import (
    Source,
    check_output,
    command_line,
    given,
    note_what_is_kept,
    source_options,
    summary,
)
from edgekv.errors import BadInput
from edgekv_lab.commands.values import N_CTX, SETTING, lengths

if TYPE_CHECKING:
    from edgekv_lab.makers.evolkv import Generation
    from edgekv_lab.makers.training import Example

TASK = "needle"


@dataclass(frozen=True)
class SearchOptions:
    """What is learned from, and how it is searched. Fields are the options' names."""

    task: str
    target: int
    setting: str
    fitness: str
    total: str
    group: int
    generations: int
    population: int | None
    n_cases: int
    n_tokens: tuple[int, ...]
    seed: int


search_options = grouped(
    "options",
    SearchOptions,
    (
        option(
            "--task",
            default=TASK,
            metavar="needle|FILE.jsonl",
            help='What to learn from: needles, or a file whose lines have "prompt", or "context" '
            'and "question", and "answers".',
        ),
        option(
            "--kv-budget target",
            type=click.IntRange(min=1),
            default=128,
            help="Tokens per KV head, the mean over layers, at which it is learned; it serves "
            "every other.",
        ),
        SETTING,
        option(
            "--fitness",
            type=click.Choice(["likelihood", "contained"]),
            default="likelihood",
            help="contained: share of answers found in what the model says; likelihood: the "
            "probability it gives to them, which still tells candidates apart where no answer is "
            "found.",
        ),
        option(
            "--total",
            type=click.Choice(["fixed", "free"]),
            default="fixed",
            help="fixed: candidates are tried with --kv-budget tokens; free: with as many as they "
            "have, which the cache score punishes, as in the paper.",
        ),
        option(
            "--group",
            type=click.IntRange(min=2),
            default=8,
            help="Layers that are optimised together.",
        ),
        option(
            "--generations",
            type=click.IntRange(min=1),
            default=10,
            help="Generations for each group.",
        ),
        option(
            "--population",
            type=click.IntRange(min=3),
            help="Candidates of a generation; without it: 4 + 3 ln(group), as in the paper.",
        ),
        option(
            "--cases n_cases",
            type=click.IntRange(min=1),
            default=16,
            help="Needles, or lines of the file that count, from the front.",
        ),
        option(
            "--lengths n_tokens",
            default="1000",
            metavar="NS",
            callback=lengths,
            help="Lengths of the needles' texts, in tokens of this model.",
        ),
        option(
            "-s --seed",
            type=click.IntRange(min=0),
            default=0,
            help="Of the needles and of the search.",
        ),
    ),
)


@click.command("evolkv")
@source_options
@option(
    "-o --output",
    metavar="FILE",
    help="Where to write it; without it: in the user's cache, where --kv-method evolkv finds it.",
)
@search_options
@N_CTX
def command(source: Source, output: str | None, options: SearchOptions, n_ctx: int) -> None:
    """Make an EvolKV profile: let budgets per layer evolve on a task, and print the curve on
    standard error.

    Each text is read once; its full K and V stay in memory. It serves the score snapkv. Stopped
    with Ctrl-C, the same command goes on where it was, and so does one with more generations.
    """
    from edgekv.profiles import write
    from edgekv_lab.makers import evolkv as search
    from edgekv_lab.makers.training import Training

    o, path = options, source.path
    out = output or str(_cached(path))
    check_output(out)
    search.import_cma()
    llm = search.load(path, n_ctx, **source.arguments(path))
    examples = _examples(o, lambda text: llm.tokenize(text.encode(), add_bos=False))
    curve = Curve()
    training = Training(llm, examples, o.setting == "aware", o.fitness, curve.reading)
    partial = Path(out + ".partial")
    with note_what_is_kept(partial):
        profile = search.make(
            training,
            o.target,
            search.Search(**{one.name: getattr(o, one.name) for one in fields(search.Search)}),
            partial=partial,
            report=curve.point,
            command=command_line("evolkv", path, *_words(o, len(examples))),
        )
    write(profile, out)
    click.echo(summary(profile, min(1.0, o.target / training.n_tokens)))
    if output is None:
        click.echo(f"edgekv: written to {out}", err=True)


def _words(o: SearchOptions, n_examples: int) -> list[str]:
    """What of the command line is recorded in the profile."""
    values = {
        "--task": Path(o.task).name,
        "--kv-budget": o.target,
        "--setting": o.setting,
        "--fitness": o.fitness,
        "--total": o.total,
        "--group": o.group,
        "--generations": o.generations,
        "--population": o.population,
        "--cases": n_examples,
        "--lengths": o.n_tokens if o.task == TASK else None,
        "--seed": o.seed,
    }
    return [word for flag, value in values.items() for word in given(flag, value)]


def _examples(o: SearchOptions, tokenize: Callable[[str], list[int]]) -> list[Example]:
    from edgekv_lab.makers import training

    if o.task == TASK:
        return training.needles(o.seed, o.n_cases, o.n_tokens, tokenize)
    if not o.task.endswith(".jsonl"):
        raise BadInput(f"there is no task '{o.task}'; write {TASK}, or the name of a .jsonl file")
    return training.from_file(o.task)[: o.n_cases]


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
            f" {at.best:.4f}, mean {at.mean:.4f}, total {at.n_rows} tokens"
            f" ({time.monotonic() - self._begin:.0f} s)",
            err=True,
        )
