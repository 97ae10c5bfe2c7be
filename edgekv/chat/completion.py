"""`create_chat_completion`: OpenAI's chat in Python's dicts, from a completion of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from edgekv.chat.messages import Message
from edgekv.chat.reply import (
    Answer,
    CallArguments,
    CallBegun,
    Part,
    Reply,
    Text,
    Thought,
    as_openai,
)
from edgekv.chat.template import Chat, Prompt
from edgekv.chat.tools import Choice, Tool, choice_of
from edgekv.errors import BadInput

Completed = dict[str, Any]


def chat_of(
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]] | None = None,
    tool_choice: Any = None,
    functions: Sequence[dict[str, Any]] | None = None,
    function_call: Any = None,
    response_format: dict[str, Any] | None = None,
    grammar: Any = None,
    variables: dict[str, Any] | None = None,
) -> Chat:
    """A request of llama-cpp-python's arguments. Raises BadInput for those that cannot be used.

    functions, function_call: OpenAI's names of tools and tool_choice from before them.
    """
    if functions is not None:
        tools = [{"type": "function", "function": function} for function in functions]
    if isinstance(function_call, dict):
        tool_choice = {"type": "function", "function": function_call}
    elif function_call is not None:
        tool_choice = function_call
    return Chat(
        messages,
        _choice(tools, tool_choice),
        schema_of(response_format),
        "" if grammar is None else grammar._grammar,
        variables or {},
    )


def _choice(tools: Sequence[dict[str, Any]] | None, wish: Any) -> Choice:
    return choice_of([_tool(tool) for tool in tools or ()], wish)


def _tool(tool: Any) -> Tool:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadInput("a tool has no function with a name: give {'function': {'name': ...}}")
    parameters = function.get("parameters")
    more = {} if parameters is None else {"parameters": parameters}
    return Tool(function["name"], function.get("description") or "", **more)


def schema_of(form: Any) -> Any:
    """The JSON schema that a response_format asks for, None: any text. Raises BadInput."""
    if form is None:
        return None
    form = form if isinstance(form, dict) else {"type": "?"}
    kind = form.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return form.get("schema") or {"type": "object"}
    inner = form.get("json_schema")
    schema = (inner if isinstance(inner, dict) else {}).get("schema", form.get("schema"))
    if kind != "json_schema" or not isinstance(schema, dict):
        raise BadInput(
            "response_format has the type 'text', 'json_object', or 'json_schema' with"
            " json_schema.schema"
        )
    return schema


def whole(prompt: Prompt, completed: Completed, logprobs: Callable[[Any], Any]) -> Completed:
    """A chat completion of a completion. logprobs: in a chat's form."""
    choice, reply = completed["choices"][0], Reply(prompt.syntax)
    reply.feed(choice["text"])
    reply.end()
    return {
        "id": f"chat{completed['id']}",
        "object": "chat.completion",
        "created": completed["created"],
        "model": completed["model"],
        "choices": [
            {
                "index": 0,
                "message": as_message(reply.message),
                "logprobs": logprobs(choice["logprobs"]),
                "finish_reason": finish_of(choice["finish_reason"], bool(reply.message.calls)),
            }
        ],
        "usage": completed["usage"],
    }


def as_message(said: Answer) -> dict[str, Any]:
    """An answer in OpenAI's form."""
    message: dict[str, Any] = {"role": "assistant", "content": said.text}
    if said.thought:
        message["reasoning_content"] = said.thought
    if said.calls:
        message["content"] = said.text or None
        message["tool_calls"] = [as_openai(call) for call in said.calls]
    return message


def finish_of(finish: str, has_calls: bool) -> str:
    """OpenAI's finish_reason of an answer that ended by 'stop' or 'length'."""
    return "tool_calls" if has_calls and finish == "stop" else finish


def chunks(
    prompt: Prompt, completed: Iterator[Completed], logprobs: Callable[[Any], Any]
) -> Iterator[Completed]:
    """The chunks of a chat completion, of those of a completion."""
    reply, head, finish = Reply(prompt.syntax), dict[str, Any](), "stop"
    for chunk in completed:
        choice = chunk["choices"][0]
        if not head:
            head = {
                "id": f"chat{chunk['id']}",
                "model": chunk["model"],
                "created": chunk["created"],
                "object": "chat.completion.chunk",
            }
            yield _chunk(head, {"role": "assistant"})
        finish = choice["finish_reason"] or finish
        said = logprobs(choice["logprobs"])
        for delta in reply.feed(choice["text"]):
            yield _chunk(head, as_delta(delta), said)
            said = None
        if said is not None:
            yield _chunk(head, {}, said)
    for delta in reply.end():
        yield _chunk(head, as_delta(delta))
    yield _chunk(head, {}, None, finish_of(finish, bool(reply.message.calls)))


def _chunk(
    head: dict[str, Any], delta: dict[str, Any], logprobs: Any = None, finish: str | None = None
) -> Completed:
    choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
    return {**head, "choices": [choice]}


def as_delta(delta: Part) -> dict[str, Any]:
    """A delta in OpenAI's form."""
    match delta:
        case Thought():
            return {"reasoning_content": delta.text}
        case Text():
            return {"content": delta.text}
        case CallBegun():
            function = {"name": delta.name, "arguments": ""}
            head = {"index": delta.index, "id": delta.id, "type": "function"}
            return {"tool_calls": [{**head, "function": function}]}
        case CallArguments():
            more = {"index": delta.index, "function": {"arguments": delta.text}}
            return {"tool_calls": [more]}
