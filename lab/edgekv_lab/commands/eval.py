"""edgekv eval: measure what a compressed cache costs in quality, on this machine and this model.

A command for each row of `edgekv_lab.eval.tasks`; they share everything but what their task asks
for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgekv.commands.declare import Decorator, declared, option
from edgekv.commands.options import EngineOptions, engine_options
from edgekv.commands.values import AUTO_STORES
from edgekv.errors import BadInput
from edgekv_lab.commands.counted import counted
from edgekv_lab.commands.values import (
    SETTING,
    cache_types,
    lengths,
    method,
    ratios,
    split_names,
)
from edgekv_lab.record import RECORD

if TYPE_CHECKING:
    from edgekv import Llama
    from edgekv_lab.eval.sample import Row, Task
    from edgekv_lab.eval.table import Table

FORMS = ("md", "csv", "json", "jsonl")
MOST = 2**22
"""Samples, or tokens to predict."""


# ---- options


@dataclass(frozen=True)
class EvalOptions:
    """What is compared, what is asked, and what becomes of it. A task's command offers those that
    it has a use for."""

    names: list[str]
    shares: list[float]
    full: list[str]
    n: int
    form: str
    predictions: str | None
    plot: str | None
    record: str | None
    setting: str = ""
    n_tokens: tuple[int, ...] = ()
    files: tuple[str, ...] = ()
    families: tuple[str, ...] = ()
    n_next: int = 0


def methods(ctx: click.Context, param: click.Parameter, value: str) -> list[str]:
    """Click callback: names of methods with commas between them, or semicolons where a name has
    commas itself."""
    return [method(ctx, param, name) for name in split_names(value)]


def families(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...]:
    """Click callback: comma-separated names, none without a value."""
    return tuple(filter(None, (name.strip() for name in (value or "").split(","))))


GRID = (
    option(
        "--methods names",
        default="auto",
        metavar="NAMES",
        callback=methods,
        help="Methods to compare, with semicolons if a name has commas; 'edgekv methods' lists "
        "them. If neither -ctk nor -ctv is given, each stores what a chat would: "
        f"{AUTO_STORES}; others store f16.",
    ),
    option(
        "--ratios shares",
        default="0.2",
        metavar="RS",
        callback=ratios,
        help="Shares of the full f16 cache's bytes to keep. At 1 every method is 'full'.",
    ),
    option(
        "--full",
        default="f16,q8_0,q4_0",
        metavar="TYPES",
        callback=cache_types,
        help="Full caches to stand beside them.",
    ),
)
ASKED = {
    "lengths": option(
        "--lengths n_tokens",
        default="1500,3000",
        metavar="NS",
        callback=lengths,
        help="Lengths of the text, in tokens of this model.",
    ),
    "families": option(
        "--families families",
        metavar="NAMES",
        callback=families,
        help="Only these, with commas between; without it: all.",
    ),
    "n_next": option(
        "--next n_next",
        default="256",
        type=click.IntRange(1, MOST),
        metavar="M",
        help="Tokens behind the text to feed and score.",
    ),
}
"""By the names in `Task.asks`."""
OUTPUT = (
    option(
        "-o --output form",
        type=click.Choice(FORMS),
        default="md",
        help="Form of the table; jsonl: a line for each prediction instead.",
    ),
    option(
        "--predictions",
        metavar="FILE",
        help="Write every prediction into this file too, a line of JSON each. A call that was "
        "stopped goes on from there.",
    ),
    option("--plot", metavar="PNG", help="Draw the table into this file; needs matplotlib."),
    RECORD,
)


def options_of(task: Task) -> list[Decorator]:
    """What a task's command offers beside the engine's options, in the order of the help."""
    n = option(
        "-n --cases --limit n",
        default=task.defaults.get("n", "100"),
        type=click.IntRange(1, MOST),
        help=f"Samples: {_samples(task)}.",
    )
    files = option(
        "-f --file files",
        multiple=True,
        required="n_next" not in task.asks,
        metavar="FILE",
        help="A file to ask from, may be repeated.",
    )
    asked = [files if name == "files" else ASKED[name] for name in task.asks]
    return [*GRID, n, *asked, *([] if task.predicts else [SETTING]), *OUTPUT]


def _samples(task: Task) -> str:
    if "families" in task.asks:
        return "so many of each family, spread over the lengths"
    if task.predicts:
        return "passages, spread over the lengths"
    if "files" not in task.asks:
        return "spread evenly over the lengths"
    return (
        "drawn by the seed, spread over the lengths"
        if "lengths" in task.asks
        else "so many of each file, drawn by the seed"
    )


# ---- commands


class Tasks(click.Group):
    """A command for each task, made when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        from edgekv_lab.eval.tasks import TASKS

        return list(TASKS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        from edgekv_lab.eval.tasks import get

        return command_of(get(name)) if name in self.list_commands(ctx) else None


@click.group("eval", cls=Tasks)
def command() -> None:
    """Measure what compressing the cache costs in quality."""


def command_of(task: Task) -> click.Command:
    """The command `edgekv eval <task>`."""

    def call(engine: EngineOptions, **values: Any) -> None:
        source = click.get_current_context().get_parameter_source("full")
        options = EvalOptions(**values)
        run(task, engine, options, getattr(source, "name", "") != "DEFAULT")

    call.__doc__ = (
        f"{task.help}\n\n--methods and --ratios stand in for --kv-method and --kv-ratio. The same "
        "--seed (0 if none is given) draws the same samples."
    )
    made = engine_options(declared(call, options_of(task)))
    return click.command(task.name, short_help=task.title)(made)


def run(
    task: Task, engine: EngineOptions, options: EvalOptions, is_full_given: bool = True
) -> None:
    """Ask a task's samples in every row, and print the table. is_full_given: the user named the
    full caches."""
    from edgekv_lab.eval import plot as picture
    from edgekv_lab.eval.evaluate import evaluate
    from edgekv_lab.eval.predictions import kept, line
    from edgekv_lab.eval.reader import Reader
    from edgekv_lab.eval.sample import SampleRequest
    from edgekv_lab.eval.table import Table

    o = options
    if engine.kv.recall or engine.kv.archive != "off":
        raise BadInput(
            "each row is made of the same reading, so there is no archive: leave --kv-archive and"
            " --kv-recall out; 'edgekv-lab recall' measures with them"
        )
    if o.plot:
        picture.check(o.plot)
    llm = model(engine, grid_of(engine, o, is_full_given))
    grid = grid_of(engine, o, is_full_given)  # what `auto` stores, once the model is prepared
    check_lengths(llm, [n + o.n_next for n in o.n_tokens])
    reader = Reader(llm, names_by_type(grid))
    request = SampleRequest(
        max(engine.seed, 0),
        o.n,
        lambda text: llm.tokenize(text.encode(), add_bos=False),
        o.n_tokens,
        o.files,
        o.families,
        o.n_next,
        lambda message: reader.ask(message, grid[0]),
    )
    samples = list(task.samples(request))
    with kept(o.predictions, task.name, o.setting, call_of(task, engine, o, grid)) as answers:
        if o.form == "jsonl":
            for outcome in answers.outcomes:
                click.echo(line(task.name, o.setting, outcome), nl=False)
        known = frozenset((outcome.sample, outcome.row) for outcome in answers.outcomes)
        found = evaluate(task, reader, samples, grid, o.setting == "aware", known)
        length = len(samples) * len(grid) - len(known)
        for outcome in counted(found, length, task.name, hidden=engine.verbose):
            text = answers.add(outcome)
            if o.form == "jsonl":
                click.echo(text, nl=False)
    table = Table(task, o.setting, answers.outcomes, about(engine) if o.plot else ())
    remember(table, engine)
    show(table, o.form, o.plot)
    if o.record:
        keep(table, engine, o.record)


def call_of(
    task: Task, engine: EngineOptions, options: EvalOptions, grid: Sequence[Row]
) -> dict[str, Any]:
    """What a call has to have in common with one that it goes on from."""
    asked = {"n": options.n, "lengths": options.n_tokens, "next": options.n_next}
    texts = {"files": options.files, "families": options.families}
    what = {"task": task.name, "setting": options.setting, "grid": grid}
    return asdict(engine) | what | asked | texts


def grid_of(engine: EngineOptions, options: EvalOptions, is_full_given: bool) -> list[Row]:
    """The rows; cache types that nobody named are those that a chat would take and that the model
    can have."""
    from edgekv.choice.stored import stored_as
    from edgekv.commands.load import model_info, model_path
    from edgekv.memory import dense
    from edgekv_lab.eval.evaluate import settings

    path = model_path(engine.model)
    shape = model_info(path)
    k, v = engine.cache_type_k or "f16", engine.cache_type_v or "f16"
    named = (k if k == v else f"{k}/{v}") if engine.cache_type_k or engine.cache_type_v else ""
    # a budget in tokens has nothing to win from another type
    in_tokens = engine.kv.budget is not None

    def stored(name: str, ratio: float) -> str:
        return named or ("f16" if in_tokens else stored_as(path, shape, name, ratio))

    full = [kind for kind in options.full if is_full_given or dense.can_store(shape, kind)]
    return settings(options.names, options.shares, full, stored)


def names_by_type(grid: Sequence[Row]) -> dict[str, list[str]]:
    """The methods of each cache type."""
    found: dict[str, list[str]] = {}
    for row in grid:
        found.setdefault(row.kind, []).append(row.method)
    return {kind: list(dict.fromkeys(names)) for kind, names in found.items()}


def about(engine: EngineOptions) -> list[str]:
    """Model, machine, version and date."""
    from edgekv import __version__
    from edgekv.commands.load import build_info, model_path

    machine = ", ".join(dict.fromkeys(device["description"] for device in build_info()["devices"]))
    return [
        Path(model_path(engine.model)).stem,
        machine,
        f"edgekv {__version__}",
        date.today().isoformat(),
    ]


def check_lengths(llm: Llama, lengths: Sequence[int]) -> None:
    """Raises BadInput for a text that is longer than the context: before it is made, which would
    take as long."""
    longest, n_ctx = max(lengths, default=0), llm.n_ctx()
    if longest > n_ctx:
        trained = llm.metadata.get(f"{llm.metadata.get('general.architecture')}.context_length")
        why = ", as many as this model was trained with" if trained == str(n_ctx) else ""
        raise BadInput(
            f"a text of {longest:,} tokens does not fit the context of {n_ctx:,} tokens{why}; "
            "give shorter --lengths, or a larger -c"
        )


def model(engine: EngineOptions, grid: Sequence[Row]) -> Llama:
    """The model with the first row's cache; the profile is made if a method wants one and there is
    none."""
    from edgekv.choice.choose import learns
    from edgekv.commands.load import load_llama

    hungry = next((row.method for row in grid if learns(row.method)), "snapkv")
    k, _, v = grid[0].kind.partition("/")
    # any share below 1: the cache has to be edgekv's
    return load_llama(
        replace(
            engine,
            kv=replace(engine.kv, ratio=0.5, method=hungry),
            cache_type_k=k,
            cache_type_v=v or k,
        )
    )


def remember(table: Table, engine: EngineOptions) -> None:
    """Keep the results for `edgekv fit`, if they are of caches that it plans."""
    from edgekv.commands.load import model_path
    from edgekv.memory.fit import Wish
    from edgekv_lab.eval import results

    kv = engine.kv
    kept = kv.window, kv.sink, kv.min_tokens
    other = kv.budget or kv.budget_mb or kv.profile or kv.memory
    if other or kept != (Wish.window, Wish.sink, Wish.min_tokens):
        return
    try:
        results.keep(model_path(engine.model), results.results(table))
    except BadInput as error:
        click.echo(f"edgekv: the results are not kept for 'edgekv fit': {error}", err=True)


def keep(table: Table, engine: EngineOptions, path: str) -> None:
    """Add the table to a file of records."""
    from edgekv.commands.load import model_path
    from edgekv_lab import record
    from edgekv_lab.eval.table import columns, rows

    name = "-".join(filter(None, ("eval", table.task.name, table.setting)))
    model = model_path(engine.model)
    record.put(path, name, record.here(table.task.title, columns(table), rows(table), [model]))


def show(table: Table, form: str, plot: str | None) -> None:
    """The table on standard output, its picture in a file."""
    from edgekv_lab.eval import plot as picture
    from edgekv_lab.eval.table import FORMS as FORMATS

    if form != "jsonl":
        click.echo(FORMATS[form](table), nl=False)
    if plot:
        picture.save(table, plot)
