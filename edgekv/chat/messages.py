"""Messages of requests as llama.cpp's templates take them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from edgekv.chat.bounds import check_json
from edgekv.chat.tools import Tool, as_value
from edgekv.errors import BadInput

Message = dict[str, Any]


def given(messages: Iterable[Message]) -> list[Message]:
    """Messages with text or text parts as content, and calls with a type and arguments that are
    JSON. Raises BadInput for what cannot be read.
    """
    found = [_given(message) for message in messages]
    if not found:
        raise BadInput("there are no messages: give one at least")
    return found


def _given(message: Message) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadInput("a message has no role: give 'user', 'assistant', 'system' or 'tool'")
    check_json(message, "a message")
    message = {name: value for name, value in message.items() if value is not None}
    content = message.get("content", "")
    if isinstance(content, list):
        content = [_part(part) for part in content]
    elif not isinstance(content, str):
        raise BadInput("the content of a message is no text, and no list of parts")
    message["content"] = content
    if message.get("tool_calls"):
        message["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    else:
        message.pop("tool_calls", None)
    return message


def _part(part: Any) -> Any:
    """A part of a message; what a model would not say is text as well."""
    if isinstance(part, dict) and part.get("type") == "refusal":
        return {"type": "text", "text": str(part.get("refusal", ""))}
    return part


def _call(call: Any) -> Message:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadInput("a tool call has no function: give its name and its arguments")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments or {}, ensure_ascii=False)
    call = {**call, "type": "function", "function": {**function, "arguments": sound(arguments)}}
    return {name: value for name, value in call.items() if value is not None}


def sound(arguments: str) -> str:
    """Arguments of a call, as they are if they are JSON. An answer that was cut off, or a model
    that cannot write JSON, leaves others: templates get these as {"raw": the text}.
    """
    try:
        json.loads(arguments, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return json.dumps(as_value(arguments), ensure_ascii=False)
    check_json(json.loads(arguments), "the arguments of a tool call")
    return arguments


def _refuse(text: str) -> None:
    raise ValueError(text)


def _finite(text: str) -> None:
    if float(text) in (float("inf"), float("-inf")):
        raise ValueError(text)


def folded(messages: Sequence[Message]) -> list[Message]:
    """The messages with all system messages as one at the front: some templates take no others."""
    is_system = [message["role"] in ("system", "developer") for message in messages]
    texts = [_text(message) for message, system in zip(messages, is_system) if system]
    rest = [message for message, system in zip(messages, is_system) if not system]
    return [{"role": "system", "content": "\n\n".join(texts)}, *rest] if texts else rest


def _text(message: Message) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


# ---- templates that know no tools


def with_instructions(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Tools in the system message, and calls and results as text, as Hermes' models write them."""
    text = _instructions(tools)
    first, rest = {"role": "system", "content": text}, list(messages)
    if rest and rest[0]["role"] in ("system", "developer"):
        first = {**rest[0], "content": f"{_text(rest[0])}\n\n{text}"}
        rest = rest[1:]
    return [first, *map(_as_text, rest)]


def _instructions(tools: Sequence[Tool]) -> str:
    lines = "\n".join(json.dumps(tool.as_openai(), ensure_ascii=False) for tool in tools)
    return (
        "You may call functions to answer. Their signatures stand within <tools></tools>:\n"
        f"<tools>\n{lines}\n</tools>\n"
        "To call one, write a JSON object with its name and arguments within"
        ' <tool_call></tool_call>:\n<tool_call>\n{"name": <name>, "arguments": <object>}\n'
        "</tool_call>"
    )


def _as_text(message: Message) -> Message:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{_text(message)}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    calls = "\n".join(
        '<tool_call>\n{"name": '
        + json.dumps(call["function"]["name"], ensure_ascii=False)
        + f', "arguments": {call["function"]["arguments"]}}}\n</tool_call>'
        for call in message["tool_calls"]
    )
    return {"role": "assistant", "content": f"{_text(message)}\n{calls}".strip()}
