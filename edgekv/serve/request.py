"""What is asked for, whatever the protocol: a prompt, and how its answer is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from edgekv.chat import template
from edgekv.chat.sampling import Sampling
from edgekv.serve.pattern import Pattern


@dataclass(frozen=True)
class Prompt(template.Prompt):
    """A prompt of the server's.

    front: text at its beginning that is not compared with other prompts.
    """

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
class Request:
    """What is to be written, read and bounded, whatever its protocol.

    max_tokens: at most so many; None: until the context is full. n_probs: likeliest tokens to name
    beside each one, None: not even that one; probs_drawn: with their probabilities behind the
    samplers. reasoning_budget: tokens of a thought at most; None: any number. is_fresh: the prompt
    is read anew, whatever is remembered.
    """

    prompt: Prompt = Prompt([])
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None
    stops: tuple[str, ...] = ()
    n_probs: int | None = None
    probs_drawn: bool = False
    reasoning_budget: int | None = None
    is_fresh: bool = False

    @property
    def constraint(self) -> Mapping[str, Any]:
        """What the sampler follows besides, see `edgekv.chat.template.Syntax`."""
        settings = self.prompt.syntax.settings
        if self.reasoning_budget is None:
            return settings
        return {**settings, "reasoning_budget": self.reasoning_budget}
