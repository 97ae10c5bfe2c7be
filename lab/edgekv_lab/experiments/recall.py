"""Answers with tokens that are looked up again: the page docs/results/recall.md.

The questions of `edgekv eval answers`, or for numbers that are hidden in one text, are asked after
the text was compressed. The full f16 cache answers; every other cache is judged by the KL
divergence along that answer, at its first token, by the share of tokens that are the same, and by
how many answers would be the same to their end. Bytes are those of main memory behind the text, the
index among them. "question" is the time from a question to the first token of its answer, "next
word" that of one token behind it: medians. A cache is RATIO or RATIO+RECALL, or the cache type of a
full one; `f16:64` is read in chunks of 64 tokens, which says how much of a difference is that of
sums in another order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, groupby
from random import Random
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import edgekv
from edgekv import llama_cpp
from edgekv.commands.declare import Decorator, option
from edgekv.commands.values import COUNT, FROM_ZERO
from edgekv.learn.divergence import divergence, log_softmax
from edgekv_lab.eval.haystack import Count, fill, room
from edgekv_lab.eval.interval import interval
from edgekv_lab.eval.prompt import EvalPrompt, prompt
from edgekv_lab.eval.sample import Sample, SampleRequest
from edgekv_lab.eval.sentences import sentences
from edgekv_lab.eval.tasks import answers, needle
from edgekv_lab.experiments.experiment import (
    AUTO,
    MODEL,
    THREADS,
    Options,
    experiment,
    many,
    sheet,
)

FULL = "f16"
KINDS = {"f16": 1, "q8_0": 8, "q4_0": 2}
COLUMNS = (
    ("cache", ""),
    ("memory, MiB", "{:.1f}"),
    ("share", "{:.1f} %"),
    ("KL", "{:.4f}"),
    ("interval", "{:.4f} to {:.4f}"),
    ("first token", "{:.4f}"),
    ("same token", "{:.1f} %"),
    ("same answer", "{} of {}"),
    ("question, s", "{:.2f}"),
    ("next word, ms", "{:.0f}"),
)


def load(model: str, n_ctx: int, cache: str, method: str, threads: int) -> Any:
    """cache: see above."""
    how: dict[str, Any] = {"kv_method": method}
    if cache[0].isdigit():
        ratio, _, recall = cache.partition("+")
        how |= {"kv_ratio": float(ratio), "kv_recall": float(recall or 0)}
    else:
        name, _, n_ubatch = cache.partition(":")
        how = {"kv_method": "full", "type_k": KINDS[name], "type_v": KINDS[name]}
        how |= {"flash_attn": True, "n_ubatch": int(n_ubatch or 512)}
    return edgekv.Llama(model, n_ctx=n_ctx, n_threads=threads, verbose=False, **how)


Logits = NDArray[np.float32]


class Asker:
    """A model with one cache, which is asked question after question behind the same text."""

    def __init__(self, llm: Any) -> None:
        self.llm, self.n = llm, 0

    def read(self, text: Sequence[int]) -> None:
        self.llm.reset()
        self.llm.eval(text)
        self.n = len(text)

    def ask(self, question: Sequence[int]) -> Logits:
        """Logits [n_vocab] behind the text and a question: what came behind the text is taken
        back."""
        assert self.llm.back_to(self.n)
        return self.step(question)

    def n_bytes(self) -> tuple[int, int]:
        """Bytes of the text's rows in memory, and of the full f16 cache's."""
        stats = self.llm.kv_stats()
        return stats.n_bytes_used, stats.n_bytes_full

    def step(self, tokens: Sequence[int]) -> Logits:
        self.llm.eval(tokens)
        logits: Logits = self.llm.logits().copy()
        return logits


Answer = tuple[list[int], Logits]


def of_full(asker: Asker, question: Sequence[int], most: int) -> Answer:
    """The full cache's answer, and the log-probabilities it was chosen by."""
    vocab = llama_cpp.llama_model_get_vocab(asker.llm.model)
    logits, tokens, found = asker.ask(question), list[int](), []
    while True:
        found.append(logits)
        tokens.append(int(logits.argmax()))
        if len(tokens) == most or llama_cpp.llama_vocab_is_eog(vocab, tokens[-1]):
            return tokens, log_softmax(np.array(found))
        logits = asker.step(tokens[-1:])


class Judged(NamedTuple):
    """kl, same [n]: of an answer's tokens; seconds of the question, and of a token behind it."""

    kl: NDArray[Any]
    same: NDArray[Any]
    question: float
    word: float


def judged(asker: Asker, question: Sequence[int], answer: Answer) -> Judged:
    tokens, whole = answer
    begin = time.perf_counter()
    found = [asker.ask(question)]
    asked = time.perf_counter()
    for token in tokens[:-1]:
        found.append(asker.step([token]))
    word = (time.perf_counter() - asked) / max(len(tokens) - 1, 1)
    got = log_softmax(np.array(found))
    return Judged(divergence(whole, got), got.argmax(1) == np.array(tokens), asked - begin, word)


def texts(
    prompts: Sequence[EvalPrompt],
) -> Iterator[tuple[tuple[int, ...], list[tuple[int, EvalPrompt]]]]:
    for text, some in groupby(enumerate(prompts), key=lambda x: x[1].text):
        yield text, list(some)


def row(
    name: str, asker: Asker, prompts: Sequence[EvalPrompt], whole: Sequence[Answer]
) -> list[Any]:
    of, used, full = list[Judged](), 0, 1
    for text, some in texts(prompts):
        asker.read(text)
        used, full = asker.n_bytes()
        of += [judged(asker, one.rest, whole[i]) for i, one in some]
    kl = [float(one.kl.mean()) for one in of]
    low, high = interval(kl, np.inf, hits=False)
    return [
        name,
        used / 2**20,
        100 * used / full,
        float(np.mean(kl)),
        [low, high],
        float(np.mean([one.kl[0] for one in of])),
        100 * float(np.mean([one.same.mean() for one in of])),
        [sum(bool(one.same.all()) for one in of), len(of)],
        float(np.median([one.question for one in of])),
        1e3 * float(np.median([one.word for one in of])),
    ]


def hidden(n: int, n_tokens: int, count: Count) -> list[Sample]:
    """Questions for n numbers in one text."""
    rng = Random(0)
    keys = [f"{colour} {name}" for colour in needle.KEY_COLOURS for name in needle.KEY_NAMES]
    said = [
        [part.format(key=key, number=rng.randint(1_000_000, 9_999_999)) for part in wording]
        for key, wording in zip(rng.sample(keys, n), cycle(needle.WORDINGS))
    ]
    text = fill(sentences(rng), room(n_tokens, [one for one, _ in said], count), count)
    for i, (one, _) in reversed(list(enumerate(said))):
        text.insert(round((i + 0.5) / n * len(text)), one)
    context = f"{needle.INSTRUCTION}\n\n{' '.join(text)}"
    return [
        Sample(f"{i}", context, f"{asked} Answer with the number.", (), needle.ANSWER_TOKENS, ())
        for i, (_, asked) in enumerate(said)
    ]


def questions(o: Options, llm: Any) -> list[EvalPrompt]:
    def tokenize(text: str) -> list[int]:
        found: list[int] = llm.tokenize(text.encode(), add_bos=False)
        return found

    if o.needles:
        samples = hidden(o.needles, o.lengths, lambda text: len(tokenize(text)))
    else:
        request = SampleRequest(0, o.skip + o.n, tokenize, (o.lengths,), tuple(o.files))
        samples = list(answers.samples(request))[o.skip :]
    return [prompt(llm, sample, False, False) for sample in samples]


def asked(caches: str) -> tuple[Decorator, ...]:
    """The options. caches: those that are measured where nobody names any."""
    return (
        MODEL,
        option("-f --file files", multiple=True, help="As of `edgekv eval answers`."),
        option("-n n", type=COUNT, default=12, help="Questions."),
        option("--skip", type=FROM_ZERO, default=0, help="Questions before the first one."),
        option("--needles", type=FROM_ZERO, default=0, help="Numbers in one text; then no file."),
        THREADS,
        option("--lengths", type=COUNT, default=3600, help="Tokens of a text."),
        AUTO,
        option("--caches", default=caches, callback=many(str), help="Beside the full f16 cache."),
    )


def asker(o: Options, cache: str) -> Asker:
    return Asker(load(o.model, o.lengths + 512, cache, o.method, o.threads))


@experiment(*asked("q8_0,q4_0,0.2,0.1,0.05,0.2+0.05,0.1+0.05,0.1+0.02"))
def command(o: Options) -> None:
    measure(o, asker)


def measure(o: Options, make: Callable[[Options, str], Asker]) -> None:
    """The table of o.caches, each as `make` makes it."""
    full = make(o, FULL)
    prompts = questions(o, full.llm)
    whole: list[Answer] = []
    for text, some in texts(prompts):
        full.read(text)
        whole += [of_full(full, one.rest, answers.ANSWER_TOKENS) for _, one in some]
    with sheet(*COLUMNS) as table:
        table.add(*row(f"full {FULL}", full, prompts, whole))
        full.llm.close()
        for cache in o.caches:
            one = make(o, cache)
            name = cache if cache[0].isdigit() else f"full {cache}"
            table.add(*row(name, one, prompts, whole))
            one.llm.close()
