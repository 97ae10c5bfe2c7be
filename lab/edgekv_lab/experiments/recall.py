"""Answers with tokens that are looked up again: the page docs/results/recall.md.

The questions of `edgekv eval answers`, or for numbers that are hidden in one text, are asked after
the text was compressed. The full f16 cache answers; every other cache is judged by the KL
divergence along that answer, at its first token, by the share of tokens that are the same, and by
how many answers would be the same to their end. Bytes are those of main memory behind the text, the
index among them. "question" is the time from a question to the first token of its answer, "next
word" that of one token behind it: medians. A cache is RATIO or RATIO+RECALL (+0: with an archive
alone), or the cache type of a full one; `f16:64` is read in chunks of 64 tokens, which says how
much of a difference is that of sums in another order, and `f16:fast` with edgekv's products and
attention (--kv-fast-prefill), how much is that of kernels; `f16:fast:64` is both. --reference names
another cache than llama.cpp's own f16 that answers.

With --turns there are -n questions about the first text of each file, all in one conversation: each
cache reads the full cache's answers before the next question. With --families or --needles each
cache also answers by itself: "score" is that of its answers, as of `edgekv eval`.
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
from edgekv.conversation import state
from edgekv.learn.divergence import divergence, log_softmax
from edgekv.model.facts import cache_types
from edgekv_lab.eval import metrics
from edgekv_lab.eval.haystack import Count, fill, room
from edgekv_lab.eval.interval import interval
from edgekv_lab.eval.prompt import prompt, template
from edgekv_lab.eval.sample import Sample, SampleRequest
from edgekv_lab.eval.sentences import sentences
from edgekv_lab.eval.tasks import answers, needle, ruler
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
ENDS = 5
OF_TURNS = (f"KL, first {ENDS}", "{:.4f}"), (f"last {ENDS}", "{:.4f}")
OF_SCORES = ("score", "{:.1f} %"), ("interval", "{:.1f} to {:.1f} %")


def load(model: str, n_ctx: int, cache: str, method: str, threads: int) -> Any:
    """cache: see above."""
    how: dict[str, Any] = {"kv_method": method}
    if cache[0].isdigit():
        ratio, _, recall = cache.partition("+")
        how |= {"kv_ratio": float(ratio), "kv_recall": float(recall or 0)}
        how |= {"kv_archive": "temporary" if recall else "off"}
    else:
        name, *more = cache.split(":")
        kind = cache_types[name][0]
        how = {"kv_method": "full", "type_k": kind, "type_v": kind}
        how |= {"kv_fast_prefill": "fast" in more, "flash_attn": True}
        how |= {"n_ubatch": next((int(n) for n in more if n.isdigit()), 512)}
    return edgekv.Llama(model, n_ctx=n_ctx, n_threads=threads, verbose=False, **how)


Logits = NDArray[np.float32]


class Asker:
    """A model with one cache, which is asked question after question behind the same text."""

    in_turns = False
    """Questions follow each other's answers."""

    def __init__(self, llm: Any) -> None:
        self.llm, self.n = llm, 0
        self.state: state.State | None = None

    def read(self, text: Sequence[int]) -> None:
        self.llm.reset()
        self.llm.eval(text)
        self.n = len(text)
        self.state = state.take(self.llm) if self.llm.engine else None  # windows go back by it

    def ask(self, question: Sequence[int]) -> Logits:
        """Logits [n_vocab] behind the text and a question: what came behind the text is taken back,
        but in turns."""
        assert (
            self.in_turns
            or self.llm.back_to(self.n)
            or (self.state and state.put(self.llm, self.state))
        )
        return self.step(question)

    def n_bytes(self) -> tuple[int, int]:
        """Bytes of the text's rows in memory, and of the full f16 cache's."""
        stats = self.llm.kv_stats()
        return stats.n_bytes_used, stats.n_bytes_full

    def step(self, tokens: Sequence[int]) -> Logits:
        self.llm.eval(tokens)
        logits: Logits = self.llm.logits().copy()
        return logits


class Question(NamedTuple):
    """text: tokens that are compressed; rest: those of the question behind them."""

    text: tuple[int, ...]
    rest: tuple[int, ...]
    sample: Sample


class Answer(NamedTuple):
    """The full cache's. log_p: [len(tokens), n_vocab] by which they were chosen."""

    question: Sequence[int]
    tokens: list[int]
    log_p: Logits


def of_full(asker: Asker, question: Sequence[int], most: int) -> Answer:
    """The greedy answer of at most so many tokens."""
    logits, tokens, found = asker.ask(question), list[int](), []
    while True:
        found.append(logits)
        tokens.append(int(logits.argmax()))
        if len(tokens) == most or is_end(asker.llm, tokens[-1]):
            return Answer(question, tokens, log_softmax(np.array(found)))
        logits = asker.step(tokens[-1:])


def is_end(llm: Any, token: int) -> bool:
    vocab = llama_cpp.llama_model_get_vocab(llm.model)
    return bool(llama_cpp.llama_vocab_is_eog(vocab, token))


class Judged(NamedTuple):
    """kl, same [n]: of an answer's tokens; seconds of the question, and of a token behind it."""

    kl: NDArray[Any]
    same: NDArray[Any]
    question: float
    word: float


def judged(asker: Asker, answer: Answer) -> Judged:
    begin = time.perf_counter()
    found = [asker.ask(answer.question)]
    asked = time.perf_counter()
    for token in answer.tokens[:-1]:
        found.append(asker.step([token]))
    word = (time.perf_counter() - asked) / max(len(answer.tokens) - 1, 1)
    got = log_softmax(np.array(found))
    same = got.argmax(1) == np.array(answer.tokens)
    return Judged(divergence(answer.log_p, got), same, asked - begin, word)


def score(asker: Asker, sample: Sample, answer: Answer, is_same: bool) -> float:
    """Of the cache's own answer, which is the full cache's where all tokens are the same."""
    if not is_same:
        answer = of_full(asker, answer.question, sample.max_tokens)
    words = asker.llm.detokenize(answer.tokens).decode(errors="ignore")
    return next(iter(metrics.scores(words, sample).values()))


def texts(asked: Sequence[Question]) -> Iterator[tuple[tuple[int, ...], list[int]]]:
    """Each text, and the numbers of its questions."""
    for text, some in groupby(range(len(asked)), key=lambda i: asked[i].text):
        yield text, list(some)


def row(
    name: str, asker: Asker, asked: Sequence[Question], whole: Sequence[Answer]
) -> tuple[list[Any], dict[str, Any]]:
    """A row of the table, and what it is made of."""
    of, scores, ends, used, full = list[Judged](), list[float](), list[list[Judged]](), 0, 1
    for text, some in texts(asked):
        asker.read(text)
        used, full = asker.n_bytes()
        for i in some:
            of.append(judged(asker, whole[i]))
            sample = asked[i].sample
            if sample.references:
                scores.append(score(asker, sample, whole[i], bool(of[-1].same.all())))
        ends.append(of[-len(some) :])
    kl = [float(one.kl.mean()) for one in of]
    cells = [
        name,
        used / 2**20,
        100 * used / full,
        float(np.mean(kl)),
        [*interval(kl, np.inf, hits=False)],
        float(np.mean([one.kl[0] for one in of])),
        100 * float(np.mean([one.same.mean() for one in of])),
        [sum(bool(one.same.all()) for one in of), len(of)],
        float(np.median([one.question for one in of])),
        1e3 * float(np.median([one.word for one in of])),
    ]
    if asker.in_turns:
        parts = [one[:ENDS] for one in ends], [one[-ENDS:] for one in ends]
        cells += [float(np.mean([x.kl.mean() for one in part for x in one])) for part in parts]
    if scores:
        cells += [100 * float(np.mean(scores)), [100 * x for x in interval(scores)]]
    return cells, {"cache": name, "kl": kl, "first": [float(one.kl[0]) for one in of]}


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
        Sample(
            f"{i}",
            context,
            f"{question} Answer with the number.",
            (text_of.split()[-1].rstrip("."),),
            needle.ANSWER_TOKENS,
            ("contains_all",),
        )
        for i, (text_of, question) in enumerate(said)
    ]


def questions(o: Options, llm: Any) -> list[Question]:
    def tokenize(text: str) -> list[int]:
        found: list[int] = llm.tokenize(text.encode(), add_bos=False)
        return found

    def ask(message: str) -> str:
        chat = [{"role": "user", "content": message}]
        reply = llm.create_chat_completion(chat, max_tokens=48, temperature=0)
        return str(reply["choices"][0]["message"]["content"])

    if o.needles:
        samples = hidden(o.needles, o.lengths, lambda text: len(tokenize(text)))
    elif o.families:
        request = SampleRequest(0, o.n, tokenize, (o.lengths,), families=tuple(o.families))
        samples = list(ruler.samples(request))
    else:
        n, each = (o.n * len(o.files), o.n) if o.turns else (o.skip + o.n, SampleRequest.n_each)
        files = tuple(o.files)
        request = SampleRequest(0, n, tokenize, (o.lengths,), files, ask=ask, n_each=each)
        samples = list(answers.samples(request))[o.skip :]
    prompts = [prompt(llm, sample, False, False) for sample in samples]
    found = [Question(x.text, x.rest, sample) for x, sample in zip(prompts, samples)]
    if o.turns:
        for _, some in texts(found):
            for i in some[1:]:
                found[i] = found[i]._replace(rest=next_turn(llm, found[i].sample.question))
    return found


def next_turn(llm: Any, question: str) -> tuple[int, ...]:
    """Tokens between an answer and the next one."""
    before = ("user", "A"), ("assistant", "@@"), ("user", question)
    words = template(llm, [{"role": role, "content": text} for role, text in before])
    return tuple(llm.tokenize(words.rpartition("@@")[2].encode(), add_bos=False, special=True))


def asked(caches: str) -> tuple[Decorator, ...]:
    """The options. caches: those that are measured where nobody names any."""
    return (
        MODEL,
        option("-f --file files", multiple=True, help="As of `edgekv eval answers`."),
        option("-n n", type=COUNT, default=12, help="Questions."),
        option("--skip", type=FROM_ZERO, default=0, help="Questions before the first one."),
        option("--turns", is_flag=True, help="Questions in one conversation about each file."),
        option("--needles", type=FROM_ZERO, default=0, help="Numbers in one text; then no file."),
        option("--families", callback=many(str), help="Of RULER, -n of each; then no file."),
        THREADS,
        option("--lengths", type=COUNT, default=3600, help="Tokens of a text."),
        AUTO,
        option("--caches", default=caches, callback=many(str), help="Beside the full f16 cache."),
        option("--reference", default=FULL, metavar="CACHE", help="That answers."),
    )


def asker(o: Options, cache: str) -> Asker:
    n_more = 512 + 128 * o.n * o.turns
    return Asker(load(o.model, o.lengths + n_more, cache, o.method, o.threads))


@experiment(*asked("q8_0,q4_0,0.2,0.1,0.05,0.2+0.05,0.1+0.05,0.1+0.02"))
def command(o: Options) -> None:
    measure(o, asker)


def measure(o: Options, make: Callable[[Options, str], Asker]) -> None:
    """The table of o.caches, each as `make` makes it."""
    full = make(o, o.reference)
    full.in_turns = o.turns
    found, whole = questions(o, full.llm), list[Answer]()
    for text, some in texts(found):
        full.read(text)
        before: list[int] = []
        for i in some:
            question = [*before, *found[i].rest]
            whole.append(of_full(full, question, found[i].sample.max_tokens))
            last = whole[-1].tokens[-1]
            before = [last] if o.turns and not is_end(full.llm, last) else []
    is_scored = any(x.sample.references for x in found)
    columns = *COLUMNS, *(OF_TURNS if o.turns else ()), *(OF_SCORES if is_scored else ())
    with sheet(*columns) as table:
        for i, cache in enumerate([o.reference, *o.caches]):
            one = make(o, cache) if i else full
            one.in_turns = o.turns
            name = cache if cache[0].isdigit() else f"full {cache}"
            cells, made_of = row(name, one, found, whole)
            table.add(*cells)
            table.samples.append(made_of)
            one.llm.close()
