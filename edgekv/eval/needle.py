"""Needle in a haystack: is a 7-digit number under a named key still found after the KV cache was compressed?

Cases are data (`cases`), rows are counted (`evaluate`). A text is read once for all methods and ratios (`edgekv.eval.reading`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from random import Random
from typing import Any

from .text import sentences

ANSWER_TOKENS = 24  # the demo model answers in a sentence of about 16
KEY_COLOURS = "amber azure bronze copper crimson golden indigo ivory jade lilac ochre olive pearl ruby scarlet silver teal violet".split()
KEY_NAMES = ("anchor badger beacon camel compass falcon fox hammer harp heron lantern lion mirror owl panther raven rocket saddle "
             "stag tiger trumpet turtle walrus wolf").split()
WORDINGS = (  # (the needle, the question)
    ("The access code for the {key} is {number}.", "What is the access code for the {key}?"),
    ("Please note that the number of the {key} is {number}.", "What is the number of the {key}?"),
    ("The secret number of the {key} is {number}.", "What is the secret number of the {key}?"),
    ("The registration number of the {key} is {number}.", "What is the registration number of the {key}?"),
    ("The phone number of the {key} is {number}.", "What is the phone number of the {key}?"),
)
PROMPT = ("Read the following text. A number is hidden in it. You will be asked for the number afterwards.\n\n{haystack}\n\n"
          "{question} Answer with the number.")


@dataclass(frozen=True)
class Case:
    """One needle. messages: the chat to answer; answer: 7 digits; depth: 0 (start) to 1 (end); n_tokens: length of the text asked for."""

    messages: list[dict[str, str]]
    question: str
    answer: str
    depth: float
    key: str
    n_tokens: int


@dataclass
class Row:
    """Hits of one method at one ratio. kept and n_bytes are means over the cases (rows per layer and KV head; KV bytes)."""

    method: str
    ratio: float
    hits: dict[int, int] = field(default_factory=dict)
    cases: dict[int, int] = field(default_factory=dict)
    n_seen: float = 0.0
    n_kept: float = 0.0
    n_bytes: float = 0.0

    @property
    def n_hits(self) -> int:
        return sum(self.hits.values())

    @property
    def n_cases(self) -> int:
        return sum(self.cases.values())

    def add(self, case: Case, hit: bool, stats: Any) -> None:
        """Count one answered case; stats is what `kv_stats()` returned after it."""
        self.cases[case.n_tokens] = self.cases.get(case.n_tokens, 0) + 1
        self.hits[case.n_tokens] = self.hits.get(case.n_tokens, 0) + hit
        for name in ("n_seen", "n_kept", "n_bytes"):
            mean = getattr(self, name)
            setattr(self, name, mean + (getattr(stats, name) - mean) / self.n_cases)


def cases(seed: int, n: int, lengths: Sequence[int], count: Callable[[str], int]) -> Iterator[Case]:
    """n cases spread evenly over the lengths (tokens of haystack) and, within a length, over the depths.

    count: tokens of a text for the model at hand. The same arguments give the same cases.
    """
    for position, length in enumerate(lengths):
        n_here = n // len(lengths) + (position < n % len(lengths))
        for index in range(n_here):
            yield _case(Random(f"{seed} {length} {index}"), length, (index + 0.5) / n_here, WORDINGS[index % len(WORDINGS)], count)


def _case(rng: Random, n_tokens: int, depth: float, wording: tuple[str, str], count: Callable[[str], int]) -> Case:
    key = f"{rng.choice(KEY_COLOURS)} {rng.choice(KEY_NAMES)}"
    answer = str(rng.randint(1_000_000, 9_999_999))
    statement, question = (part.format(key=key, number=answer) for part in wording)
    text, length = [], count(statement)
    for sentence in sentences(rng):
        length += count(" " + sentence)
        if length > n_tokens:
            break
        text.append(sentence)
    text.insert(round(depth * len(text)), statement)
    content = PROMPT.format(haystack=" ".join(text), question=question)
    return Case([{"role": "user", "content": content}], question, answer, depth, key, n_tokens)


def settings(methods: Sequence[str], ratios: Sequence[float]) -> list[tuple[str, float]]:
    """(method, ratio) of every row: `full` at 1 first, the others at each ratio below 1 (at 1 they are `full`)."""
    compressed = [(method, ratio) for method in methods if method != "full" for ratio in ratios if ratio < 1]
    return [("full", 1.0)] * ("full" in methods or 1 in ratios) + compressed


def evaluate(llm: Any, todo: Sequence[Case], grid: Sequence[tuple[str, float]], aware: bool = True,
             progress: Callable[[int, int], None] = lambda done, total: None) -> list[Row]:
    """One Row for each (method, ratio); decoding is greedy. Every text is read once and compressed anew for each row.

    aware: the question is in the prompt that is compressed; else the text is compressed before the question is asked.
    """
    rows = [Row(method, ratio) for method, ratio in grid]
    for done, case in enumerate(todo):
        progress(done * len(rows), len(todo) * len(rows))
        asker = Asker(llm, case, aware, [row.method for row in rows])
        for row in rows:
            reply, stats = asker.ask(row.method, row.ratio)
            row.add(case, is_hit(reply, case), stats)
    progress(len(todo) * len(rows), len(todo) * len(rows))
    return rows


class Asker:
    """One case, read once, to be answered under several methods and ratios."""

    def __init__(self, llm: Any, case: Case, aware: bool, names: Sequence[str]) -> None:
        from edgekv.choose import choose
        from edgekv.eval.reading import Reading

        self._llm = llm
        self._presets = {name: choose(name, llm.model_path, llm._kv_profile) for name in names}
        text, self._rest = split(llm, case, aware)
        self._reading = Reading(llm, text, list(self._presets.values()))

    def ask(self, name: str, ratio: float) -> tuple[str, Any]:
        """The answer after compression, and `kv_stats()` of the compressed text."""
        from edgekv.eval.reading import answer, feed

        preset = self._presets[name]
        self._reading.compress(preset, replace(self._llm._kv_settings, ratio=ratio, preset=preset))
        stats = self._llm.kv_stats()
        logits = feed(self._llm, self._rest) if self._rest else self._reading.logits
        return answer(self._llm, logits, ANSWER_TOKENS), stats


def split(llm: Any, case: Case, aware: bool) -> tuple[list[int], list[int]]:
    """Tokens that are compressed, and tokens that come after (none if the question is among the first)."""
    prompt = template(llm, case.messages)
    at = len(prompt) if aware else prompt.rindex(case.question)
    head, tail = prompt[:at], prompt[at:]
    return (llm.tokenize(head.encode(), add_bos=True, special=True),
            llm.tokenize(tail.encode(), add_bos=False, special=True) if tail else [])


def template(llm: Any, messages: list[dict[str, str]]) -> str:
    """The messages in the model's own chat template, ready for the answer."""
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    text = llm.metadata.get("tokenizer.chat_template")
    if text is None:
        return "\n\n".join(m["content"] for m in messages) + "\n\n"
    eos = llm._model.token_get_text(llm.token_eos())
    return Jinja2ChatFormatter(template=text, eos_token=eos, bos_token="")(messages=messages).prompt


def ask(llm: Any, case: Case) -> str:
    """The model's answer to a case as a user gets it: the prompt read anew, through the chat."""
    llm.reset()
    reply = llm.create_chat_completion(messages=case.messages, max_tokens=ANSWER_TOKENS, temperature=0.0)
    return reply["choices"][0]["message"]["content"] or ""


def is_hit(answer: str, case: Case) -> bool:
    """Whether the needle's digits stand in the answer, thousands separators aside."""
    return case.answer in answer.replace(",", "")


def interval(hits: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % confidence interval of a share of hits (Wilson score), 0..1."""
    if n == 0:
        return 0.0, 1.0
    share = hits / n
    centre, spread = share + z * z / (2 * n), z * sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, (centre - spread) / (1 + z * z / n)), min(1.0, (centre + spread) / (1 + z * z / n))
