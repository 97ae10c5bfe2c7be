"""How far a compressed cache is from the full one while it answers: KL divergence over the tokens that the full cache says.

    python benchmarks/answers.py [--setting aware|agnostic] [--families multiquery,single] [--lengths 2000] [-n 8] [--seed 0]
                                 [--ratios 0.2] [--methods "kvzap;edgekv"] [--tokens 24]

RULER's questions, as `edgekv eval ruler` asks them of the demo model. Whether an answer is right turns on a few close choices, so it says
little of a small change; this says much from few questions. A row is the mean over the questions of a family: the divergence in nats,
that of the first four tokens, its difference from the first method's with the standard error, and the tokens that stay the likeliest.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
from numpy.typing import NDArray

sys.path[:0] = [str(Path(__file__).resolve().parent)]
sys.path.append(str(Path(__file__).resolve().parent.parent))

from process import demo_path, heading  # noqa: E402

from edgekv import Llama  # noqa: E402
from edgekv.eval.perplexity import FULL, log_softmax  # noqa: E402
from edgekv.eval.prompt import prompt  # noqa: E402
from edgekv.eval.reader import Reader  # noqa: E402
from edgekv.reading import feed  # noqa: E402
from edgekv.eval.sample import Request, Sample  # noqa: E402
from edgekv.eval.tasks import ruler  # noqa: E402

FIRST = 4
"""Tokens in which the form of the answer is chosen."""


def main() -> None:
    options = parse()
    llm = Llama(str(demo_path()), kv_ratio=0.5, kv_method="snapkv", n_ctx=max(options.lengths) + 512, n_threads=options.threads,
                n_threads_batch=options.threads, verbose=False)
    reader = Reader(llm, [FULL, *options.methods])
    request = Request(options.seed, options.n, lambda text: llm.tokenize(text.encode(), add_bos=False), tuple(options.lengths), families=tuple(options.families))
    found: dict[tuple[str, float, str], list[tuple[float, float, float]]] = {}
    for sample in ruler.samples(request):
        for (ratio, method), what in differences(reader, sample, options):
            found.setdefault((sample.tags["family"], ratio, method), []).append(what)
    print(heading("answers.py"))
    print("| family | ratio kept | method | KL | first 4 tokens | against the first method | same token, % | questions |\n| --- | ---: | --- |" + " ---: |" * 5)
    for (family, ratio, method), rows in found.items():
        base = found[family, ratio, options.methods[0]]
        more = [row[0] - other[0] for row, other in zip(rows, base, strict=True)]
        error = stdev(more) / len(more) ** 0.5 if len(more) > 1 else float("nan")
        kl, first, same = (fmean(row[i] for row in rows) for i in range(3))
        print(f"| {family} | {ratio:g} | {method} | {kl:.4f} | {first:.4f} | {fmean(more):+.4f} ({error:.4f}) | {100 * same:.1f} | {len(rows)} |")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--setting", choices=("aware", "agnostic"), default="aware")
    parser.add_argument("--families", type=lambda text: text.split(","), default=["multiquery"])
    parser.add_argument("--lengths", type=lambda text: [int(x) for x in text.split(",")], default=[2000])
    parser.add_argument("-n", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ratios", type=lambda text: [float(x) for x in text.split(",")], default=[0.2])
    parser.add_argument("--methods", type=lambda text: text.split(";"), default=["kvzap", "edgekv"])
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def differences(reader: Reader, sample: Sample, options: argparse.Namespace) -> list[tuple[tuple[float, str], tuple[float, float, float]]]:
    """Of every (ratio, method): KL, KL of the first tokens, share of the tokens that stay the likeliest."""
    tokens = prompt(reader.llm, sample, options.setting == "aware", cuts=False)
    reader.read(tokens.text)
    reader.compress(FULL, 1.0)
    fed = [*tokens.rest, *answer(reader, tokens.rest, options.tokens)]

    def logits(method: str, ratio: float) -> NDArray[np.float32]:
        reader.compress(method, ratio)
        return np.concatenate([log_softmax(x) for x in reader.predict(fed)])[-options.tokens :]

    full, out = logits(FULL, 1.0), []
    for ratio in options.ratios:
        for method in options.methods:
            found = logits(method, ratio)
            kl = (np.exp(full) * (full - found)).sum(axis=1)
            out.append(((ratio, method), (float(kl.mean()), float(kl[:FIRST].mean()), float((full.argmax(axis=1) == found.argmax(axis=1)).mean()))))
    return out


def answer(reader: Reader, rest: tuple[int, ...], n: int) -> list[int]:
    """The n likeliest tokens behind the text and `rest`, its end not minded."""
    logits, out = feed(reader.llm, rest) if rest else reader.logits, []
    for _ in range(n):
        out.append(int(logits.argmax()))
        logits = feed(reader.llm, out[-1:])
    return out


if __name__ == "__main__":
    main()
