"""Needles found by edgekv beside those found by the torch reference, on the same cases with the same budgets.

    python benchmarks/needle_reference.py [-m demo] [-n 20] [--lengths 1500] [--ratios 0.5,0.2,0.1] [--reference-only]

SnapKV, uniform budget, 4 sinks, window 32, f16 cache. The reference (tests/reference) runs the dequantised weights in float32
with a full cache of which it hides rows; edgekv moves bytes. llama.cpp rounds activations to 8 bits before quantised weights, so
scores differ and with them about a row in a hundred; the table counts the cases where both agree on finding the needle, each
with its own rows, and when edgekv keeps the reference's. The table goes to standard output, every answer to standard error.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402

from edgekv.eval.metrics import contains_all  # noqa: E402
from edgekv.eval.prompt import messages, template  # noqa: E402
from edgekv.eval.reader import Reader  # noqa: E402
from edgekv.eval.sample import Request, Sample  # noqa: E402
from edgekv.eval.tasks import needle  # noqa: E402
from tests.reference.generate import compress, generate  # noqa: E402
from tests.reference.model import Reference  # noqa: E402


@dataclass
class Tally:
    """Hits of both sides at one ratio (1 is the full cache)."""

    ratio: float
    cases: int = 0
    reference: int = 0
    edgekv: int = 0
    agree: int = 0
    same_text: int = 0
    same_rows: int = 0
    """Cases where both agree when edgekv evicts the reference's rows."""


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    llm = load(options)
    reference = Reference(options.model)
    stop = [int(llm.metadata["tokenizer.ggml.eos_token_id"])]
    tallies = [Tally(ratio) for ratio in (1.0, *options.ratios)]
    request = Request(options.seed, options.n, lambda text: llm.tokenize(text.encode(), add_bos=False), tuple(options.lengths))
    todo = list(needle.samples(request))
    for index, case in enumerate(todo):
        reference.reset()
        prompt = reference.prefill(prompt_tokens(llm, case), all_logits=False)
        reader = None if options.reference_only else Reader(llm, ["full", "snapkv"])
        if reader:
            reader.read(prompt_tokens(llm, case))
        for tally in tallies:
            fork = reference.fork()
            if tally.ratio < 1:
                compress(fork, prompt, tally.ratio)
            theirs = llm.detokenize(generate(fork, prompt, needle.ANSWER_TOKENS, stop)).decode(errors="replace")
            ours = answer(reader, tally.ratio) if reader else ""
            given = answer_with_rows(reader, fork) if reader else ""
            count(tally, case, theirs, ours, given)
            print(f"{index + 1}/{len(todo)} ratio {tally.ratio:g} needle {case.references[0]}: reference {theirs!r}, edgekv {ours!r}, "
                  f"with the reference's rows {given!r}", file=sys.stderr, flush=True)
    print(table(tallies))


def parse() -> argparse.Namespace:
    def numbers(kind):
        return lambda text: [kind(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", default="demo")
    parser.add_argument("-n", type=int, default=20)
    parser.add_argument("--lengths", type=numbers(int), default=[1500])
    parser.add_argument("--ratios", type=numbers(float), default=[0.5, 0.2, 0.1])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--reference-only", action="store_true", help="run any library of llama.cpp and leave edgekv's columns empty")
    options = parser.parse_args()
    if options.model == "demo":
        from edgekv.demo import demo_path

        options.model = str(demo_path())
    return options


def load(options: argparse.Namespace) -> Any:
    """The model in edgekv, or in the stock bindings where only their tokenizer is wanted."""
    if options.reference_only:
        from edgekv.llama_cpp import Llama

        return Llama(options.model, n_ctx=512, verbose=False)
    from edgekv import Llama

    return Llama(options.model, kv_ratio=0.5, kv_method="snapkv", n_ctx=max(options.lengths) + 512, n_threads=options.threads, flash_attn=True, verbose=False)


def prompt_tokens(llm: Any, case: Sample) -> list[int]:
    """The case's chat as tokens, through the template in the model file."""
    return llm.tokenize(template(llm, messages(case)).encode(), add_bos=False, special=True)


def answer(reader: Reader, ratio: float) -> str:
    reader.compress("snapkv" if ratio < 1 else "full", ratio)
    return reader.answer([], needle.ANSWER_TOKENS)


def answer_with_rows(reader: Reader, reference: Reference) -> str:
    """edgekv's answer when it keeps the rows that the reference sees."""
    reader.compress("full", 1.0)
    for il, layer in enumerate(reference.layers):
        prompt = layer.visible[:, : reader.llm.n_tokens]  # behind it lies the reference's answer
        reader.llm._kv.store.evict(il, [head.nonzero()[:, 0].numpy().astype("int32") for head in prompt])
    return reader.answer([], needle.ANSWER_TOKENS)


def count(tally: Tally, case: Sample, theirs: str, ours: str, given: str) -> None:
    hits = contains_all(theirs, case) == 1, contains_all(ours, case) == 1
    tally.same_rows += hits[0] == (contains_all(given, case) == 1)
    tally.cases += 1
    tally.reference += hits[0]
    tally.edgekv += hits[1]
    tally.agree += hits[0] == hits[1]
    tally.same_text += theirs.strip() == ours.strip()


def table(tallies: list[Tally]) -> str:
    lines = ["| method | ratio kept | cases | torch reference | edgekv | agree | agree with the reference's rows "
             "| same answer |", "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"]
    lines += [f"| {'full' if tally.ratio == 1 else 'snapkv'} | {tally.ratio:g} | {tally.cases} | {tally.reference} | {tally.edgekv} "
              f"| {tally.agree} | {tally.same_rows} | {tally.same_text} |" for tally in tallies]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
