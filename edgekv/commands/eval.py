"""edgekv eval: measure what a compressed cache costs in quality, on this machine and this model."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import click

from edgekv.commands.options import EngineOptions, engine_options
from edgekv.commands.report import mib
from edgekv.errors import BadInput
from edgekv.eval.needle import Row, cases, evaluate, interval, settings

PROMPT_TOKENS = 200  # room for the question, the chat template and the answer around a haystack


@click.group("eval")
def command() -> None:
    """Measure what compressing the cache costs in quality."""


def methods(ctx: click.Context, param: click.Parameter, value: str) -> list[str]:
    """Click callback: names of methods with commas between them, or semicolons where a name has commas itself."""
    from edgekv.commands.options import method

    return [method(ctx, param, name.strip()) for name in value.split(";" if ";" in value or "=" in value else ",")]


def ratios(ctx: click.Context, param: click.Parameter, value: str) -> list[float]:
    """Click callback: comma-separated shares to keep. Raises BadInput."""
    from edgekv.budget import check_ratio

    return [check_ratio(share.strip()) for share in value.split(",")]


def lengths(ctx: click.Context, param: click.Parameter, value: str) -> list[int]:
    """Click callback: comma-separated token counts."""
    try:
        counts = [int(length) for length in value.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise click.BadParameter("give numbers of tokens with commas between them, such as 1500,3000", ctx, param)
    return counts


@command.command("needle")
@engine_options
@click.option("--methods", "names", default="full,random,streaming,snapkv", show_default=True, metavar="NAMES", callback=methods,
              help="Methods to compare; 'edgekv methods' lists them.")
@click.option("--ratios", "shares", default="1,0.5,0.2,0.1", show_default=True, metavar="RS", callback=ratios,
              help="Shares of the cache to keep. At 1 every method is 'full', which is one row.")
@click.option("--lengths", "n_tokens", default="1500,3000", show_default=True, metavar="NS", callback=lengths,
              help="Lengths of the text, in tokens of this model.")
@click.option("-n", "--cases", "n_cases", type=click.IntRange(min=1), default=100, show_default=True, metavar="N",
              help="Needles, spread evenly over the lengths and over the depths of the text.")
@click.option("--setting", type=click.Choice(["aware", "agnostic"]), default="aware", show_default=True,
              help="aware: the question is in the prompt that is compressed; agnostic: it is asked after the text was compressed.")
@click.option("-o", "--output", type=click.Choice(["md", "csv", "json"]), default="md", show_default=True, help="Form of the table.")
def needle(engine: EngineOptions, names: list[str], shares: list[float], n_tokens: list[int], n_cases: int, setting: str, output: str) -> None:
    """Hide 7-digit numbers in a text and ask for them, for each method and ratio.

    --methods and --ratios stand in for --kv-method and --kv-ratio. The same --seed (0 if none is given) draws the same cases.
    """
    from edgekv.commands.load import load_llama

    llm = load_llama(replace(engine, kv_ratio=0.5))  # any share below 1: the cache has to be edgekv's
    if max(n_tokens) + PROMPT_TOKENS > llm.n_ctx():
        raise BadInput(f"a text of {max(n_tokens)} tokens does not fit the context of {llm.n_ctx()}; "
                       "give shorter --lengths or a larger --ctx-size")
    todo = list(cases(max(engine.seed, 0), n_cases, n_tokens, lambda text: len(llm.tokenize(text.encode(), add_bos=False))))
    grid = settings(names, shares)
    with click.progressbar(length=len(todo) * len(grid), label="needles", file=sys.stderr) as bar:
        rows = evaluate(llm, todo, grid, setting == "aware", progress=lambda done, total: bar.update(done - bar.pos))
    click.echo(FORMATS[output](rows), nl=False)


def records(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One flat record per row, the same for every output form. Hits by length are named hits_<tokens>."""
    return [{"method": row.method, "ratio": row.ratio, "n_seen": round(row.n_seen), "n_kept": round(row.n_kept),
             "kv_bytes": round(row.n_bytes), **{f"hits_{length}": f"{row.hits[length]}/{n}" for length, n in row.cases.items()},
             "hits": row.n_hits, "cases": row.n_cases, "low": round(interval(row.n_hits, row.n_cases)[0], 3),
             "high": round(interval(row.n_hits, row.n_cases)[1], 3)} for row in rows]


def as_markdown(rows: Sequence[Row]) -> str:
    by_length = list(rows[0].cases)
    head = ["method", "ratio kept", "tokens", "rows kept", "KV MiB", *(f"{length:,} tokens" for length in by_length), "hits", "95 % interval"]
    lines = [head, ["---"] + ["---:"] * (len(head) - 1)]
    for row in rows:
        low, high = interval(row.n_hits, row.n_cases)
        lines.append([row.method, f"{row.ratio:g}", f"{row.n_seen:,.0f}", f"{row.n_kept:,.0f}", mib(row.n_bytes),
                      *(f"{row.hits[length]}/{row.cases[length]}" for length in by_length),
                      f"{row.n_hits}/{row.n_cases}", f"{100 * low:.0f} to {100 * high:.0f} %"])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def as_csv(rows: Sequence[Row]) -> str:
    table = records(rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, table[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()


def as_json(rows: Sequence[Row]) -> str:
    return json.dumps(records(rows), indent=2) + "\n"


FORMATS = {"md": as_markdown, "csv": as_csv, "json": as_json}
