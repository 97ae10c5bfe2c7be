"""What a client sees of an answer: `edgekv.chat.reply`, with the tokens' probabilities."""

from __future__ import annotations

from dataclasses import replace

from edgekv.chat import reply
from edgekv.chat.completion import finish_of
from edgekv.chat.reply import Part, Text
from edgekv.chat.template import Syntax
from edgekv.serve.events import Done, TokenLogprob, Written


class Reply:
    """Reads one answer, and is what a client sees of it at its end. syntax: of its prompt."""

    done: Done
    """How the answer ended: there is none before `end`."""

    def __init__(self, syntax: Syntax) -> None:
        self._reply = reply.Reply(syntax)
        self._untold: list[TokenLogprob] = []
        self.logprobs: list[TokenLogprob] = []
        """Log-probabilities of all tokens so far."""

    @property
    def message(self) -> reply.Answer:
        return self._reply.message

    @property
    def finish(self) -> str:
        """Why the answer ended, in OpenAI's words."""
        return finish_of(self.done.finish, bool(self.message.calls))

    def feed(self, written: Written) -> list[Part]:
        """What is certain by now."""
        self.logprobs += written.logprobs
        self._untold += written.logprobs
        return self._told(self._reply.feed(written.text))

    def end(self, done: Done) -> list[Part]:
        """What was held back, when the answer is over."""
        self.done = done
        parts = self._told(self._reply.end())
        if self._untold:
            parts.append(Text("", self._take_untold()))
        return parts

    def _told(self, parts: list[Part]) -> list[Part]:
        return [
            replace(part, logprobs=self._take_untold()) if isinstance(part, Text) else part
            for part in parts
        ]

    def _take_untold(self) -> list[TokenLogprob]:
        taken, self._untold = self._untold, []
        return taken
