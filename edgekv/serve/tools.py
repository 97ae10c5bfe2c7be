"""Tool calls in what models write: the formats that chat templates teach, and how they are read.

hermes: <tool_call>{"name": ..., "arguments": {...}}</tool_call> (Hermes, Qwen); mistral:
[TOOL_CALLS] and an array of such objects, or NAME[ARGS]{...}; llama3: the answer is an object
{"name": ..., "parameters": {...}}.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, field
from typing import Any

from edgekv.serve.text import held

BARE = ('{"name":', '{"type":"function","name":')
"""How a call without tags begins, without blanks."""
NO_PARAMETERS = {"type": "object", "properties": {}}


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. parameters: the JSON schema of its arguments."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=lambda: dict(NO_PARAMETERS))


@dataclass(frozen=True)
class Call:
    """arguments: JSON, as the model wrote it but for blanks."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: secrets.token_hex(12))


class Format:
    """How calls are written. open: begins calls; close: ends one, empty: the answer's end does."""

    open, close, key = "<tool_call>", "</tool_call>", "arguments"
    begins_answer = False
    """`open` is nowhere but at the beginning of an answer, and may be left out."""
    may_be_bare = True
    """Small models leave the tags out: an answer that is an object with a tool's name is a call."""
    is_named_outside = False
    """A call's name stands in front of its object."""

    def body(self, call: str) -> str:
        """GBNF of what follows `open`."""
        return f"[\\n]? {call} [\\n]? {literal(self.close)}"

    def calls(self, call: str, parallel: bool) -> str:
        """GBNF of one call, or of several."""
        one = f"{literal(self.open)} {self.body(call)}"
        return f"{one} ( [\\n]? {one} )*" if parallel else one

    def named(self, name: str, arguments: str) -> str:
        raise NotImplementedError

    def read(self, text: str) -> list[Call]:
        """The calls in what stands between `open` and `close`; none if it is something else."""
        return _calls_of(_json(text), self.key)


class Mistral(Format):
    open, close = "[TOOL_CALLS]", ""
    may_be_bare = False

    def body(self, call: str) -> str:
        return f'"[" {call} "]"'

    def calls(self, call: str, parallel: bool) -> str:
        more = f'( "," " "? {call} )*' if parallel else ""
        return f'{literal(self.open)} "[" {call} {more} "]"'

    def read(self, text: str) -> list[Call]:
        if "[ARGS]" in text:
            return Named().read(text)
        return _calls_of(_json(text), self.key)


class Named(Mistral):
    """[TOOL_CALLS]NAME[ARGS]{...}, as Mistral's newer models."""

    is_named_outside = True

    def body(self, call: str) -> str:
        return call

    def calls(self, call: str, parallel: bool) -> str:
        one = f"{literal(self.open)} {call}"
        return f"( {one} )+" if parallel else one

    def named(self, name: str, arguments: str) -> str:
        return f"{literal(name + '[ARGS]')} {arguments}"

    def read(self, text: str) -> list[Call]:
        calls = []
        for part in text.split(self.open):
            name, mark, arguments = part.partition("[ARGS]")
            value = _json(arguments)
            if not mark or not isinstance(value, dict):
                return []
            calls.append(Call(name.strip(), _compact(value)))
        return calls


class Llama3(Format):
    open, close, key = "<|python_tag|>", "", "parameters"
    begins_answer = True

    def calls(self, call: str, parallel: bool) -> str:
        return f'{call} ( "; " {call} )*' if parallel else call


HERMES, MISTRAL, NAMED, LLAMA3 = Format(), Mistral(), Named(), Llama3()


def format_of(template: str) -> Format:
    """The format that a chat template teaches; Hermes' for one that teaches none."""
    if "[TOOL_CALLS]" in template:
        return NAMED if "[ARGS]" in template else MISTRAL
    if "<tool_call>" in template:
        return HERMES
    if "<|python_tag|>" in template or (
        "<|start_header_id|>" in template and '"parameters"' in template
    ):
        return LLAMA3
    return HERMES


def instructions(tools: list[dict[str, Any]]) -> str:
    """What a template that knows no tools is made to say in the system message."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "You may call functions to answer. Their signatures stand within <tools></tools>:\n"
        f"<tools>\n{lines}\n</tools>\n"
        "To call one, write a JSON object with its name and arguments within"
        ' <tool_call></tool_call>:\n<tool_call>\n{"name": <name>, "arguments": <object>}\n'
        "</tool_call>"
    )


class CallSplitter:
    """Tells calls from text in an answer that comes in pieces.

    names: the tools there are; an answer that is an object by itself calls one of them, or it is
    text.
    """

    def __init__(self, form: Format, names: frozenset[str]) -> None:
        self._form, self._names = form, names
        self._held = ""
        self._inside = self._is_behind_call = False
        self._is_bare = False
        """The whole answer may be calls without tags."""
        self._has_begun = not form.may_be_bare
        """It is known that it is not."""

    def feed(self, text: str) -> list[str | Call]:
        """What is certain by now."""
        self._held += text
        found: list[str | Call] = []
        while self._move(found):
            pass
        return found

    def end(self) -> list[str | Call]:
        """What was held back, when the answer is over."""
        text, self._held = self._held, ""
        if self._is_bare:
            calls = _bare_calls(text.strip().removeprefix(self._form.open), self._form.key)
            calls = calls if all(call.name in self._names for call in calls) else []
        else:
            calls = self._read(text) if self._inside else []
        return [*calls] if calls else [text] if text else []

    def _move(self, found: list[str | Call]) -> bool:
        """Whether there is more to look at."""
        form = self._form
        if not self._has_begun and not self._begins():
            return False
        if self._inside:
            body, mark, rest = self._held.partition(form.close) if form.close else ("", "", "")
            if not mark:
                return False
            calls = self._read(body)
            found += calls if calls else [body + mark]
            self._inside, self._held, self._is_behind_call = False, rest, bool(calls)
            return True
        if self._is_behind_call:
            self._held = self._held.lstrip()
        if form.begins_answer:
            found += [self._held] if self._held else []
            self._held = ""
            return False
        text, mark, rest = self._held.partition(form.open)
        if mark:
            if text.strip():
                found.append(text.rstrip())
            self._inside, self._held = True, mark + rest
            return True
        n = held(text, [form.open])
        certain = text[: len(text) - n].rstrip()
        if certain:
            found.append(certain)
            self._held, self._is_behind_call = text[len(certain) :], False
        return False

    def _begins(self) -> bool:
        """Whether it is known by now that the answer is no call without tags."""
        begin = "".join(self._held.split())
        calls = [*BARE, self._form.open] if self._form.begins_answer else BARE
        self._is_bare = begin.startswith(tuple(calls))
        self._has_begun = not self._is_bare and not any(call.startswith(begin) for call in calls)
        return self._has_begun

    def _read(self, text: str) -> list[Call]:
        return self._form.read(text.strip().removeprefix(self._form.open))


def _bare_calls(text: str, key: str) -> list[Call]:
    """Calls that follow each other without tags."""
    values, rest = [], text.strip()
    while rest:
        try:
            value, end = json.JSONDecoder().raw_decode(rest)
        except (ValueError, RecursionError):
            return []
        values.append(value)
        rest = rest[end:].lstrip("; \n")
    calls = [call for value in values for call in _calls_of(value, key)]
    return calls if len(calls) == len(values) else []


def literal(text: str) -> str:
    """A text as GBNF spells it."""
    return json.dumps(text)


def _json(text: str) -> Any:
    try:
        return json.loads(text.strip())
    except (ValueError, RecursionError):
        return None


def _calls_of(value: Any, key: str) -> list[Call]:
    """Calls of an object or of an array of them; none if one of them is something else."""
    calls = []
    for one in value if isinstance(value, list) else [value]:
        if not isinstance(one, dict) or not isinstance(one.get("name"), str):
            return []
        arguments = one.get(key, one.get("arguments", one.get("parameters", {})))
        calls.append(
            Call(one["name"], arguments if isinstance(arguments, str) else _compact(arguments))
        )
    return calls


def _compact(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a pair of surrogates
        return json.dumps(value)
    return text
