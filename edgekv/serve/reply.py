"""What a client sees of an answer: `edgekv.chat.reply`, with the tokens' probabilities."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgekv.chat import reply
from edgekv.chat.reply import CallArguments, CallBegun, Delta, Thought
from edgekv.chat.template import Syntax
from edgekv.serve.events import TokenLogprob, Written


@dataclass(frozen=True)
class Text(reply.Text):
    """logprobs: of the tokens since the last text."""

    logprobs: list[TokenLogprob] = field(default_factory=list)


Part = Thought | Text | CallBegun | CallArguments


class Reply:
    """Reads one answer. syntax: of its prompt."""

    def __init__(self, syntax: Syntax) -> None:
        self._reply = reply.Reply(syntax)
        self._logprobs: list[TokenLogprob] = []

    @property
    def message(self) -> reply.Answer:
        return self._reply.message

    def feed(self, written: Written) -> list[Part]:
        """What is certain by now."""
        self._logprobs += written.logprobs
        return self._told(self._reply.feed(written.text))

    def end(self) -> list[Part]:
        """What was held back, when the answer is over."""
        parts = self._told(self._reply.end())
        if self._logprobs:
            parts.append(Text("", self._take_logprobs()))
        return parts

    def _told(self, deltas: list[Delta]) -> list[Part]:
        return [
            Text(delta.text, self._take_logprobs()) if isinstance(delta, reply.Text) else delta
            for delta in deltas
        ]

    def _take_logprobs(self) -> list[TokenLogprob]:
        taken, self._logprobs = self._logprobs, []
        return taken
