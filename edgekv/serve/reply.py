"""What a client sees of an answer: thoughts, text and tool calls, told apart as it comes."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgekv.commands.thinking import CLOSE, OPEN, Splitter
from edgekv.serve.events import TokenLogprob, Written
from edgekv.serve.tools import Call, CallSplitter, Format


@dataclass(frozen=True)
class Thought:
    text: str


@dataclass(frozen=True)
class Text:
    text: str
    logprobs: list[TokenLogprob] = field(default_factory=list)


Part = Thought | Text | Call


class Reply:
    """form: the format of tool calls, None: there are no tools. opens_thought: the answer begins in
    the middle of a thought. splits_thoughts: thoughts stand apart.
    """

    def __init__(
        self,
        form: Format | None = None,
        names: frozenset[str] = frozenset(),
        opens_thought: bool = False,
        splits_thoughts: bool = True,
    ) -> None:
        self._thoughts = Splitter(opens_thought) if splits_thoughts else None
        self._calls = CallSplitter(form, names) if form else None
        self._logprobs: list[TokenLogprob] = []
        self._was_thought = False
        self._at_edge = opens_thought
        """What comes next is the beginning of a thought or the first text behind one."""
        self.has_calls = False

    def feed(self, written: Written) -> list[Part]:
        """What is certain by now."""
        self._logprobs += written.logprobs
        if self._thoughts is None:
            return self._told([(written.text, False)])
        return self._told(self._thoughts.feed(written.text))

    def end(self) -> list[Part]:
        """What was held back, when the answer is over."""
        parts = self._told(self._thoughts.end()) if self._thoughts else []
        if self._calls:
            parts += self._spoken(self._calls.end())
        if self._logprobs:
            parts.append(Text("", self._take_logprobs()))
        return parts

    def _told(self, pieces: list[tuple[str, bool]]) -> list[Part]:
        parts: list[Part] = []
        for piece, is_thought in pieces:
            text = self._trimmed(piece, is_thought)
            if not text:
                continue
            if is_thought:
                parts.append(Thought(text))
            else:
                parts += self._spoken(self._calls.feed(text) if self._calls else [text])
        return parts

    def _trimmed(self, piece: str, is_thought: bool) -> str:
        """Without tags, and without blanks behind them."""
        text = piece
        if is_thought:
            if not self._was_thought and text.lstrip().startswith(OPEN):
                text, self._at_edge = text.lstrip().removeprefix(OPEN), True
            text = text.removesuffix(CLOSE)
        elif self._was_thought:
            self._at_edge = True
        if piece:
            self._was_thought = is_thought
        if self._at_edge:
            text = text.lstrip()
            self._at_edge = not text
        return text

    def _spoken(self, found: list[str | Call]) -> list[Part]:
        parts: list[Part] = []
        for one in found:
            if isinstance(one, Call):
                self.has_calls = True
                parts.append(one)
            elif one:
                parts.append(Text(one, self._take_logprobs()))
        return parts

    def _take_logprobs(self) -> list[TokenLogprob]:
        taken, self._logprobs = self._logprobs, []
        return taken
