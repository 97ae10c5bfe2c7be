"""The options that commands share, as decorators that hand a command one dataclass per group.

Spelling, defaults and LLAMA_ARG_* names are those of llama.cpp; where llama.cpp has no name in the
environment, it is made by the same rule. What is new begins with --kv- and is EDGEKV_KV_* in the
environment. A flag goes before the environment, the environment before the default.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import click

from edgekv.base.cache_types import CACHE_TYPES
from edgekv.base.defaults import N_UBATCH
from edgekv.chat.drafts import AUTO, MOST, MTP, TYPES, Drafting, check_types
from edgekv.choice.config import KVConfig, option_of
from edgekv.commands.declare import Decorator, declared, given_by, grouped, llama_field, own
from edgekv.commands.declare import llama as _llama
from edgekv.commands.declare import option as _option
from edgekv.commands.loading_options import LOADING
from edgekv.commands.named import model_named
from edgekv.commands.values import (
    AUTO_STORES,
    COUNT,
    FROM_ZERO,
    INTEGER,
    SHARE,
    THREADS,
    Finite,
    gpu_layers,
    predict,
    switch,
)
from edgekv.model.loading import Loading


def spec_type(ctx: click.Context, param: click.Parameter, value: str) -> str:
    """Click callback: kinds of drafts. Raises BadInput."""
    return check_types(value)


def kv_option(field_name: str) -> Decorator:
    """The option of one field of `KVConfig`."""
    one = KVConfig.__dataclass_fields__[field_name]
    option = option_of(one)
    name = f"--kv-{one.name.replace('_', '-')}"
    attributes: dict[str, Any] = {"metavar": option.metavar or None}
    if isinstance(one.default, bool):
        name, attributes = f"{name}/--no-{name[2:]}", {"default": one.default}
    elif one.default is not None:
        attributes["default"] = f"{one.default:g}" if type(one.default) is float else one.default
    if option.choices:
        attributes = {"default": one.default, "type": click.Choice(option.choices)}

    def check(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        return option.check(value, param.opts[0])

    return own(name, help=option.help, callback=check, **attributes)


@dataclass(frozen=True)
class EngineOptions:
    """How a model is loaded. Fields are the options' names."""

    model: str
    ctx_size: int = llama_field(
        "-c --ctx-size",
        type=FROM_ZERO,
        default=0,
        help="Size of the context in tokens; 0: what the model was trained with.",
    )
    batch_size: int = llama_field(
        "-b --batch-size", env="BATCH", type=COUNT, default=2048, help="Logical batch size."
    )
    ubatch_size: int = llama_field(
        "-ub --ubatch-size",
        env="UBATCH",
        type=COUNT,
        default=N_UBATCH,
        help="Physical batch size: tokens of the prompt that are computed at once.",
    )
    threads: int | None = llama_field(
        "-t --threads",
        type=THREADS,
        help="CPU threads; 0: all there are; without it: the physical cores.",
    )
    threads_batch: int | None = llama_field(
        "-tb --threads-batch",
        type=THREADS,
        help="CPU threads while the prompt is read; without it: as --threads.",
    )
    gpu_layers: int = llama_field(
        "-ngl --gpu-layers --n-gpu-layers gpu_layers",
        env="N_GPU_LAYERS",
        default="auto",
        metavar="N",
        callback=gpu_layers,
        help="Layers to put on a GPU: a number, 'auto' or 'all'.",
    )
    loading: Loading = given_by(*LOADING, made=Loading, default_factory=Loading, kw_only=True)
    """Where weights go."""
    flash_attn: str = llama_field(
        "-fa --flash-attn",
        default="auto",
        metavar="[on|off|auto]",
        is_flag=False,
        flag_value="on",
        callback=switch,
        help="Flash attention.",
    )
    cache_type_k: str | None = llama_field(
        "-ctk --cache-type-k",
        type=click.Choice(CACHE_TYPES),
        help=(
            "Type of the K cache; without it f16. If neither type is given and something is"
            f" compressed, --kv-method {AUTO_STORES}."
        ),
    )
    cache_type_v: str | None = llama_field(
        "-ctv --cache-type-v",
        type=click.Choice(CACHE_TYPES),
        help="Type of the V cache; without it as said for -ctk.",
    )
    seed: int = llama_field(
        "-s --seed",
        type=click.IntRange(max=2**32 - 1),
        default=-1,
        help="Seed; -1: another one each time.",
    )
    verbose: bool = llama_field(
        "-v --verbose --log-verbose verbose", is_flag=True, help="Print what llama.cpp logs."
    )
    kv: KVConfig = given_by(
        *(kv_option(x.name) for x in fields(KVConfig) if not option_of(x).is_python_only),
        made=KVConfig,
        prefix="kv_",
    )
    """What --kv-... say."""
    drafts: Drafting = given_by(made=Drafting, prefix="spec_", default=Drafting(), kw_only=True)
    """What --spec-... say; see `drafts_options`."""


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are drawn. Fields are the options' names."""

    predict: int = llama_field(
        "-n --predict --n-predict predict",
        env="N_PREDICT",
        type=INTEGER,
        default=-1,
        callback=predict,
        help="Tokens to write at most; -1: until the end or until the context is full.",
    )
    temp: float = llama_field(
        "--temp --temperature temp",
        env="TEMPERATURE",
        type=Finite(min=0),
        default=0.8,
        metavar="T",
        help="Temperature; 0: always the likeliest token.",
    )
    top_k: int = llama_field(
        "--top-k", type=INTEGER, default=40, metavar="K", help="Draw from the K likeliest; 0: off."
    )
    top_p: float = llama_field(
        "--top-p",
        type=SHARE,
        default=0.95,
        metavar="P",
        help="Draw from the likeliest that together have the probability P; 1: off.",
    )
    min_p: float = llama_field(
        "--min-p",
        type=SHARE,
        default=0.05,
        metavar="P",
        help="Leave out what is less than P times as likely as the likeliest; 0: off.",
    )
    repeat_penalty: float = llama_field(
        "--repeat-penalty",
        type=Finite(min=0, min_open=True),
        default=1.0,
        metavar="X",
        help="Make the last 64 tokens less likely; 1: off.",
    )
    ignore_eos: bool = llama_field(
        "--ignore-eos", is_flag=True, help="Do not stop at the end that the model sees."
    )


DRAFTS: tuple[Decorator, ...] = (
    _llama(
        "--spec-type",
        default=AUTO,
        metavar="TYPE",
        callback=spec_type,
        help=f"Guess tokens and check several at once: {', '.join(TYPES)}. All n-grams are one kind"
        f" here: what followed where the last tokens were the same; {MTP}: the model's own head. Of"
        f" several, with commas, the first that has a guess. {AUTO}: n-grams where they leave the"
        " bits of an answer as they are.",
    ),
    _option(
        "--spec-ngram-simple-size-n --spec-ngram-map-k-size-n --spec-ngram-mod-n-match"
        " spec_ngram_size_n",
        type=click.IntRange(1, 1024),
        default=Drafting.ngram_size_n,
        help="Last tokens that have to be the same before a draft is made.",
    ),
    _option(
        "--spec-ngram-simple-size-m --spec-ngram-map-k-size-m --spec-ngram-mod-n-max"
        " spec_ngram_size_m",
        type=click.IntRange(1, 1024),
        default=Drafting.ngram_size_m,
        help=f"Tokens of a draft at most; more than {MOST} are never checked at once.",
    ),
    _llama(
        "-md --model-draft --spec-draft-model spec_draft_model",
        env="SPEC_DRAFT_MODEL",
        metavar="MODEL",
        help="A smaller model with the same vocabulary, whose guesses are checked.",
    ),
    _llama(
        "--spec-draft-n-max",
        env="SPEC_DRAFT_N_MAX",
        type=FROM_ZERO,
        default=Drafting.draft_n_max,
        metavar="N",
        help="Tokens of its drafts at most; how many there are follows what pays.",
    ),
    _llama(
        "--spec-draft-n-min",
        env="SPEC_DRAFT_N_MIN",
        type=FROM_ZERO,
        default=Drafting.draft_n_min,
        metavar="N",
        help="Shorter drafts are not checked.",
    ),
    _llama(
        "--spec-draft-p-min --draft-p-min spec_draft_p_min",
        env="SPEC_DRAFT_P_MIN",
        type=SHARE,
        default=Drafting.draft_p_min,
        metavar="P",
        help="A draft ends before a token that the draft model holds less likely.",
    ),
)
"""Those of commands that write answers."""


def drafts_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that adds the above, which go into the field `drafts` of `EngineOptions`."""
    return declared(command, DRAFTS)


def engine_and_words(
    usage: str = "", least: int = 0, most: int = 0, optional: bool = False
) -> Decorator:
    """A decorator that adds a model with the engine's options, and passes them as `engine`; the
    command's own words as `words`. See `edgekv.commands.named.model_named`. optional: the model's
    name may be empty.
    """
    engine = grouped("engine", EngineOptions)
    named = model_named(usage, least, most, optional)
    return lambda command: named(engine(command))


engine_options = engine_and_words()
sampling_options = grouped("sampling", SamplingOptions)
