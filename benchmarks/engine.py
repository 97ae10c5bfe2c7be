"""Speed and memory of edgekv beside the unpatched library of the same version, from one run.

    python benchmarks/engine.py [--model demo] [--tokens 7000] [--ratio 0.2] [--method snapkv]
                                [--threads 2] [--types f16,q8_0,q4_0] [--rounds 3]
    python benchmarks/engine.py --synthetic     a model of Llama-3.2-1B's shape at 16,384 tokens,
                                                one round (long)

Every measurement is a process of its own (measure.py). A round measures everything once, one after
the other, so that what the machine does meanwhile touches both sides; the table gives medians over
the rounds, and medians of ratios taken within a round. Markdown goes to standard output, progress
to standard error. Nothing here passes or fails: the wanted values stand in the table.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(Path(__file__).resolve().parent)]
sys.path.append(str(ROOT))

from measure import Measurement  # noqa: E402
from process import TYPES, demo_path, heading, llama_1b, measured, saved, text_tokens  # noqa: E402

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
    hidden: tuple[str, ...]
    method: str

    @property
    def n_kept(self) -> int:
        return int(self.ratio * self.n_prompt)

    def measurements(self, kind: str) -> dict[str, Measurement]:
        """By name: the unpatched library at the whole prompt and at really as many tokens as are
        kept, then edgekv.
        """
        shared = dict(
            model=self.model.path,
            tokens=self.tokens,
            n_decode=self.n_decode,
            type=TYPES[kind],
            n_threads=self.n_threads,
        )
        return {
            "stock": Measurement("stock", n_prompt=self.n_prompt, **shared),
            "stock short": Measurement("stock", n_prompt=self.n_kept, **shared),
            **{
                hidden: Measurement(
                    "edgekv",
                    n_prompt=self.n_prompt,
                    ratio=self.ratio,
                    hidden=hidden,
                    method=self.method,
                    **shared,
                )
                for hidden in self.hidden
            },
        }


def main() -> None:
    options = parse()
    print(heading("engine.py"))
    with tempfile.TemporaryDirectory() as folder:
        plan = (synthetic_plan if options.synthetic else plan_of)(options, Path(folder))
        print(
            f"Model {plan.model.name}, prompt of {plan.n_prompt:,} tokens, ratio {plan.ratio:g}"
            f" ({plan.n_kept:,} tokens kept), method {plan.method}, {plan.n_threads} threads,"
            f" {plan.n_decode} tokens decoded, {options.rounds} rounds.\n"
        )
        for kind in options.types:
            print(
                table(
                    plan, kind, [one_round(plan, kind, number) for number in range(options.rounds)]
                ),
                flush=True,
            )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", default="demo")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--ratio", type=float, default=0.2)
    parser.add_argument("--method", default="snapkv")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--types", type=lambda text: text.split(","))
    parser.add_argument(
        "--hidden", type=lambda text: tuple(text.split(",")), default=tuple(HIDDEN_BYTES)
    )
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--synthetic", action="store_true")
    options = parser.parse_args()
    defaults = (16384, ["f16"], 1) if options.synthetic else (7000, ["f16", "q8_0", "q4_0"], 3)
    for name, value in zip(("tokens", "types", "rounds"), defaults, strict=True):
        setattr(options, name, getattr(options, name) or value)
    return options


def plan_of(options: argparse.Namespace, folder: Path) -> Plan:
    """A model file with a prompt of generated text."""
    import gguf

    path = demo_path() if options.model == "demo" else Path(options.model)
    fields = gguf.GGUFReader(str(path)).fields
    arch = fields["general.architecture"].contents()
    model = Model(
        path.name,
        str(path),
        fields[f"{arch}.block_count"].contents(),
        fields[f"{arch}.embedding_length"].contents(),
    )
    return _plan(options, model, folder, text_tokens(str(path), options.tokens))


def synthetic_plan(options: argparse.Namespace, folder: Path) -> Plan:
    """The synthetic model with a prompt of random tokens."""
    shape, path, tokens = llama_1b(folder, options.tokens)
    name = f"of {shape.name}'s shape (random q4_0 weights, vocabulary cut to {shape.n_vocab:,})"
    return _plan(options, Model(name, path, shape.n_layer, shape.n_embd), folder, tokens)


def _plan(options: argparse.Namespace, model: Model, folder: Path, tokens: list[int]) -> Plan:
    return Plan(
        model,
        saved(folder, tokens),
        options.tokens,
        options.ratio,
        options.threads,
        options.decode,
        options.hidden,
        options.method,
    )


def one_round(plan: Plan, kind: str, number: int) -> dict[str, dict[str, Any]]:
    """Every measurement of one cache type, once. Later rounds go backwards, so that neither side is
    always first.
    """
    names = list(plan.measurements(kind).items())
    results = {}
    for name, what in names if number % 2 == 0 else reversed(names):
        print(
            f"round {number + 1}, {kind}: {what.side}"
            f" {what.hidden if what.side == 'edgekv' else ''} {what.n_prompt} tokens",
            file=sys.stderr,
            flush=True,
        )
        results[name] = measured(what)
    return results


def table(plan: Plan, kind: str, rounds: list[dict[str, dict[str, Any]]]) -> str:
    """One cache type: the unpatched library's two rows, then edgekv's, each with what it may take
    and what it takes.
    """

    def middle(name: str, key: str) -> float:
        return median(result[name][key] for result in rounds)

    def against(name: str, key: str, other: str) -> float:
        return median(result[name][key] / result[other][key] for result in rounds)

    full = middle(plan.hidden[0], "n_bytes_full")
    lines = [
        f"**{kind} cache** (full: {mib(full)} MiB)\n",
        (
            f"| | prefill s | x stock (<= 1.05) | KV MiB (<= {plan.ratio:g} x full ="
            f" {mib(plan.ratio * full)} + tails) | rows kept | peak KV + buffers MiB | bound | peak"
            f" resident MiB | below stock | decode tokens/s | x stock at {plan.n_kept:,} (>= 0.95)"
            f" | x stock at {plan.n_prompt:,} (>= 2) |"
        ),
        "| --- " + "| ---: " * 11 + "|",
        (
            f"| stock, {plan.n_prompt:,} tokens | {middle('stock', 'prefill_s'):.2f} | 1 |"
            f" {mib(full)} | {plan.n_prompt:,} | | | {mib(middle('stock', 'rss_bytes'))} | |"
            f" {middle('stock', 'decode_tps'):.1f} | | 1 |"
        ),
        (
            f"| stock, {plan.n_kept:,} tokens | | | | {plan.n_kept:,} | | |"
            f" {mib(middle('stock short', 'rss_bytes'))} | |"
            f" {middle('stock short', 'decode_tps'):.1f} | 1 | |"
        ),
    ]
    for hidden in plan.hidden:
        bound = (
            plan.ratio * full
            + full / plan.model.n_layer
            + HIDDEN_BYTES[hidden] * plan.model.n_embd * plan.n_prompt
        )
        saved = median(
            result["stock"]["rss_bytes"] - result[hidden]["rss_bytes"] for result in rounds
        )
        lines.append(
            f"| edgekv, hidden {hidden} | {middle(hidden, 'prefill_s'):.2f} |"
            f" {against(hidden, 'prefill_s', 'stock'):.2f} | {mib(middle(hidden, 'n_bytes'))} |"
            f" {middle(hidden, 'n_kept'):,.0f} | {mib(middle(hidden, 'n_bytes_peak'))} |"
            f" {mib(bound)} | {mib(middle(hidden, 'rss_bytes'))} | {mib(saved)} |"
            f" {middle(hidden, 'decode_tps'):.1f} |"
            f" {against(hidden, 'decode_tps', 'stock short'):.2f} |"
            f" {against(hidden, 'decode_tps', 'stock'):.2f} |"
        )
    return "\n".join(lines) + "\n"


def mib(n_bytes: float) -> str:
    return f"{n_bytes / MIB:,.1f}"


if __name__ == "__main__":
    main()
