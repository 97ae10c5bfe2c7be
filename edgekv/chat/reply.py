"""What a model writes, as a message that grows: thoughts, text and tool calls, told apart as it
comes.

llama.cpp parses all that was written so far. What is certain goes out as a delta: however an answer
is cut into pieces, the deltas add up to the message of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from edgekv.chat import bare
from edgekv.chat.template import Syntax
from edgekv.chat.tools import Call, new_id
from edgekv.errors import BadInput
from edgekv.native import chat as native


@dataclass(frozen=True)
class Thought:
    """More of what the model thinks."""

    text: str


@dataclass(frozen=True)
class Text:
    """More of the answer's text; logprobs: of its tokens, from whoever counts them."""

    text: str
    logprobs: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class CallBegun:
    """A tool is called; index: of the call in the message."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of a call's arguments, which are JSON when they are complete."""

    index: int
    text: str


END = "\ue0f1"
"""A letter that begins nothing."""
Part = Thought | Text | CallBegun | CallArguments


@dataclass
class Answer:
    """What an answer says by now."""

    thought: str = ""
    text: str = ""
    calls: list[Call] = field(default_factory=list)


class Reply:
    """Reads one answer. syntax: of its prompt; what that has of the answer already is left out."""

    def __init__(self, syntax: Syntax) -> None:
        self._names, self._is_one_call = syntax.names, syntax.is_one_call
        self.is_over = False
        """A second call has begun where one is allowed: some grammars let it through."""
        self._parser = native.Parser(syntax.parser) if syntax.parser else None
        self._written = ""
        self.message = Answer()
        """What has gone out."""
        self.logprobs = list[Any]()
        """Of all tokens so far."""
        self._untold = list[Any]()
        self._begun = Answer()
        """What the prompt has of it."""
        if syntax.parser and syntax.parser["is_continuation"]:
            self._begun = self._read("", is_partial=True)
            self._begun.thought = self._begun.thought.strip()

    def feed(self, text: str, logprobs: Sequence[Any] = ()) -> list[Part]:
        """More of the answer; logprobs: of its tokens. Returns what is certain by now."""
        self._written += text
        self.logprobs += logprobs
        self._untold += logprobs
        return self._told(self._certain())

    def _certain(self) -> list[Part]:
        if self._parser is None:
            return self._grown(Answer(text=self._written), is_whole=True)
        if self._names and bare.may_begin(self._written):
            return []
        try:
            now = self._read(self._written, is_partial=True)
        except BadInput:  # it may become right with what follows
            return []
        return self._grown(now, is_whole=False)

    def end(self) -> list[Part]:
        """What was held back, when the answer is over."""
        parts = self._told(self._grown(self._whole(), is_whole=True))
        return [*parts, Text("", self._take_untold())] if self._untold else parts

    def _told(self, parts: list[Part]) -> list[Part]:
        """Parts, the first text with the log-probabilities that have come since the last one."""
        return [
            replace(part, logprobs=self._take_untold()) if isinstance(part, Text) else part
            for part in parts
        ]

    def _take_untold(self) -> list[Any]:
        taken, self._untold = self._untold, []
        return taken

    def _whole(self) -> Answer:
        if self._parser is None:
            return Answer(text=self._written)
        calls = bare.calls_in(self._written, self._names)
        if calls:
            return Answer(calls=calls)
        try:
            whole = self._with_tail(self._read(self._written, is_partial=False))
        except BadInput:  # cut off, or not in the template's format
            whole = self._broken()
        if whole == Answer() and "<tool_call>" in self._written:  # with something else in it
            whole.text = self._written
        if self._names and not whole.calls and whole.thought:
            calls = bare.calls_in(whole.text, self._names)
            if calls:
                whole.text, whole.calls = "", calls
        return whole

    def _with_tail(self, whole: Answer) -> Answer:
        """With what llama.cpp has left out at the end, because it might have begun a tag: it is
        text if it would be with one more letter.
        """
        if whole.calls or self._written.endswith(whole.text) and whole.text:
            return whole
        try:
            longer = self._read(self._written + END, is_partial=True)
        except BadInput:
            return whole
        if longer.text.endswith(END) and longer.text.startswith(whole.text):
            whole.text = longer.text.removesuffix(END)
        return whole

    def _broken(self) -> Answer:
        """What can be read of an answer that does not have the format; the rest is text.

        A beginning that cannot be read stays so, whatever follows: the longest one that can be read
        is found by halves.
        """
        text, good, bad = self._written, 0, len(self._written) + 1
        found = Answer()
        begun = self._begun.text
        while bad - good > 1:
            middle = (good + bad) // 2
            try:
                found, good = self._read(text[:middle], is_partial=True), middle
            except BadInput:
                bad = middle
        found.text = found.text.removeprefix(begun)
        if found.calls:
            rest = text[good:]
            found.text = begun + found.text + (rest if any(map(str.isalnum, rest)) else "")
            return found
        begin = text.find(found.text) if found.text else -1
        if begin >= 0 or not found.thought:
            found.text = begun + text[max(begin, 0) :]
        else:
            found.text = begun + text[good:]
        return found

    def _read(self, text: str, is_partial: bool) -> Answer:
        assert self._parser is not None
        said = self._parser.parse(text, is_partial)
        calls = [Call(x["name"], x["arguments"], x["id"]) for x in said["tool_calls"]]
        return Answer(said["reasoning_content"], said["content"], calls)

    def _grown(self, now: Answer, is_whole: bool) -> list[Part]:
        """What `now` has more than what has gone out."""
        deltas: list[Part] = []
        had, thought, text = self.message, now.thought.strip(), now.text
        if thought:
            text = text.lstrip()
        if not is_whole or now.calls:  # blanks at an end may be the format's
            text = text.rstrip()
        if more := _behind(self._begun.thought + had.thought, thought):
            had.thought += more
            deltas.append(Thought(more))
        if more := _behind(self._begun.text + had.text, text):
            had.text += more
            deltas.append(Text(more))
        if self._is_one_call and len(now.calls) > 1:
            self.is_over, now.calls[1:] = True, []
        for index, call in enumerate(now.calls):
            deltas += self._call(index, call, index + 1 < len(now.calls) or is_whole)
        return deltas

    def _call(self, index: int, call: Call, is_complete: bool) -> list[Part]:
        """is_complete: its name will not grow any more."""
        calls, deltas = self.message.calls, list[Part]()
        if index == len(calls):
            if not call.name or not (is_complete or call.arguments):
                return []
            calls.append(Call(call.name, "", call.id or new_id()))
            deltas.append(CallBegun(index, calls[index].id, call.name))
        if index < len(calls) and (more := _behind(calls[index].arguments, call.arguments)):
            had = calls[index]
            calls[index] = Call(had.name, had.arguments + more, had.id)
            deltas.append(CallArguments(index, more))
        return deltas


def _behind(had: str, now: str) -> str:
    """What `now` has behind `had`; nothing if it does not begin with it."""
    return now[len(had) :] if now.startswith(had) else ""


def parts_of(said: Answer) -> list[Part]:
    """A whole message as deltas."""
    deltas: list[Part] = []
    if said.thought:
        deltas.append(Thought(said.thought))
    if said.text:
        deltas.append(Text(said.text))
    for index, call in enumerate(said.calls):
        deltas += [CallBegun(index, call.id, call.name), CallArguments(index, call.arguments)]
    return deltas


def as_openai(call: Call) -> dict[str, Any]:
    """A call in OpenAI's form."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
