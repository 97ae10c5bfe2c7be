"""Speed and memory of edgekv beside the unpatched library of the same version, from one run.

Every measurement is a process of its own. A round measures everything once, one after the other, so
that what the machine does meanwhile touches both sides; the table gives medians over the rounds,
and medians of ratios taken within a round. The wanted values stand in the table's heads.
--synthetic: a model of Llama-3.2-1B's shape at 16,384 tokens, one round (long).
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from gguf import GGUFReader

from edgekv.commands.declare import option
from edgekv.commands.values import COUNT
from edgekv_lab.experiments.experiment import (
    METHOD,
    MODEL,
    RATIO,
    THREADS,
    Options,
    experiment,
    many,
    say,
    sheet,
)
from edgekv_lab.experiments.prompts import llama_1b, measured, saved, text_tokens, type_id
from edgekv_lab.sides.reading import Measurement

HIDDEN_BYTES = {"f32": 4, "f16": 2, "disk": 0}
MIB = 1024 * 1024


@dataclass(frozen=True)
class Model:
    """What the bounds need to know of a model file."""

    name: str
    path: str
    n_layer: int
    n_embd: int


@dataclass(frozen=True)
class Plan:
    """One table: a model, its prompt, what to keep of it and how."""

    model: Model
    tokens: str
    n_prompt: int
    ratio: float
    n_threads: int
    n_decode: int
    hidden: list[str]
    method: str

    @property
    def n_kept(self) -> int:
        return int(self.ratio * self.n_prompt)

    def measurements(self, kind: str) -> dict[str, Measurement]:
        """By name: the unpatched library at the whole prompt and at really as many tokens as are
        kept, then edgekv.
        """
        stock = Measurement(
            "stock",
            self.model.path,
            self.tokens,
            self.n_prompt,
            self.n_decode,
            type_id(kind),
            self.n_threads,
        )
        ours = replace(stock, side="edgekv", ratio=self.ratio, method=self.method)
        return {
            "stock": stock,
            "stock short": replace(stock, n_prompt=self.n_kept),
            **{hidden: replace(ours, hidden=hidden) for hidden in self.hidden},
        }


@experiment(
    MODEL,
    option("--tokens", type=COUNT, help="Of the prompt; without it 7,000, --synthetic: 16,384."),
    RATIO,
    METHOD,
    THREADS,
    option("--types", callback=many(str), help="Cache types; f16,q8_0,q4_0, --synthetic: f16."),
    option("--hidden", default=",".join(HIDDEN_BYTES), callback=many(str), help="As --kv-hidden."),
    option("--decode", type=COUNT, default=64, help="Tokens to write."),
    option("-r --rounds", type=COUNT, help="Rounds; 3, --synthetic: 1."),
    option("--synthetic", is_flag=True, help="A model of Llama-3.2-1B's shape."),
)
def command(o: Options) -> None:
    defaults = (16384, ["f16"], 1) if o.synthetic else (7000, ["f16", "q8_0", "q4_0"], 3)
    for name, value in zip(("tokens", "types", "rounds"), defaults, strict=True):
        setattr(o, name, getattr(o, name) or value)
    with tempfile.TemporaryDirectory() as folder:
        plan = (synthetic_plan if o.synthetic else plan_of)(o, Path(folder))
        print(
            f"Model {plan.model.name}, prompt of {plan.n_prompt:,} tokens, ratio {plan.ratio:g}"
            f" ({plan.n_kept:,} tokens kept), method {plan.method}, {plan.n_threads} threads,"
            f" {plan.n_decode} tokens decoded, {o.rounds} rounds.\n"
        )
        for kind in o.types:
            show(plan, kind, [one_round(plan, kind, number) for number in range(o.rounds)])


def plan_of(o: Options, folder: Path) -> Plan:
    """A model file with a prompt of generated text."""
    fields = GGUFReader(o.model).fields
    arch = fields["general.architecture"].contents()
    sizes = (fields[f"{arch}.{name}"].contents() for name in ("block_count", "embedding_length"))
    model = Model(Path(o.model).name, o.model, *sizes)
    return _plan(o, model, folder, text_tokens(o.model, o.tokens))


def synthetic_plan(o: Options, folder: Path) -> Plan:
    """The synthetic model with a prompt of random tokens."""
    shape, path, tokens = llama_1b(folder, o.tokens)
    name = f"of {shape.name}'s shape (random q4_0 weights, vocabulary cut to {shape.n_vocab:,})"
    return _plan(o, Model(name, path, shape.n_layer, shape.n_embd), folder, tokens)


def _plan(o: Options, model: Model, folder: Path, tokens: list[int]) -> Plan:
    file = saved(folder, tokens)
    return Plan(model, file, o.tokens, o.ratio, o.threads, o.decode, o.hidden, o.method)


def one_round(plan: Plan, kind: str, number: int) -> dict[str, dict[str, Any]]:
    """Every measurement of one cache type, once. Later rounds go backwards, so that neither side is
    always first.
    """
    names = list(plan.measurements(kind).items())
    results = {}
    for name, what in names if number % 2 == 0 else reversed(names):
        hidden = what.hidden if what.side == "edgekv" else ""
        say(f"round {number + 1}, {kind}: {what.side} {hidden} {what.n_prompt} tokens")
        results[name] = measured(what)
    return results


def show(plan: Plan, kind: str, rounds: list[dict[str, dict[str, Any]]]) -> None:
    """One cache type: the unpatched library's two rows, then edgekv's, each with what it may take
    and what it takes.
    """

    def middle(name: str, key: str) -> float:
        return median(result[name][key] for result in rounds)

    def against(name: str, key: str, other: str) -> float:
        return median(result[name][key] / result[other][key] for result in rounds)

    full = middle(plan.hidden[0], "n_bytes_full")
    columns = (
        ("", ""),
        ("prefill s", "{:.2f}"),
        ("x stock (<= 1.05)", "{:.2f}"),
        (f"KV MiB (<= {plan.ratio:g} x full = {plan.ratio * full / MIB:,.1f} + tails)", "{:,.1f}"),
        ("rows kept", "{:,.0f}"),
        *((name, "{:,.1f}") for name in ("peak KV + buffers MiB", "bound", "peak resident MiB")),
        *((name, "{:,.1f}") for name in ("below stock", "decode tokens/s")),
        (f"x stock at {plan.n_kept:,} (>= 0.95)", "{:.2f}"),
        (f"x stock at {plan.n_prompt:,} (>= 2)", "{:.2f}"),
    )
    about = f"**{kind} cache** (full: {full / MIB:,.1f} MiB)"
    with sheet(*columns, name=kind, about=about, models=[plan.model.path]) as table:
        table.add(
            f"stock, {plan.n_prompt:,} tokens",
            *(middle("stock", "prefill_s"), 1, full / MIB, plan.n_prompt, None, None),
            *(middle("stock", "rss_bytes") / MIB, None, middle("stock", "decode_tps"), None, 1),
        )
        short = middle("stock short", "rss_bytes") / MIB, middle("stock short", "decode_tps")
        kept = f"stock, {plan.n_kept:,} tokens", None, None, None, plan.n_kept, None, None
        table.add(*kept, short[0], None, short[1], 1, None)
        for hidden in plan.hidden:
            bound = (
                plan.ratio * full
                + full / plan.model.n_layer
                + HIDDEN_BYTES[hidden] * plan.model.n_embd * plan.n_prompt
            )
            below = [x["stock"]["rss_bytes"] - x[hidden]["rss_bytes"] for x in rounds]
            table.add(
                f"edgekv, hidden {hidden}",
                *(middle(hidden, "prefill_s"), against(hidden, "prefill_s", "stock")),
                *(middle(hidden, "n_bytes") / MIB, middle(hidden, "n_kept")),
                *(middle(hidden, "n_bytes_peak") / MIB, bound / MIB),
                *(middle(hidden, "rss_bytes") / MIB, median(below) / MIB),
                middle(hidden, "decode_tps"),
                *(against(hidden, "decode_tps", x) for x in ("stock short", "stock")),
            )
