"""The options of edgekv bench: llama-bench's, by its names, and ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

from edgekv.base.defaults import N_UBATCH
from edgekv.chat.drafts import check_types
from edgekv.choice.config import HIDDEN
from edgekv.commands.declare import given_by, grouped, option
from edgekv.commands.loading_options import LOADING
from edgekv.commands.values import AUTO_STORES, COUNT, SWITCH
from edgekv.errors import BadInput
from edgekv.model.loading import Loading
from edgekv_lab.commands.values import cache_types, names, ratios
from edgekv_lab.record import RECORD


@dataclass(frozen=True)
class BenchOptions:
    """What is measured, and what becomes of it. Fields are the options' names."""

    models: list[str]
    n_prompt: list[int]
    n_gen: list[int]
    n_pairs: list[tuple[int, int]]
    n_depth: list[int]
    n_parallel: list[int]
    spec_type: list[str]
    model_draft: str | None
    fill: str
    n_batch: list[int]
    n_ubatch: list[int]
    type_k: list[str]
    type_v: list[str]
    type_kv: list[str]
    n_threads: list[int]
    n_gpu_layers: list[int]
    flash_attn: list[str]
    kv_ratio: list[float]
    kv_method: list[str]
    kv_hidden: str
    kv_recall: list[float]
    full: list[str]
    repetitions: int
    output: str
    no_warmup: bool
    verbose: bool
    compare: bool
    equal_bytes: bool
    stages: bool
    evaluation: str | None
    eval_cases: int
    synthetic: str | None
    is_long: bool
    out: str
    record: str | None
    loading: Loading = given_by(made=Loading, default_factory=Loading)

    @property
    def types(self) -> list[tuple[str, str]]:
        """Pairs of cache types (K, V), none if nobody named one."""
        if self.type_kv or not (self.type_k or self.type_v):
            return [(kind, kind) for kind in self.type_kv]
        return [(k, v) for k in self.type_k or ["f16"] for v in self.type_v or ["f16"]]


def ints(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> list[int]:
    """Click callback: lists and ranges of numbers. Raises BadInput."""
    from edgekv_lab.bench.spec import parse_ints

    return [n for text in values for n in parse_ints(text, param.opts[-1])]


def pairs(
    ctx: click.Context, param: click.Parameter, values: Sequence[str]
) -> list[tuple[int, int]]:
    """Click callback: 'pp,tg', once or more. Raises BadInput."""
    from edgekv_lab.bench.spec import parse_ints

    found = [parse_ints(text, "-pg") for text in values]
    if any(len(pair) != 2 or min(pair) < 0 for pair in found):
        raise BadInput("-pg takes two numbers, such as 512,128")
    return [(a, b) for a, b in found]


def shares(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> list[float]:
    """Click callback: shares of the tokens, once or more. Raises BadInput."""
    from edgekv.choice.config import AUTO, KVConfig

    found = [KVConfig(recall=name).recall for name in names(ctx, param, values)]
    if AUTO in found:
        raise click.BadParameter("give numbers from 0 up to 1", ctx, param)
    return found


def switches(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> list[str]:
    """Click callback: on, off, auto in llama.cpp's spellings. Raises BadParameter."""
    found = names(ctx, param, values)
    if any(name.lower() not in SWITCH for name in found):
        raise click.BadParameter("give on, off or auto", ctx, param)
    return [SWITCH[name.lower()] for name in found]


def drafts(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> list[str]:
    """Click callback: types of drafts, once or more. Raises BadInput."""
    return [check_types(x.replace("+", ",")) for text in values for x in text.split(",")]


def _many(names: str, *, default: str, help: str, metavar: str = "LIST", **more: Any) -> Any:
    """An option that takes a list, and may be given more than once."""
    return click.option(
        *names.split(),
        multiple=True,
        default=[default] if default else [],
        show_default=default or False,
        metavar=metavar,
        help=help,
        **more,
    )


bench_options = grouped(
    "options",
    BenchOptions,
    (
        _many(
            "-m --model models",
            default="",
            callback=names,
            metavar="MODELS",
            help="Models: GGUF files, or names as for the first word.",
        ),
        _many(
            "-p --n-prompt n_prompt",
            default="512",
            callback=ints,
            help="Tests that read a prompt of so many tokens; 0: none.",
        ),
        _many(
            "-n --n-gen n_gen",
            default="128",
            callback=ints,
            help="Tests that write so many tokens; 0: none.",
        ),
        _many(
            "-pg n_pairs",
            default="",
            callback=pairs,
            metavar="PP,TG",
            help="A test that reads and then writes, timed together.",
        ),
        _many(
            "-d --n-depth n_depth",
            default="0",
            callback=ints,
            help="Tokens that are read before a test begins, and not timed.",
        ),
        _many(
            "-npl -np --parallel n_parallel",
            default="1",
            callback=ints,
            help="Conversations that write together, a token of each in one pass; speeds and bytes "
            "are of all.",
        ),
        _many(
            "--spec-type spec_type",
            default="",
            callback=drafts,
            metavar="TYPES",
            help="Drafts, such as none,ngram-simple: tests that only write have the answer at "
            "temperature 0 behind a text, instead of random tokens. + between several at once.",
        ),
        option(
            "-md --model-draft --spec-draft-model model_draft",
            metavar="MODEL",
            help="The draft model of draft-simple.",
        ),
        option(
            "--fill",
            type=click.Choice(("read", "repeat")),
            default="read",
            help="How a test that only writes gets its depth: by reading it, or by repeating its "
            "first 512 tokens, which takes no time.",
        ),
        _many(
            "-b --batch-size n_batch", default="2048", callback=ints, help="Logical batch sizes."
        ),
        _many(
            "-ub --ubatch-size n_ubatch",
            default=str(N_UBATCH),
            callback=ints,
            help="Physical batch sizes.",
        ),
        _many(
            "-ctk --cache-type-k type_k",
            default="",
            callback=cache_types,
            help="Types of the K cache of compressed rows. If neither -ctk, -ctv nor -ct is "
            f"given, each method stores what a chat would: {AUTO_STORES}; others store f16.",
        ),
        _many(
            "-ctv --cache-type-v type_v",
            default="",
            callback=cache_types,
            help="Types of the V cache; each stands with each K type, as in llama-bench. One that "
            "is left out is f16.",
        ),
        _many(
            "-ct --cache-type type_kv",
            default="",
            callback=cache_types,
            help="Types of both, K and V alike, instead of -ctk and -ctv.",
        ),
        _many(
            "-t --threads n_threads",
            default="",
            callback=ints,
            help="CPU threads; without it: the physical cores.",
        ),
        _many(
            "-ngl --n-gpu-layers n_gpu_layers",
            default="-1",
            callback=ints,
            help="Layers on a GPU; -1: all.",
        ),
        *LOADING,
        _many(
            "-fa --flash-attn flash_attn",
            default="auto",
            callback=switches,
            help="Flash attention of full caches; a compressed one always has it.",
        ),
        _many(
            "--kv-ratio",
            default="0.2",
            callback=ratios,
            help="Shares of the full f16 cache's bytes to keep, whatever the method and the cache "
            "type.",
        ),
        _many(
            "--kv-method",
            default="auto",
            callback=names,
            help="Methods, as of chat; semicolons between them where a name has commas.",
        ),
        option(
            "--kv-hidden",
            type=click.Choice(HIDDEN),
            default="auto",
            help="Where a prompt's hidden states wait.",
        ),
        _many(
            "--kv-recall",
            default="0",
            callback=shares,
            help="Shares of all tokens that each new one looks up in an archive in the cache "
            "folder; 0: no archive.",
        ),
        _many(
            "--full",
            default="f16,q8_0,q4_0",
            callback=cache_types,
            help="Full caches (nothing compressed, llama.cpp's own code) beside every compressed "
            "row; none: no such row.",
        ),
        option(
            "-r --repetitions",
            type=COUNT,
            default=5,
            help="Rounds; in each, every row is measured once.",
        ),
        option(
            "-o --output",
            type=click.Choice(("csv", "json", "jsonl", "md", "sql")),
            default="md",
            help="Form of the table.",
        ),
        option("--no-warmup no_warmup", is_flag=True, help="No short run before each sample."),
        option("-v --verbose", is_flag=True, help="Print what llama.cpp logs of each sample."),
        option(
            "--compare",
            is_flag=True,
            help="Also print each compressed row's ratios to the full ones, and the bytes that "
            "writing a token reads (with -o other than md: on standard error).",
        ),
        option(
            "--equal-bytes",
            is_flag=True,
            help="Full q8_0 and q4_0 caches, each beside larger types at the ratio that takes the "
            "same bytes, instead of --kv-ratio.",
        ),
        option(
            "--stages",
            is_flag=True,
            help="Also print where the time of each compressed prompt goes on the CPU (with -o "
            "other than md: on standard error).",
        ),
        option(
            "--eval evaluation",
            type=click.Choice(("needle",)),
            help="Also find needles under every row's setting.",
        ),
        option("--eval-cases", type=COUNT, default=10, help="Needles for --eval."),
        option(
            "--synthetic",
            metavar="SHAPE[:TYPE]",
            help="A model of this shape with random weights in a temporary file: llama-1b, "
            "llama-3b, llama-8b, qwen-1.5b, qwen-7b, qwen3.5-0.8b, lfm2-moe-1b, gemma4-1b, "
            "deepseek2-1b. TYPE is q4_0, q8_0 or f16.",
        ),
        option(
            "--long is_long",
            is_flag=True,
            help="The long-context table: 4K, 8K, 16K ... (or -d) as far as memory goes, a page "
            "with plots in --out.",
        ),
        option(
            "--out", metavar="FOLDER", default="edgekv-bench", help="Where --long writes its page."
        ),
        RECORD,
    ),
)
