"""edgekv fit: which contexts fit into this machine's memory, and the command line for the best."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import click

from edgekv.base.cache_types import CACHE_TYPES
from edgekv.base.defaults import N_UBATCH, whole_ctx
from edgekv.base.sizes import size_text
from edgekv.chat.drafts import MTP, NONE, Drafting
from edgekv.choice.config import KVConfig
from edgekv.commands import terminal
from edgekv.commands.declare import declared, grouped, option, option_field
from edgekv.commands.loading_options import EXPERTS
from edgekv.commands.named import model_named
from edgekv.commands.options import kv_option, spec_type
from edgekv.commands.report import mib, percent, table
from edgekv.commands.values import AUTO_STORES, COUNT, size
from edgekv.errors import BadInput
from edgekv.model.loading import Loading

if TYPE_CHECKING:
    from edgekv.memory.fit import Planner, Point
    from edgekv.methods import Preset

CTX_DEFAULT = 32768
LOADED_BYTES = 18 * 2**20
"""What a process with a loaded model has that one with a blueprint lacks: the chat template's
engine, graphs, code that runs. Found by edgekv-lab fit at nine points of two models;
docs/results/fit.md has the plans that it makes beside the peaks.
"""


PLANNED = ("window", "tail", "memory", "prefill_memory", "fast_prefill", "archive", "recall")
"""Options of the cache that are planned for; each is a field of `edgekv.memory.fit.Wish`."""


EVICTING = {"archive", "recall"}
"""Of these what makes no sense where nothing is evicted."""


def planned_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that adds them to a command."""
    return declared(command, map(kv_option, PLANNED))


def memory(ctx: click.Context, param: click.Parameter, value: str) -> int | None:
    """Click callback: bytes, None for 'auto'. Raises BadInput."""
    return None if value == "auto" else size(ctx, param, value)


def margin(ctx: click.Context, param: click.Parameter, value: str) -> int:
    """Click callback: bytes, 0 allowed. Raises BadInput."""
    return 0 if value == "0" else size(ctx, param, value) or 0


def ratios(ctx: click.Context, param: click.Parameter, value: str) -> list[float]:
    """Click callback: shares to try, the largest first. Raises BadInput."""
    from edgekv.methods.budget import check_ratio

    return sorted({check_ratio(x.strip()) for x in value.split(",")}, reverse=True)


@dataclass(frozen=True)
class FitOptions:
    """What to plan for. Fields are the options' names."""

    memory_bytes: int | None = option_field(
        "--memory memory_bytes",
        default="auto",
        metavar="SIZE",
        callback=memory,
        help="Memory that may be used, such as 6GiB; auto: what is free now.",
    )
    margin_bytes: int = option_field(
        "--margin margin_bytes",
        default="1GiB",
        metavar="SIZE",
        callback=margin,
        help="Memory of it to leave alone.",
    )
    device: str | None = option_field(
        "--device",
        metavar="NAME",
        help="Device that holds weights and cache, as 'edgekv info' names it; without it the"
        " first GPU, else the CPU.",
    )
    ctx_size: int | None = option_field(
        "-c --ctx-size",
        type=COUNT,
        help=f"Context to fit; without it {CTX_DEFAULT} or what the model was trained with, if"
        " less.",
    )
    cache_type_k: str | None = option_field(
        "-ctk --cache-type-k",
        type=click.Choice(CACHE_TYPES),
        help=(
            "Type of the K cache; without it f16, then q8_0, then q4_0 are tried; below ratio 1"
            f" --kv-method {AUTO_STORES}."
        ),
    )
    cache_type_v: str | None = option_field(
        "-ctv --cache-type-v",
        type=click.Choice(CACHE_TYPES),
        help="Type of the V cache; without it as the K cache.",
    )
    ubatch_size: int = option_field(
        "-ub --ubatch-size", type=COUNT, default=N_UBATCH, help="Physical batch size."
    )
    shares: list[float] = option_field(
        "--ratios shares",
        default="1,0.5,0.3,0.2,0.1",
        metavar="RS",
        callback=ratios,
        help="Shares of the cache to try.",
    )
    kv_method: str = option_field(
        "--kv-method kv_method",
        default="auto",
        metavar="NAME",
        help="Method that is going to be used: some read more than the prompt.",
    )
    parallel: int = option_field(
        "-np --parallel",
        type=click.IntRange(1, 256),
        default=1,
        help="Answers of 'edgekv serve' under way at once, each in a conversation that fills"
        " the context. What waits in --cache-ram comes on top.",
    )


@click.command(
    "fit", short_help="Say which contexts fit into memory, at which ratio and cache type."
)
@model_named()
@grouped("wanted", FitOptions)
@planned_options
@grouped("loading", Loading, EXPERTS)
@option(
    "-md --model-draft --spec-draft-model model_draft",
    metavar="MODEL",
    help="A draft model, which is loaded beside it.",
)
@option(
    "--spec-type",
    default="none",
    metavar="TYPE",
    callback=spec_type,
    help=f"Drafts that are going to be made; {MTP} counts the model's own heads.",
)
@option("--json as_json", is_flag=True, help="Print one JSON object.")
def command(
    model: str,
    wanted: FitOptions,
    loading: Loading,
    model_draft: str | None,
    spec_type: str,
    as_json: bool,
    **cache: Any,
) -> int:
    """Say which contexts fit into memory, at which ratio and cache type, what each costs, and the
    command line to use.

    The context is kept if at all possible; then the ratio is lowered. Hidden states wait as
    --kv-hidden auto chooses; they go to f16 or to a file before the ratio falls. A ratio is a share
    of the bytes of a full f16 cache, whatever the cache type. Sizes are those of one prompt that
    fills the context: weights as they lie in the file, K and V, one layer in full and hidden states
    while the prompt is read, llama.cpp's buffers, and this process. Nothing is moved from a
    GPU to the CPU but what -ot, --cpu-moe and --n-cpu-moe say. The exit code is 2 if nothing fits.
    """
    from edgekv.base.machine import rss_now
    from edgekv.commands import load
    from edgekv.memory.fit import PICKED, TYPES, Planner, Wish
    from edgekv.model.blueprint import Blueprint

    w, path = wanted, load.model_path(model)
    drafting = Drafting(spec_type, draft_model=model_draft)
    place = Device.of(w.device, load.build_info()["devices"])
    total = place.free if w.memory_bytes is None else w.memory_bytes
    if total <= w.margin_bytes:
        example = max(total // 4 // 2**20, 1)
        raise BadInput(
            f"{size_text(total)} of memory leave nothing beside the margin of"
            f" {size_text(w.margin_bytes)}; give more --memory or a smaller --margin, such as"
            f" {example}MiB"
        )
    pairs = [(w.cache_type_k or t, w.cache_type_v or w.cache_type_k or t) for t in TYPES]
    if w.kv_method == "auto" and not (w.cache_type_k or w.cache_type_v):
        pairs[0] = PICKED
    placed = loading.placements()
    on_gpu = place.is_gpu
    with ExitStack() as stack:
        stack.enter_context(terminal.busy("planning"))
        blueprint = stack.enter_context(
            Blueprint(path, w.ubatch_size, on_gpu, placed, with_mtp=MTP in drafting.types)
        )
        draft: Callable[[int, float], int] | None = None
        if model_draft:
            draft = stack.enter_context(planner_of_draft(model_draft, w, on_gpu)).beside
        elif MTP in drafting.types:
            draft = blueprint.mtp_bytes
        n_ctx = whole_ctx(w.ctx_size or min(CTX_DEFAULT, blueprint.n_ctx_train))
        wish = Wish(
            total - w.margin_bytes,
            n_ctx,
            w.shares,
            list(dict.fromkeys(pairs)),
            process=0 if on_gpu else rss_now() + LOADED_BYTES,
            parallel=w.parallel,
            **{name: cache[f"kv_{name}"] for name in PLANNED},
        )
        planner = Planner(
            blueprint,
            preset_of(w.kv_method, path),
            wish,
            w.ubatch_size,
            on_gpu,
            lambda ratio: preset_of(w.kv_method, path, ratio),
            draft,
        )
        words = [
            *(["-np", str(w.parallel)] if w.parallel > 1 else []),
            *(["-md", model_draft] if model_draft else []),
            *(["--spec-type", spec_type] if spec_type != NONE else []),
            *loading.words(),
            *planned_words(cache, set(PLANNED) - EVICTING),
        ]
        evicting = [*planned_words(cache, EVICTING)]
        report = Report(planner, model, path, place, total, w.margin_bytes, words, evicting)
        said = json.dumps(report.record(), indent=2) if as_json else report.text()
    click.echo(said)
    return 0 if report.best else 2


@contextmanager
def planner_of_draft(model: str, wanted: FitOptions, on_gpu: bool) -> Iterator[Planner]:
    """A `with` block with the plan of a draft model, as `edgekv.llama.draft_model` loads it."""
    from edgekv.commands.load import model_path
    from edgekv.memory.fit import PICKED, Planner, Wish
    from edgekv.model.blueprint import Blueprint
    from edgekv.profiles import find

    path = model_path(model)
    types = PICKED if find(path, predicts=True) else ("f16", "f16")
    with Blueprint(path, wanted.ubatch_size, on_gpu=on_gpu) as blueprint:
        yield Planner(
            blueprint,
            preset_of("auto", path),
            Wish(0, blueprint.n_ctx_train, types=[types], parallel=wanted.parallel),
            wanted.ubatch_size,
            on_gpu,
            lambda ratio: preset_of("auto", path, ratio),
        )


def planned_words(cache: dict[str, Any], names: Collection[str]) -> Iterator[str]:
    """What a command line says of some options, but for switches, which a point knows."""
    for name in (x for x in PLANNED if x in names):
        value, usual = cache[f"kv_{name}"], KVConfig.__dataclass_fields__[name].default
        if value != usual and type(value) is not bool:
            yield from (f"--kv-{name.replace('_', '-')}", str(value))


def preset_of(kv_method: str, path: str, ratio: float | None = None) -> Preset:
    """The method that will run, at a ratio whose cache types it picks: `auto` means a profile that
    first use makes where none is found.
    """
    from edgekv import methods
    from edgekv.choice.choose import AUTO, UNPREPARED, choose
    from edgekv.choice.settings import UNKNOWN_RATIO
    from edgekv.profiles import find

    if kv_method == AUTO and find(path, predicts=True) is None:
        return methods.get(UNPREPARED)
    return choose(kv_method, path, ratio=UNKNOWN_RATIO if ratio == 1 else ratio)


@dataclass(frozen=True)
class Device:
    """Where weights and cache go. free, total: its bytes; has_gpu: the build knows a GPU."""

    name: str
    is_gpu: bool
    free: int
    total: int
    has_gpu: bool = False

    @staticmethod
    def of(name: str | None, devices: list[dict[str, Any]]) -> Device:
        """The device of that name, or the first that is no CPU. Raises BadInput for none."""
        from edgekv.base.machine import memory_free, memory_total

        gpus = [d for d in devices if d["name"].upper() != "CPU"]
        if name is None and not gpus or (name or "").upper() == "CPU":
            return Device("CPU", False, memory_free(), memory_total(), bool(gpus))
        for one in gpus:
            if name in (None, one["name"]):
                return Device(one["name"], True, one["memory_free"], one["memory_total"], True)
        there = ", ".join(["CPU", *(one["name"] for one in gpus)])
        raise BadInput(f"there is no device '{name}'; choose one of: {there}")


@dataclass(frozen=True)
class Report:
    """What to tell, as a record for programs and as text for people. words, evicting: what of the
    command line is the same at every point, and where tokens are evicted.
    """

    planner: Planner
    model: str
    path: str
    place: Device
    memory: int
    margin: int
    words: Sequence[str] = ()
    evicting: Sequence[str] = ()

    @cached_property
    def wished(self) -> Point | None:
        return self.planner.best(self.planner.n_ctx)

    @cached_property
    def best(self) -> Point | None:
        return self.wished or self.planner.largest()

    def record(self) -> dict[str, Any]:
        p = self.planner
        return {
            "model": self.model,
            "device": self.place.name,
            "memory_total": self.place.total,
            "memory_free": self.place.free,
            "memory": self.memory,
            "margin": self.margin,
            "n_ctx_wanted": p.wish.n_ctx,
            "n_ctx_train": p.blueprint.n_ctx_train,
            "method": p.preset.name,
            "uncompressed_because": p.blueprint.why,
            "note": self.note(),
            "points": [self.describe(point) for n in p.contexts() for point in p.row(n) if point],
            "best": self.describe(self.best) if self.best else None,
        }

    def describe(self, point: Point) -> dict[str, Any]:
        from edgekv.choice.choose import AUTO
        from edgekv.commands.measured import NOT_MEASURED, known

        types = point.type_k, point.type_v
        evicting = self.evicting if point.ratio < 1 else ()
        name = AUTO if point.picked else self.planner.preset.name
        verb = "serve" if self.planner.wish.parallel > 1 else "chat"
        quality = known(self.path, name, point.ratio, *types)
        auto = self.planner.auto(1.0 if point.limited else point.ratio) if point.picked else None
        if auto and auto.types == types:
            quality = auto.measured + f"; {quality}" * (not quality.startswith(NOT_MEASURED))
        command = point.command(self.model, self.place.is_gpu, self.place.has_gpu, verb)
        command = " ".join([command, *map(shlex.quote, (*self.words, *evicting))])
        return {**asdict(point), "quality": quality, "command": command}

    def note(self) -> str:
        """What the user should not overlook."""
        p = self.planner
        if not self.best:
            slowly = "; on the CPU ('--device CPU') it may, slowly: that is never done by itself"
            elsewhere = slowly * self.place.is_gpu
            return p.refusal() + elsewhere + self.with_margin() + self.without_experts()
        if not self.wished:
            return (
                f"{p.n_ctx:,} tokens do not fit at any of these ratios and types; "
                f"the longest context that does is {self.best.n_ctx:,}{self.with_margin()}"
                f"{self.without_experts()}"
            )
        if p.wish.n_ctx > p.n_ctx:
            return (
                f"the model was trained with {p.blueprint.n_ctx_train:,} tokens, so no longer"
                " context is planned"
            )
        return ""

    def without_experts(self) -> str:
        """What --cpu-moe would leave in main memory, if there is something."""
        n_bytes = self.planner.blueprint.experts if self.place.is_gpu else 0
        if not n_bytes:
            return ""
        return f"; --cpu-moe leaves the experts' {size_text(n_bytes)} in main memory"

    def with_margin(self) -> str:
        """The smaller margin that would do, if one does."""
        n_bytes = self.planner.margin(self.margin)
        if n_bytes is None:
            return ""
        margin = f"{n_bytes // 2**20}MiB" if n_bytes else "0"
        return f"; with --margin {margin} {self.planner.n_ctx:,} tokens would fit"

    def text(self) -> str:
        p = self.planner
        head = [
            f"{self.model} on {self.place.name}: {size_text(self.memory)} of memory,"
            f" {size_text(self.margin)} of it left alone; weights {size_text(p.blueprint.weights)}"
        ]
        head += [f"its cache cannot be compressed: {p.blueprint.why}"] if p.blueprint.why else []
        head += ["by cache type, the share of the cache that can stay (1: all): memory at the peak"]
        kinds = [f"{k}/{v}" if k != v else k for k, v in p._possible_types()]
        rows = [[f"{n:,}", *(cell(point) for point in p.row(n))] for n in p.contexts()]
        parts = [*head, "", table(rows, ["context", *kinds]), ""]
        costs = self.costs(self.best) if self.best else []
        return "\n".join([*parts, *filter(None, [self.note()]), *costs])

    def costs(self, point: Point) -> list[str]:
        from edgekv.memory.hidden import DEVICE

        full = f" (a full f16 cache {mib(point.kv_full)})" if point.ratio < 1 else ""
        there = " in main memory" if self.place.is_gpu else ""  # no part of the device's peak
        aside = there if point.hidden != DEVICE else ""
        rows = [
            ("weights", mib(point.weights)),
            ("other weights, in main memory", mib(point.host_weights)),
            ("kept tokens" if point.ratio < 1 else "KV cache", mib(point.kv) + full),
            (f"of these the index of --kv-recall{there}", mib(point.index)),
            ("new tokens, at most", mib(point.tail)),
            (f"{'all layers' if point.is_whole else 'one layer'} in full", mib(point.layer)),
            ("masks, and the layer as f16", mib(point.masks)),
            (f"hidden states ({point.hidden}){aside}", mib(point.hidden_bytes)),
            (f"queries and inputs{there}", mib(point.inputs)),
            ("compute buffers", mib(point.compute)),
            (f"the other answers under way{there}", mib(point.others)),
            ("draft model or MTP head, and its cache", mib(point.draft)),
            ("process", mib(point.process)),
            ("at the peak", mib(point.peak)),
        ]
        if point.hidden == "disk":
            n_bytes = 4 * self.planner.blueprint.n_embd * point.n_ctx
            rows.append(("and in a temporary file", mib(n_bytes)))
        if point.archive:
            rows.append(("and in the archive's file", mib(point.archive)))
        kept = (
            f"{percent(point.ratio, 1)} of a full f16 cache's bytes,"
            f" {percent(point.n_kept, point.n_ctx)} of the tokens ({point.n_kept:,})"
            if point.ratio < 1
            else "all tokens kept"
        )
        described = self.describe(point)
        return [
            f"{point.n_ctx:,} tokens, {kept}, {point.type_k}/{point.type_v} cache, MiB:",
            table([r for r in rows if r[1] != "0.0"]),
            f"quality: {described['quality']}",
            f"use: {described['command']}",
        ]


def cell(point: Point | None) -> str:
    """One entry of the table: what has to be given up, and the peak."""
    if point is None:
        return "-"
    where = " whole" if point.is_whole else f" hidden {point.hidden}" * (point.hidden != "f32")
    hidden = where if point.stores else ""
    return f"{point.ratio:g}{hidden}: {size_text(point.peak)}"
