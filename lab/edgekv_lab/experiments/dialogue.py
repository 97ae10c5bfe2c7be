"""What compression does to long answers and to many turns: the page docs/results/dialogue.md.

words: the full cache answers a question in --tokens tokens (sampled at 0.7; an end is not allowed).
Every other cache is fed the same tokens one by one: the KL divergence to the full cache along them.

turns: a text with five facts, five questions about them, a second text with five others, and then
questions about both in turns, twenty in all. Each cache answers in its own conversation: right is
an answer that has the fact. It is then fed the full cache's conversation: the KL divergence of the
answers' tokens.

A cache is RATIO or RATIO:TAIL, the tail being --kv-tail, in --caches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import click
import numpy as np

import edgekv
from edgekv.chat.template import Chat, ChatTemplate
from edgekv.commands.declare import option
from edgekv.commands.values import COUNT, FROM_ZERO
from edgekv.errors import BadInput
from edgekv.learn.divergence import divergence, log_softmax
from edgekv_lab.experiments.experiment import (
    MODEL,
    Options,
    experiment,
    many,
    say,
    sheet,
    text,
    tokens,
)

QUESTIONS = (
    "A farmer has 17 sheep, buys twice as many, and loses a third of them all. Reason step by step,"
    " check every step, and then invent three harder problems of this kind and solve them too.",
    "Explain in detail how a bill of 1,250 is split among five friends of whom one pays twice what"
    " the others pay. Then do the same for seven friends, and for nine.",
    "Write a Python class for a bank account with tests, and explain each method at length.",
)
THINGS = (
    *("lantern", "harbour", "orchard", "violin", "glacier", "compass", "bakery", "tunnel"),
    *("meadow", "clock tower"),
)
N_FACTS, N_TURNS, MOST, BUCKET = 5, 20, 24, 250
FULL = "full"


def load(model: str, n_ctx: int, cache: str) -> Any:
    ratio, _, tail = cache.partition(":")
    how: dict[str, Any] = {"kv_method": "full"}
    if cache != FULL:
        how = {"kv_ratio": float(ratio)} | ({"kv_tail": int(tail)} if tail else {})
    return edgekv.Llama(model, n_ctx=n_ctx, verbose=False, **how)


def said(llm: Any) -> np.ndarray:
    """Log-probabilities of the next token, [1, n_vocab]."""
    return log_softmax(llm.logits()[None])


def tokens_of(llm: Any, text: str) -> list[int]:
    found: list[int] = llm.tokenize(text.encode(), add_bos=False, special=True)
    return found


# ---- one long answer


def words(o: Options) -> None:
    """KL of each stretch of BUCKET tokens, for each question and cache."""
    caches = o.caches
    sides = {c: load(o.model, o.tokens + 512, c) for c in [FULL, *caches]}
    rng, found = np.random.default_rng(o.seed), list[dict[str, Any]]()
    for question in QUESTIONS[: o.n]:
        full = sides[FULL]
        prompt = tokens_of(full, ChatTemplate(full).text_of(Chat([user(question)])))
        for llm in sides.values():
            llm.reset()
            llm.eval(prompt)
        kl: dict[str, list[float]] = {c: [] for c in caches}
        for i in range(o.tokens):
            whole = said(full)
            for c in caches:
                kl[c] += divergence(whole, said(sides[c])).tolist()
            token = sample(full, whole[0], rng)
            for llm in sides.values():
                llm.eval([token])
            if i % 100 == 0:
                say(f"{question[:40]}: {i} of {o.tokens}")
        kept = {c: sides[c].kv_stats() for c in caches}
        found.append(
            {
                "question": question,
                "n_prompt": len(prompt),
                "kl": {c: stretches(kl[c]) for c in caches},
                "kept": {c: s.n_kept / s.n_seen for c, s in kept.items()},
            }
        )
    columns = [(f"KL, {c}", "{:.4f}") for c in caches]
    with sheet(("tokens of the answer", ""), *columns, name="words") as table:
        table.samples += found
        for i in range(len(found[0]["kl"][caches[0]])):
            means = [float(np.mean([a["kl"][c][i] for a in found])) for c in caches]
            table.add(f"{i * BUCKET:,} to {(i + 1) * BUCKET:,}", *means)
        shares = [float(np.mean([a["kept"][c] for a in found])) for c in caches]
        table.add("kept at the end", *(f"{x:.0%}" for x in shares))


def sample(llm: Any, log_p: np.ndarray, rng: np.random.Generator) -> int:
    """At 0.7, and never the end."""
    weights = log_p.astype(np.float64) / 0.7
    weights[llm.token_eos()] = -np.inf
    p = np.exp(weights - weights.max())
    return int(rng.choice(len(p), p=p / p.sum()))


def stretches(kl: Sequence[float]) -> list[float]:
    return [float(np.mean(kl[i : i + BUCKET])) for i in range(0, len(kl), BUCKET)]


# ---- many turns


def turns(o: Options) -> None:
    if not o.files:
        raise BadInput("turns needs a text: give -f FILE")
    caches, conversations = o.caches, list[dict[str, Any]]()
    forced: list[list[dict[str, Any]]] = []  # the full cache's conversations
    n_ctx = 2 * o.tokens + N_TURNS * 128 + 512
    for cache in [FULL, *caches]:
        llm = load(o.model, n_ctx, cache)
        for i in range(o.n):
            path = o.files[i % len(o.files)]
            asked = list(script(llm, text(path), o.tokens, o.seed + i))
            answers = [a["answer"] for a in forced[i]] if cache != FULL else None
            own = converse(llm, asked, None)
            if cache == FULL:
                forced.append(own)
            kl: list[float | None] = [None] * len(own)
            if answers is not None:
                fed = converse(llm, asked, answers)
                pairs = zip(forced[i], fed, strict=True)
                kl = [float(divergence(a["log_p"], b["log_p"]).mean()) for a, b in pairs]
            for a, distance in zip(own, kl, strict=True):
                conversations.append(
                    {"cache": cache, "conversation": i, "about": a["about"], "turn": a["turn"]}
                    | {"right": a["right"], "kl": distance}
                )
            right = sum(a["right"] for a in own)
            say(f"{cache}, {path}: {right} of {len(own)} right")
    show_turns([FULL, *caches], conversations)


def script(llm: Any, book: str, n_tokens: int, seed: int) -> Iterator[tuple[str, str, str]]:
    """What is said in each turn, what is right, and whether the question is about the first text
    before the second came, about the first one after that, or about the second."""
    rng = Random(seed)
    things = rng.sample(THINGS, 2 * N_FACTS)
    codes = {thing: str(rng.randrange(10000, 100000)) for thing in things}
    texts = []
    for part in (0, 1):
        begin = book.find("\n\n", int(len(book) * rng.uniform(0.1 + 0.4 * part, 0.45 + 0.4 * part)))
        found = llm.tokenize(book[begin : begin + 8 * n_tokens].encode(), add_bos=False)
        plain = llm.detokenize(found[:n_tokens]).decode(errors="ignore")
        texts.append(with_facts(plain, things[part * N_FACTS : (part + 1) * N_FACTS], codes))
    first, second = things[:N_FACTS], things[N_FACTS:]
    later = [x for pair in zip(second, first, strict=True) for x in pair]
    order = [*first, *later, *second]
    for turn, thing in enumerate(order):
        late = "second text" if thing in second else "first text later"
        about = "first text" if turn < N_FACTS else late
        question = f"What is the secret code of the {thing}? Answer with the code alone."
        if turn in (0, N_FACTS):
            question = f"Here is a text:\n\n{texts[turn // N_FACTS]}\n\n{question}"
        yield question, codes[thing], about


def with_facts(text: str, things: Sequence[str], codes: dict[str, str]) -> str:
    """A sentence for each thing, spread over the text's paragraphs."""
    parts = text.split("\n\n")
    for i, thing in reversed(list(enumerate(things))):
        at = int(len(parts) * (i + 0.5) / len(things))
        parts.insert(at, f"The secret code of the {thing} is {codes[thing]}.")
    return "\n\n".join(parts)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def converse(
    llm: Any, asked: Sequence[tuple[str, str, str]], answers: Sequence[list[int]] | None
) -> list[dict[str, Any]]:
    """A conversation, with answers that are given or the model's own likeliest."""
    template, messages, before = ChatTemplate(llm), [], ""
    found: list[dict[str, Any]] = []
    llm.reset()
    for turn, (question, right, about) in enumerate(asked):
        messages.append(user(question))
        prompt = template.text_of(Chat(messages))
        if not prompt.startswith(before):
            raise SystemExit("this model's template changes what was said: it cannot be measured")
        llm.eval(tokens_of(llm, prompt[len(before) :]))
        answer: list[int] = []
        log_p = []
        given = answers[turn] if answers is not None else None
        while len(answer) < MOST:
            log_p.append(said(llm))
            if given is not None and len(answer) == len(given):
                break
            token = given[len(answer)] if given is not None else int(log_p[-1].argmax())
            if given is None and token == llm.token_eos():
                break
            answer.append(token)
            llm.eval([token])
        words = llm.detokenize(answer).decode(errors="ignore")
        before = prompt + words
        messages.append({"role": "assistant", "content": words})
        found.append(
            {"answer": answer, "log_p": np.concatenate(log_p[: max(1, len(answer))])}
            | {"right": right in words, "about": about, "turn": turn + 1}
        )
    return found


def show_turns(caches: Sequence[str], turns: Sequence[dict[str, Any]]) -> None:
    kinds = ("first text", "second text", "first text later")
    counts = [(name, "{} of {}") for name in (*(f"right, {kind}" for kind in kinds), "right")]
    with sheet(("cache", ""), *counts, ("KL of the answers", "{:.4f}"), name="turns") as table:
        table.samples += turns
        for cache in caches:
            of_cache = [t for t in turns if t["cache"] == cache]
            groups = defaultdict(list)
            for t in of_cache:
                groups[t["about"]].append(t["right"])
            kl = [t["kl"] for t in of_cache if t["kl"] is not None]
            every = [*(groups[kind] for kind in kinds), [t["right"] for t in of_cache]]
            table.add(cache, *([sum(x), len(x)] for x in every), float(np.mean(kl)) if kl else None)


@experiment(
    click.argument("what", type=click.Choice(["words", "turns"])),
    MODEL,
    option("-f --file files", multiple=True, help="A text; may be repeated."),
    option("-n n", type=COUNT, default=3, help="Questions, or conversations."),
    tokens(2000, "the answer, or of each text"),
    option("--caches", default="0.2,0.2:1024,0.5", callback=many(str), help="RATIO or RATIO:TAIL."),
    option("--seed", type=FROM_ZERO, default=0, help="Of what is drawn."),
)
def command(o: Options) -> None:
    {"words": words, "turns": turns}[o.what](o)
