"""The LU-KV profile: rows go where they save the most of what answers will need, given how a score
ranks them.

Source: LU-KV (arXiv 2602.08585), sections 4.2 and 4.3, appendix E. For a score, the rows of a head
are sorted as it would keep them; what each further row adds to the oracle importance that is kept
is made non-increasing (isotonic regression, so that the loss is convex), and
the best gains of all layers and heads are taken: for convex losses this greedy choice is the
optimum.

Two objectives. `paper`: importance adds up to the same in every layer, a choice is made for each
question, and the shares are the mean of the choices. `energy`, the default, differs in three
points. Importance is squared: what an evicted row would have added to a head's output is a vector,
those of many rows add up by their squares, and in a plain sum the little that thousands of rows get
outweighs the few rows that a fact is read from. Layers are compared as they are, for all of them
write into the same residual stream. And one choice
is made for all questions of a text, by the mean of their gains: the mean of choices that each suit
one question suits none.

Different from the paper in both, whose one text has 4,000 words, the texts that come with edgekv
are four: small models answer questions about a page, not about fifteen. And they come with the
answers, which the model reads instead of deciding for itself what to say: a small model makes many
of its answers up, and what it makes up does not show which rows a right answer needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv import native
from edgekv.base.stats import Progress
from edgekv.choice.settings import Settings
from edgekv.engine.observer import QueryObserver
from edgekv.errors import BadInput, EdgeKVError, Unsupported
from edgekv.learn.calibration import TEXTS
from edgekv.learn.probe_profile import MIN_TOKENS, count, hash_of, taking_part
from edgekv.learn.work import Work
from edgekv.llama.llama import Llama
from edgekv.methods import select
from edgekv.model.identity import identify
from edgekv.profiles.file import Profile, scale
from edgekv_lab.makers import oracle
from edgekv_lab.saved import Saved, name_of

RATIOS = tuple(round(0.01 * i, 2) for i in range(1, 100))
LEAST = 0.01
"""Share of its rows that every head keeps, about: all shares are scaled to the ratio again."""
MAX_QUESTION = 60
"""Tokens of a question with what the chat template puts behind it: more would be compressed like a
prompt.
"""
OBJECTIVES = ("energy", "paper")
"""What is minimised: see the top."""
_DECODE = 8
"""Tokens that are read in the time in which one is written, about."""


@dataclass(frozen=True)
class Questioned:
    """A text, questions about it, and their right answers as far as they are known: empty, or one
    for each question, which may be empty.
    """

    text: str
    questions: tuple[str, ...]
    answers: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str, lines: Iterable[str]) -> Questioned:
        """From lines of a question, or of a question, a tab and the answer."""
        parts = [line.partition("\t") for line in map(str.strip, lines) if line]
        return cls(
            text,
            tuple(question.strip() for question, _, _ in parts),
            tuple(answer.strip() for _, _, answer in parts),
        )


def sources() -> list[Questioned]:
    """Four texts with 30 questions and answers, about 4,000 words, that come with edgekv."""
    asked: dict[str, list[str]] = {}
    for line in (TEXTS / "questions.tsv").read_text(encoding="utf-8").splitlines():
        name, _, question = line.partition("\t")
        asked.setdefault(name, []).append(question)
    return [
        Questioned.parse((TEXTS / f"{name}.txt").read_text(encoding="utf-8"), lines)
        for name, lines in asked.items()
    ]


def load(path: str, score: str, n_ctx: int, **options: Any) -> Llama:
    """A model whose cache keeps every row, with `score` as its method. options: of
    `llama_cpp.Llama`.
    """
    options = {"verbose": False, **options}
    return Llama(path, kv_budget=1 << 30, kv_method=f"score={score}", n_ctx=n_ctx, **options)


def make(
    llm: Llama,
    sources: Sequence[Questioned],
    ratios: Sequence[float] = RATIOS,
    *,
    objective: str = OBJECTIVES[0],
    partial: Path | None = None,
    progress: Progress | None = None,
    command: str = "",
) -> Profile:
    """The LU-KV profile for the score of a model from `load`; every question of every source counts
    the same.

    objective: one of OBJECTIVES. partial: where answers and finished texts are kept, so that the
    same call goes on after it was stopped.
    progress: see `edgekv.learn.work`.
    Raises BadInput for a text or questions that do not do, Unsupported if model or score cannot be
    measured.
    """
    s, heads = _checked(llm)
    tokens = [_tokens(llm, source) for source in sources]
    weights, done, found = oracle.OutputWeights(llm.model_path), Saved(partial), []
    shape = len(ratios), *heads.shape
    model = identify(llm.model_path)
    measures = model.digest, s.preset.name, s.window, s.sink, objective, tuple(ratios)
    texts = list(zip(tokens, sources, strict=True))
    known = [_known(llm, *text, source, done) for text, source in texts]

    def name(i: int) -> str:
        return name_of(*measures, tokens[i][0], list(zip(tokens[i][1], known[i], strict=True)))

    def saved(i: int) -> NDArray[np.float64] | None:
        return _shares(done[name(i)], shape) if all(known[i]) and name(i) in done else None

    costs = [cost for text, source in texts for cost in _costs(*text, source)]
    answered = [2 * i for i, answers in enumerate(known) if all(answers)]
    measured_before = [2 * i + 1 for i in range(len(tokens)) if saved(i) is not None]
    work = Work(costs, answered + measured_before, progress)
    for i, (context, asked) in enumerate(tokens):
        if not all(known[i]):
            _answer(llm, context, asked, known[i], done, work.piece(2 * i))
            work.end(2 * i)
        if (shares := saved(i)) is None:
            llm.reset()
            dialogues = list(zip(asked, known[i], strict=True))
            measured = measure(llm, weights, context, dialogues, work.piece(2 * i + 1))
            shares = np.mean([count(g, ratios) for g in gains(*measured, objective)], axis=0)
            done.put(name(i), shares.tolist())
            work.end(2 * i + 1)
        found += [(shares, len(asked))]
    done.remove()
    words = [text for x in sources for text in (x.text, *x.questions, *x.answers)]
    made_from = s.preset.score.name, s.window, s.sink, hash_of(words), command
    return Profile(model, "lukv", tuple(ratios), _mean(found, ratios, heads), *made_from)


def _checked(llm: Llama) -> tuple[Settings, NDArray[np.bool_]]:
    """A model's settings, and [n_layer, n_head_kv] the heads that take part. Raises Unsupported if
    nothing can be measured, EdgeKVError without SciPy: now, and not after minutes.
    """
    if llm.engine is None:
        raise Unsupported(
            f"no profile can be made: the model {llm.kv_stats().note or 'was loaded uncompressed'}"
        )
    preset = llm.engine.settings.preset
    if preset.observe.probe:
        raise Unsupported(
            f"the score '{preset.score.name}' reads a probe of its own: make the profile"
            " with 'edgekv profile probe'"
        )
    _isotonic()
    return llm.engine.settings, taking_part(llm.engine.store)


def _mean(
    found: list[tuple[NDArray[np.float64], int]],
    ratios: Sequence[float],
    heads: NDArray[np.bool_],
) -> NDArray[np.float32]:
    """The texts' shares [n_ratio, n_layer, n_head_kv] by their numbers of questions."""
    shares = np.average([f for f, _ in found], axis=0, weights=[n for _, n in found])
    for i, ratio in enumerate(ratios):  # scaled: the least share must not raise the total
        shares[i, heads] = scale(np.maximum(shares[i, heads], LEAST), ratio)
    return shares.astype(np.float32)


def measure(
    llm: Llama,
    weights: oracle.OutputWeights,
    context: Sequence[int],
    dialogues: Sequence[tuple[Sequence[int], Sequence[int]]],
    progress: Progress | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """The rows' importance [n_question, n_layer, n_head_kv, n_tokens], and [n_layer, n_head_kv,
    n_tokens] the rows as the score keeps them.

    dialogues: tokens of each question and of its answer. Importance is NaN for heads that take no
    part.
    """
    kv, n = llm.engine, len(context)
    assert kv is not None
    s, observer = kv.settings, QueryObserver(kv.settings, context, kv.tokenize)
    pieces = [[*q, *a] for q, a in dialogues]
    ends = n + np.cumsum([len(piece) for piece in pieces])
    steps = [
        native.Observer(int(end) - len(a) - 1, int(end), ("max",))
        for end, (_, a) in zip(ends, dialogues, strict=True)
    ]
    order = np.zeros((len(kv.store.layers), kv.store.n_head_kv, n), np.int32)
    importance = np.full((len(dialogues), *order.shape), np.nan, np.float32)
    observers = [*observer.ranges, *steps]
    with kv.layers(context, observers, pieces=pieces, progress=progress, stays=False) as layers:
        for p in layers:
            il, n_head, heads = p.il, kv.store.layers[p.il].n_head, kv.store.layers[p.il].n_head_kv
            layer = observer.layer_stats(kv.store, p)
            scores = select.protect(
                s.preset.score.score(layer, s.preset.params), layer.pos, n, s.sink, s.window
            )
            norms = np.stack(
                [weights.norms(il, n_head, p.rows(k)[1], k, heads) for k in range(heads)]
            )
            attention = np.stack(
                [p.stat(len(observer.ranges) + i, "max") for i in range(len(steps))]
            )
            importance[:, il, :heads] = attention * norms
            order[il, :heads] = np.argsort(-scores, axis=1, kind="stable")
            p.keep([np.zeros(1, np.int32)] * heads)
    return importance, order


def gains(
    importance: NDArray[np.float32], order: NDArray[np.int32], objective: str = OBJECTIVES[0]
) -> NDArray[np.float32]:
    """float32 [n_choice, n_layer, n_head_kv, n_tokens]: what each further row adds, non-increasing;
    what `measure` gives is taken.

    paper: a choice for every question, the importance of a layer adding up to 1. energy: one
    choice, by the mean over the questions of the squared importance, a question's adding up to 1.
    """
    weight = importance if objective == "paper" else importance**2
    total = np.nansum(weight, axis=(2, 3) if objective == "paper" else (1, 2, 3), keepdims=True)
    weight = weight / np.maximum(total, np.finfo(np.float32).tiny)
    if objective != "paper":
        weight = weight.mean(axis=0, keepdims=True)
    out = np.full_like(weight, np.nan)
    for il, heads in enumerate(np.isfinite(weight[0, :, :, 0])):
        out[:, il, heads] = convex(weight[:, il, heads], order[il, heads])
    return out


def convex(importance: NDArray[np.float32], order: NDArray[np.int32]) -> NDArray[np.float32]:
    """What each further row of a head adds, made non-increasing (PAVA): its sums are the least
    concave curve above the true ones.

    importance: float32 [n_choice, n_head_kv, n_rows]; order: [n_head_kv, n_rows], the rows as the
    score keeps them. Shape as importance.
    """
    isotonic = _isotonic()
    sorted_gains = np.take_along_axis(importance, order[None], axis=2)
    if not sorted_gains.size:
        return sorted_gains
    return np.apply_along_axis(
        lambda gains: isotonic(gains, increasing=False).x, 2, sorted_gains
    ).astype(np.float32)


def _isotonic() -> Callable[..., Any]:
    try:
        from scipy.optimize import isotonic_regression
    except ImportError:
        raise EdgeKVError("LU-KV needs SciPy; run: pip install 'edgekv[profile]'") from None
    return isotonic_regression


def _tokens(llm: Llama, source: Questioned) -> tuple[list[int], list[list[int]]]:
    """Tokens of the text and of each question. Raises BadInput if they do not do."""
    before, between, after = oracle.frame(llm)
    context = llm.tokenize(
        (before + source.text).encode(), add_bos=not before, special=bool(before)
    )
    asked = [
        llm.tokenize((between + q + after).encode(), add_bos=False, special=True)
        for q in source.questions
    ]
    if not asked or max(map(len, asked)) > MAX_QUESTION:
        raise BadInput(f"give questions of at most {MAX_QUESTION} tokens, one on each line")
    room = llm.n_ctx() - MAX_QUESTION - oracle.MAX_ANSWER
    if not MIN_TOKENS <= len(context) <= room:
        raise BadInput(
            f"the text has {len(context)} tokens; this model takes {MIN_TOKENS} to {room}"
        )
    return context, asked


def _known(
    llm: Llama,
    context: list[int],
    asked: list[list[int]],
    source: Questioned,
    done: Saved,
) -> list[list[int]]:
    """Tokens of each answer that came with the text or is in `done`; empty for the others."""
    words = source.answers or [""] * len(asked)
    return [
        (
            llm.tokenize(text.encode(), add_bos=False)[: oracle.MAX_ANSWER]
            if text
            else _saved_answer(llm, done, _answer_name(llm, context, question))
        )
        for text, question in zip(words, asked, strict=True)
    ]


def _answer_name(llm: Llama, context: list[int], question: list[int]) -> str:
    return name_of(identify(llm.model_path).digest, context, question)


def _saved_answer(llm: Llama, done: Saved, name: str) -> list[int]:
    """Empty if `done` has none, or something that is none."""
    found = done[name] if name in done else []
    if not isinstance(found, list) or len(found) > oracle.MAX_ANSWER:
        return []
    is_text = all(type(token) is int and 0 <= token < llm.n_vocab() for token in found)
    return found if is_text else []


def _shares(saved: Any, shape: tuple[int, ...]) -> NDArray[np.float64] | None:
    """What `done` has of a text, None if that is no table of shares."""
    try:
        found = np.array(saved, np.float64)
    except (ValueError, TypeError, OverflowError):
        return None
    return found if found.shape == shape and ((found >= 0) & (found <= 1)).all() else None


def _costs(context: list[int], asked: list[list[int]], source: Questioned) -> tuple[int, int]:
    """What answering and measuring take, in tokens read."""
    unknown = len(asked) - sum(map(bool, source.answers))
    answering = len(context) + _DECODE * oracle.MAX_ANSWER * unknown if unknown else 0
    return answering, len(context) + sum(len(question) + oracle.MAX_ANSWER for question in asked)


def _answer(
    llm: Llama,
    context: list[int],
    asked: list[list[int]],
    answers: list[list[int]],
    done: Saved,
    progress: Progress,
) -> None:
    """Fill in the missing answers: those that the model gives with its full cache. They also go
    into `done`."""
    missing = [i for i, answer in enumerate(answers) if not answer]
    decoding = _DECODE * oracle.MAX_ANSWER
    total = len(context) + decoding * len(missing)
    _read(llm, context, lambda read, n: progress(len(context) * read // max(n, 1), total))
    for n, i in enumerate(missing, 1):
        answers[i] = oracle.decode(llm, len(context), asked[i])
        done.put(_answer_name(llm, context, asked[i]), answers[i])
        progress(len(context) + decoding * n, total)


def _read(llm: Llama, context: list[int], progress: Progress) -> None:
    """The text is the model's conversation."""
    llm.reset()
    llm.kv_progress = progress
    try:
        llm.eval(context)
    finally:
        llm.kv_progress = None
