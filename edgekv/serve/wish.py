"""What a request wants written, whatever its protocol."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from edgekv.serve.pattern import Pattern
from edgekv.serve.sampling import Sampling


@dataclass(frozen=True)
class Prompt:
    """tokens: the prompt. parts: texts in it behind which it is compressed by itself, such as a
    document before a question. cuts: numbers of tokens at which another conversation may branch.
    opens_thought: it ends with the opening tag of a thought. front: text at its beginning that is
    not compared with other prompts.
    """

    tokens: list[int]
    parts: list[str] = field(default_factory=list)
    cuts: tuple[int, ...] = ()
    opens_thought: bool = False
    front: Front | None = None


@dataclass(frozen=True)
class Front:
    """Where the changing text stands in a prompt: behind n_before tokens and then the text
    `before`. again: the same prompt with another text in its place.
    """

    pattern: Pattern
    text: str
    n_before: int
    before: str
    again: Callable[[str], Prompt]


@dataclass(frozen=True)
class Trigger:
    """Where a grammar begins and ends to decide: behind the text `open`, until the text `close`."""

    open: str
    grammar: str
    close: str


@dataclass(frozen=True)
class Wish:
    """max_tokens: at most so many; None: until the context is full. n_probs: likeliest tokens to
    name beside each one, None: not even that one. shown: control tokens whose text is written.
    grammar: of the whole answer.
    """

    prompt: Prompt
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None
    stops: tuple[str, ...] = ()
    n_probs: int | None = None
    shown: frozenset[int] = frozenset()
    grammar: str = ""
    trigger: Trigger | None = None
