"""edgekv bench: speed and memory on this machine, compressed caches beside full ones."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgekv.commands.named import several_named
from edgekv.commands.options import EngineOptions, engine_options
from edgekv.commands.values import TOKENS_MAX
from edgekv.errors import BadInput, EdgeKVError
from edgekv_lab.commands.bench_options import BenchOptions, bench_options

if TYPE_CHECKING:
    from edgekv_lab.bench.runner import CaseProgress, Measurements
    from edgekv_lab.bench.spec import Case, Lists

NEEDLE_TOKENS_MIN = 500
NOT_LONG = {
    "n_prompt": "-p",
    "n_gen": "-n",
    "n_pairs": "-pg",
    "n_parallel": "-npl",
    "spec_type": "--spec-type",
    "kv_recall": "--kv-recall",
    "output": "-o",
    "compare": "--compare",
    "equal_bytes": "--equal-bytes",
    "stages": "--stages",
    "evaluation": "--eval",
}
"""What --long decides itself."""


Given = Callable[[str], bool]
"""Whether the user named an option, by its field in BenchOptions."""


@click.command("bench", short_help="Measure speed and memory, compressed caches beside full ones.")
@several_named
@bench_options
@click.pass_context
def command(ctx: click.Context, options: BenchOptions, named: list[str]) -> None:
    """Measure speed and memory on this machine, in llama-bench's terms.

    Compressed caches stand beside full ones, from the same binary in the same run. Without options
    the compressed row is what `edgekv chat --kv-ratio 0.2` does.

    Every option with LIST takes 1,2,4 or 512-4096*2 or 1-9+2, and every combination is a row. Each
    sample runs in a process of its own, so that its peak memory (the largest resident size, the
    interpreter's included) is its own; rows take turns, so that their ratios hold on a noisy
    machine. A ratio holds for short prompts too: --kv-min-tokens is 1 here.
    """
    is_given = given(ctx)
    if named and options.models:
        raise BadInput(f"models are named twice: '{named[0]}' and -m; leave one out")
    options = replace(options, models=named or options.models)
    check_options(options, is_given)
    with ends_in_order(), model_files(options.models, options.synthetic) as paths:
        lists = lists_of(options, paths, is_given)
        check(lists, options.is_long)
        if options.is_long:
            check_long(options, lists, is_given)
        learn(lists)
        if options.is_long:
            table = long(lists, options, options.n_depth if is_given("n_depth") else [])
            keep(table, {}, options)
            ctx.exit(2 if table.is_short else 0)
        rows = lined_up(lists) if options.equal_bytes else lists.cases()
        table = measure(rows, options)
        needles = needles_of(table, options.eval_cases) if options.evaluation else {}
        show(table, options.output, options.compare or options.equal_bytes, needles)
        keep(table, needles, options)
        if options.stages:
            from edgekv_lab.bench import stages

            parts = stages.as_md(table.cases, table.samples)
            click.echo(f"\n{parts}", nl=False, err=options.output != "md")
        if table.is_short:  # which was said
            ctx.exit(2)


def given(ctx: click.Context) -> Given:
    """Whether the user named an option."""
    return lambda name: getattr(ctx.get_parameter_source(name), "name", "DEFAULT") != "DEFAULT"


def check_options(options: BenchOptions, is_given: Given) -> None:
    """Raises BadInput for options that do not go together."""
    if not options.models and not options.synthetic:
        raise BadInput(
            "there is no model; name one, or give --synthetic llama-1b for one with random weights"
        )
    if options.synthetic and options.evaluation:
        raise BadInput(
            "random weights find no needle; leave --eval out, or give a real model with -m"
        )
    if options.type_kv and (is_given("type_k") or is_given("type_v")):
        raise BadInput("-ct is for K and V alike; give it, or -ctk and -ctv")


def lists_of(options: BenchOptions, paths: Sequence[str], is_given: Given) -> Lists:
    """What the options ask for; what nobody named is what a chat with these models would take."""
    from functools import lru_cache

    from edgekv.choice.stored import stored_as
    from edgekv.commands.load import count_threads, model_info, model_path
    from edgekv.memory import dense
    from edgekv_lab.bench.spec import Lists

    info = lru_cache(model_info)
    full = options.full
    if not is_given("full"):
        full = [kind for kind in full if all(dense.can_store(info(path), kind) for path in paths)]
    method = ["snapkv"] if options.synthetic and not is_given("kv_method") else options.kv_method
    return Lists(
        models=paths,
        n_prompt=options.n_prompt,
        n_gen=options.n_gen,
        pairs=options.n_pairs,
        n_depth=options.n_depth,
        n_batch=options.n_batch,
        n_ubatch=options.n_ubatch,
        types=options.types,
        n_threads=options.n_threads or [count_threads(None)],
        n_gpu_layers=options.n_gpu_layers,
        flash_attn=options.flash_attn,
        kv_method=method,
        kv_ratio=options.kv_ratio,
        kv_hidden=options.kv_hidden,
        kv_recall=options.kv_recall,
        full=full,
        fill=options.fill,
        stored=lambda path, name, ratio: stored_as(path, info(path), name, ratio),
        loading=options.loading,
        n_parallel=options.n_parallel,
        spec_type=options.spec_type or [""],
        draft_model=model_path(options.model_draft) if options.model_draft else None,
    )


def check(lists: Lists, is_long: bool = False) -> None:
    """Raises BadInput for what would fail only after minutes."""
    from edgekv.choice.choose import choose, learns
    from edgekv.commands.load import model_info
    from edgekv.model.facts import check_gguf

    tests = lists.tests()
    if not tests:
        raise BadInput("there is no test; give -p or -n above 0")
    counts = [*lists.n_prompt, *lists.n_gen, *lists.n_depth]
    from_1 = [*lists.n_batch, *lists.n_ubatch, *lists.n_threads, *lists.n_parallel]
    if min(counts) < 0 or min(from_1) < 1:
        raise BadInput(
            "tokens, batch sizes, threads and conversations are counted from 1; -p, -n and -d from"
            " 0"
        )
    check_several(lists)
    check_drafts(lists)
    check_recall(lists)
    longest = max(lists.n_depth, default=0) + (0 if is_long else max(map(sum, tests)))
    if longest > TOKENS_MAX:
        raise BadInput(
            f"-p, -n and -d together are more than any model reads; give at most {TOKENS_MAX:,}"
        )
    if lists.fill == "repeat" and not is_long and any(n for n, _ in tests):
        raise BadInput("--fill repeat is for tests that only write: give -p 0")
    if lists.fill == "repeat" and "off" in lists.flash_attn:
        raise BadInput("--fill repeat needs flash attention: leave -fa off out")
    for model in lists.models:
        check_gguf(model)
        lists.loading.check(model)
        for name in lists.kv_method:
            if not learns(name):
                choose(name, model)
        trained = model_info(model)["n_ctx_train"]
        if longest > trained:
            click.echo(
                f"edgekv: {longest:,} tokens are more than the {trained:,} that {model} was "
                "trained with: speed and memory are measured all the same, answers would be bad",
                err=True,
            )


def check_several(lists: Lists) -> None:
    """Raises BadInput for more conversations, or longer answers of theirs, than there can be."""
    from edgekv.base.defaults import TAIL
    from edgekv.memory.limit import APPEND_MAX
    from edgekv.native import OUTPUTS

    most = max(lists.n_parallel)
    if most >= OUTPUTS:
        raise BadInput(f"-npl {most} is too many: give at most {OUTPUTS - 1}")
    longest = max((n for _, n in lists.tests()), default=0)
    if most > 1 and longest > TAIL - APPEND_MAX:
        raise BadInput(
            "conversations that write together are not compressed meanwhile: give -n at most"
            f" {TAIL - APPEND_MAX} with -npl"
        )


def check_drafts(lists: Lists) -> None:
    """Raises BadInput where answers cannot be written with these drafts."""
    from edgekv.chat.drafts import MODEL

    if not any(lists.spec_type):
        return
    if any(n for n, _ in lists.tests()) or max(lists.n_parallel) > 1 or lists.fill == "repeat":
        raise BadInput("--spec-type is for tests that only write, one answer: give -p 0")
    if any(MODEL in x for x in lists.spec_type) and not lists.draft_model:
        raise BadInput(f"drafts of the type {MODEL} are a model's: give it with -md")


def check_recall(lists: Lists) -> None:
    """Raises BadInput where nothing can be looked up."""
    if not any(lists.kv_recall):
        return
    if max(lists.n_parallel) > 1 or any(lists.spec_type) or lists.fill == "repeat":
        raise BadInput(
            "--kv-recall is for one conversation that is read: leave -npl, --spec-type and --fill"
            " out"
        )


def learn(lists: Lists) -> None:
    """Make the profile of a model that has none, as a chat would on its first use."""
    from edgekv.commands.first_use import make_profile

    ratio, threads = min(lists.kv_ratio), lists.n_threads[0]
    n_gpu_layers = lists.n_gpu_layers[0]
    for model in lists.models:
        for name in lists.kv_method if ratio < 1 else ():
            words = {"-m": model, "--kv-ratio": ratio, "--kv-method": name, "-ngl": n_gpu_layers}
            given = [str(word) for pair in words.items() for word in pair]
            engine = replace(_engine_of(given), loading=lists.loading)
            make_profile(engine, model, threads)


def _engine_of(words: list[str]) -> EngineOptions:
    """The engine's options from words of a command line."""

    @click.command()
    @engine_options
    def read(engine: EngineOptions) -> EngineOptions:
        return engine

    found: EngineOptions = read.main(words, standalone_mode=False)
    return found


def check_long(options: BenchOptions, lists: Lists, is_given: Given) -> None:
    """Raises BadInput for what --long has no place for, and if its folder cannot be made."""
    for name, flag in NOT_LONG.items():
        if is_given(name):
            raise BadInput(
                f"--long decides by itself what it measures and writes: leave {flag} out"
            )
    single = {
        "-m": lists.models,
        "-t": lists.n_threads,
        "-b": lists.n_batch,
        "-ub": lists.n_ubatch,
        "-ngl": lists.n_gpu_layers,
        "-fa": lists.flash_attn,
    }
    for flag, values in single.items():
        if len(values) > 1:
            raise BadInput(f"--long is about one setting: give one value of {flag}")
    folder = Path(options.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(
            f"the folder {folder} cannot be made ({error.strerror}): name another one with --out"
        ) from None


@contextmanager
def ends_in_order() -> Iterator[None]:
    """Whoever ends this process (SIGTERM) ends the sample in work too, and a synthetic model is
    deleted."""

    def stop(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def model_files(models: Sequence[str], synthetic: str | None) -> Iterator[list[str]]:
    """The files to measure; a synthetic one lies in a temporary folder that goes when it is
    done."""
    import tempfile

    from edgekv.commands.load import model_path

    paths = [model_path(name) for name in models]
    if not synthetic:
        yield paths
        return
    from edgekv_lab.bench import synthetic as writer

    shape, kind = writer.parse(synthetic)
    with tempfile.TemporaryDirectory(prefix="edgekv-") as folder:
        path = Path(folder) / f"synthetic-{synthetic.replace(':', '-')}.gguf"
        click.echo(f"edgekv: writing {shape.name} with random {kind} weights", err=True)
        writer.write(path, shape, kind)
        yield [*paths, str(path)]


def lined_up(lists: Lists) -> list[Case]:
    """The rows of --equal-bytes, for every test."""
    from edgekv.commands.load import cache_types
    from edgekv_lab.bench.spec import equal_bytes

    bits = {name: 8 * size / block for name, (_, block, size) in cache_types().items()}
    tests = replace(lists, types=[("f16", "f16")], kv_ratio=[1.0], full=[]).cases()
    return [
        row for name in lists.kv_method for row in equal_bytes(tests, name, lists.kv_hidden, bits)
    ]


def measure(rows: Sequence[Case], options: BenchOptions) -> Measurements:
    """All samples, with progress. After Ctrl-C or an error the rounds that are complete; in the
    first one its rows so far, if there are any."""
    from edgekv_lab.bench.runner import Measurements, computed, run

    table, repetitions = Measurements(rows), options.repetitions
    try:
        with progress(len(rows) * repetitions, not options.verbose) as report:
            warm_up = not options.no_warmup
            return run(rows, repetitions, report, warm_up, table, options.verbose)
    except (KeyboardInterrupt, EdgeKVError) as stopped:
        n_rounds, table = table.n_rounds, table.measured()
        if not table.n_rounds:
            raise
        where = (
            f"after {n_rounds} of {repetitions} rounds"
            if n_rounds
            else f"in the first round, with {len(table.cases)} of {len(rows)} rows"
        )
        click.echo(f"edgekv: stopped {where}" + (f": {stopped}" if str(stopped) else ""), err=True)
        table.computed = computed(table.cases, table.samples)
        table.is_short = isinstance(stopped, EdgeKVError)
        return table


@contextmanager
def progress(total: int, has_bar: bool = True) -> Iterator[CaseProgress]:
    """A bar on standard error that names the row in work; a line for each sample without has_bar,
    or where standard error is no terminal."""
    if not (has_bar and sys.stderr.isatty()):

        def say(done: int, total: int, row: Case) -> None:
            if done < total:
                line = f"edgekv: {done + 1} of {total}: {row.test}, {row.setting}"
                click.echo(line, err=True)

        yield say
        return
    with click.progressbar(
        length=total,
        label="bench",
        file=sys.stderr,
        item_show_func=lambda row: row and f"{row.test} {row.setting}",
    ) as bar:

        def report(done: int, total: int, row: Case) -> None:
            bar.update(done - bar.pos, row)

        yield report


def needles_of(table: Measurements, n_cases: int) -> dict[Case, str]:
    """'hits/cases' by row: settings that are the same but for the test are asked once, at the
    longest text of theirs."""
    from edgekv_lab.bench.runner import needles

    longest = max([NEEDLE_TOKENS_MIN, *(max(row.n_prompt, row.n_depth) for row in table.cases)])
    known: dict[Case, str] = {}
    found = {}
    for row in table.cases:
        setting = replace(row, n_prompt=0, n_gen=0, n_depth=0)
        if setting not in known:
            click.echo(f"edgekv: needles, {row.setting}", err=True)
            known[setting] = needles(row, longest, n_cases)
        found[row] = known[setting]
    return found


def show(table: Measurements, output: str, with_ratios: bool, needles: dict[Case, str]) -> None:
    from edgekv_lab.bench import reads
    from edgekv_lab.bench.compare import as_md, ratios
    from edgekv_lab.bench.formats import FORMATS

    records = records_of(table, needles)
    click.echo(FORMATS[output](records), nl=False)
    if with_ratios:
        bytes_read = reads.as_md(records, [row.setting for row in table.cases])
        click.echo(f"\n{as_md(ratios(table))}\n{bytes_read}", nl=False, err=output != "md")


def records_of(table: Measurements, needles: dict[Case, str]) -> list[dict[str, Any]]:
    """The rows in llama-bench's form, with the needles that were found."""
    records = table.records()
    for record, row in zip(records, table.cases, strict=True):
        if row in needles:
            record["eval_needle"] = needles[row]
    return records


def keep(table: Measurements, needles: dict[Case, str], options: BenchOptions) -> None:
    """Add the table to the file of --record, and with --compare its ratios."""
    if not options.record:
        return
    from edgekv_lab import record
    from edgekv_lab.bench import compare
    from edgekv_lab.bench.formats import columns, rows

    found = records_of(table, needles)
    heads = [(head, form) for head, form, _ in columns(found)]
    models = list(dict.fromkeys(row.model for row in table.cases))
    samples = [x | {"model_filename": Path(x["model_filename"]).name} for x in found]
    made = record.here("Speed and memory", heads, rows(found), models, samples)
    record.put(options.record, "bench", made)
    if options.compare or options.equal_bytes:
        ratios = compare.rows(compare.ratios(table))
        made = record.here("Beside full caches", compare.COLUMNS, ratios, models)
        record.put(options.record, "bench-ratios", made)


def long(lists: Lists, options: BenchOptions, depths: list[int]) -> Measurements:
    """The long-context page of the first model. depths: contexts, none for those that fit."""
    from edgekv_lab.bench.long import depths_that_fit, rows, write

    chosen = depths_that_fit(lists, depths)
    table = measure(rows(lists, chosen), options)
    for path in write(table, Path(options.out), sys.argv[1:]):
        click.echo(str(path))
    return table
