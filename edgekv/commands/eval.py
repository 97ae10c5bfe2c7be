"""edgekv eval: measure what a compressed cache costs in quality, on this machine and this model.

A command for each row of `edgekv.eval.tasks`; they share everything but what their task asks for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

from edgekv.commands.options import EngineOptions, engine_options, lengths, method, split_names
from edgekv.errors import BadInput

if TYPE_CHECKING:
    from edgekv import Llama
    from edgekv.eval.sample import Task
    from edgekv.eval.table import Table

FORMS = ("md", "csv", "json", "jsonl")


# ---- options


def methods(ctx: click.Context, param: click.Parameter, value: str) -> list[str]:
    """Click callback: names of methods with commas between them, or semicolons where a name has commas itself."""
    return [method(ctx, param, name) for name in split_names(value)]


def ratios(ctx: click.Context, param: click.Parameter, value: str) -> list[float]:
    """Click callback: comma-separated shares to keep. Raises BadInput."""
    from edgekv.budget import check_ratio

    return [check_ratio(share.strip()) for share in value.split(",")]


def families(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...]:
    """Click callback: comma-separated names, none without a value."""
    return tuple(filter(None, (name.strip() for name in (value or "").split(","))))


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def options_of(task: Task) -> list[Decorator]:
    """What a task's command offers beside the engine's options, in the order of the help."""

    def option(*flags: str, default: str | None = None, **attributes: Any) -> Decorator:
        return click.option(*flags, default=task.defaults.get(flags[-1], default), show_default=default is not None, **attributes)

    grid = [
        option("--methods", "names", default="full,random,streaming,snapkv", metavar="NAMES", callback=methods,
               help="Methods to compare, full and random always among them; 'edgekv methods' lists all. With semicolons between if a name has commas."),
        option("--ratios", "shares", default="1,0.5,0.2,0.1", metavar="RS", callback=ratios,
               help="Shares of the cache to keep. At 1 every method is 'full', which is one row."),
        option("-n", "--cases", "--limit", "n", default="100", type=click.IntRange(min=1), metavar="N", help=f"Samples: {_samples(task)}."),
    ]
    asked = {
        "files": click.option("-f", "--file", "files", multiple=True, required="n_next" not in task.asks, metavar="FILE", help="A file to ask from, may be repeated."),
        "lengths": option("--lengths", "n_tokens", default="1500,3000", metavar="NS", callback=lengths, help="Lengths of the text, in tokens of this model."),
        "families": option("--families", "families", metavar="NAMES", callback=families, help="Only these, with commas between; without it: all."),
        "n_next": option("--next", "n_next", default="256", type=click.IntRange(min=1), metavar="M", help="Tokens behind the text to feed and score."),
    }
    setting = click.option("--setting", type=click.Choice(["aware", "agnostic"]), default="aware", show_default=True,
                           help="aware: the question is in the prompt that is compressed; agnostic: it is asked after the text was compressed.")
    output = [
        click.option("-o", "--output", "form", type=click.Choice(FORMS), default="md", show_default=True, help="Form of the table; jsonl: a line for each prediction instead."),
        click.option("--predictions", metavar="FILE", help="Write every prediction into this file too, a line of JSON each. A call that was stopped goes on from there."),
        click.option("--plot", metavar="PNG", help="Draw the table into this file; needs matplotlib."),
    ]
    return [*grid, *(asked[name] for name in task.asks), *([] if task.predicts else [setting]), *output]


def _samples(task: Task) -> str:
    if "families" in task.asks:
        return "so many of each family, spread over the lengths"
    if task.predicts:
        return "passages, spread over the lengths"
    if "files" not in task.asks:
        return "spread evenly over the lengths"
    return "drawn by the seed, spread over the lengths" if "lengths" in task.asks else "so many of each file, drawn by the seed"


# ---- commands


class Tasks(click.Group):
    """A command for each task, made when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        from edgekv.eval.tasks import TASKS

        return list(TASKS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        from edgekv.eval.tasks import get

        return command_of(get(name)) if name in self.list_commands(ctx) else None


@click.group("eval", cls=Tasks)
def command() -> None:
    """Measure what compressing the cache costs in quality."""


def command_of(task: Task) -> click.Command:
    """The command `edgekv eval <task>`."""

    def call(engine: EngineOptions, **values: Any) -> None:
        run(task, engine, **values)

    call.__doc__ = (f"{task.help}\n\n--methods and --ratios stand in for --kv-method and --kv-ratio. The same --seed (0 if none is given) draws the "
                    "same samples.")
    for decorate in reversed(options_of(task)):
        call = decorate(call)
    return click.command(task.name, short_help=task.title)(engine_options(call))


def run(task: Task, engine: EngineOptions, *, names: list[str], shares: list[float], n: int, form: str, predictions: str | None, plot: str | None,
        setting: str = "", n_tokens: tuple[int, ...] = (), files: tuple[str, ...] = (), families: tuple[str, ...] = (), n_next: int = 0) -> None:
    """Ask a task's samples under every method and ratio, and print the table."""
    from edgekv.eval import plot as picture
    from edgekv.eval.evaluate import evaluate, settings
    from edgekv.eval.predictions import kept, line
    from edgekv.eval.reader import Reader
    from edgekv.eval.sample import Request
    from edgekv.eval.table import Table

    if plot:
        picture.check(plot)
    llm, dense = models(engine, names)
    check_lengths(llm, n_tokens)
    request = Request(max(engine.seed, 0), n, lambda text: llm.tokenize(text.encode(), add_bos=False), n_tokens, files, families, n_next)
    samples, grid = list(task.samples(request)), settings(names, shares)
    reader = Reader(llm, [name for name, _ in grid], dense)
    call = asdict(engine) | {"task": task.name, "setting": setting, "grid": grid, "n": n, "lengths": n_tokens, "files": files,
                             "families": families, "next": n_next}
    with kept(predictions, task.name, setting, call) as answers:
        if form == "jsonl":
            for outcome in answers.outcomes:
                click.echo(line(task.name, setting, outcome), nl=False)
        known = frozenset((o.sample, o.method, o.ratio) for o in answers.outcomes)
        found = evaluate(task, reader, samples, grid, setting == "aware", known)
        with click.progressbar(found, length=len(samples) * len(grid) - len(known), label=task.name, file=sys.stderr) as bar:
            for outcome in bar:
                text = answers.add(outcome)
                if form == "jsonl":
                    click.echo(text, nl=False)
    show(Table(task, setting, answers.outcomes), form, plot)


def check_lengths(llm: Llama, lengths: Sequence[int]) -> None:
    """Raises BadInput for a text that is longer than the context: before it is made, which would take as long."""
    longest, n_ctx = max(lengths, default=0), llm.n_ctx()
    if longest > n_ctx:
        trained = llm.metadata.get(f"{llm.metadata.get('general.architecture')}.context_length")
        why = ", as many as this model was trained with" if trained == str(n_ctx) else ""
        raise BadInput(f"a text of {longest:,} tokens does not fit the context of {n_ctx:,} tokens{why}; "
                       "give shorter --lengths, or a larger -c")


def models(engine: EngineOptions, names: Sequence[str]) -> tuple[Llama, Llama | None]:
    """The model with the cache types that were asked for, and once more with dense rows where `auto` would pick them (`edgekv.dense`)."""
    from edgekv.choose import AUTO, learns
    from edgekv.commands.load import load_llama, model_info, model_path
    from edgekv.dense import fits

    part = replace(engine, kv_ratio=0.5)  # any share below 1: the cache has to be edgekv's
    hungry = next((name for name in names if learns(name)), "snapkv")  # has the profile made, if there is none
    llm = load_llama(replace(part, kv_method=hungry, cache_type_k=engine.cache_type_k or "f16", cache_type_v=engine.cache_type_v or "f16"))
    picked = AUTO in names and not (engine.cache_type_k or engine.cache_type_v or engine.kv_budget) and fits(model_info(model_path(engine.model)))
    return llm, load_llama(replace(part, kv_method=AUTO)) if picked else None


def show(table: Table, form: str, plot: str | None) -> None:
    """The table on standard output, its picture in a file."""
    from edgekv.eval import plot as picture
    from edgekv.eval.table import FORMS as FORMATS

    if form != "jsonl":
        click.echo(FORMATS[form](table), nl=False)
    if plot:
        picture.save(table, plot)
