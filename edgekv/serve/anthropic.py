"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's protocol."""

from __future__ import annotations

import json
import secrets
from functools import partial
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from starlette.responses import Response

from edgekv.chat.completion import finish_of, schema_of
from edgekv.chat.reply import CallArguments, CallBegun, Part, Reply, Text, Thought
from edgekv.chat.template import Chat
from edgekv.chat.tools import Choice, Tool, as_value, choice_of
from edgekv.errors import BadInput
from edgekv.serve import marks, skipped, sse
from edgekv.serve.answers import respond
from edgekv.serve.bounds import BoundedRoute
from edgekv.serve.errors import ApiError
from edgekv.serve.events import Done, Progress
from edgekv.serve.preparing import prepared
from edgekv.serve.request import Request
from edgekv.serve.schemas import CountBody, MessageBody, MessagesBody
from edgekv.serve.service import Service, service_of
from edgekv.serve.writer import Writer

router = APIRouter(route_class=BoundedRoute)

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


@router.post("/v1/messages")
async def messages(body: MessagesBody, http: HttpRequest) -> Response:
    """An answer to messages, as a list of content blocks."""
    service = service_of(http)
    request, n_marked = await prepared(http, _marked, service, body)
    writer = _Writer(service.model, n_marked) if body.stream else None
    return await respond(http, request, writer, partial(_whole, service, n_marked))


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountBody, http: HttpRequest) -> dict[str, int]:
    """Tokens of the prompt that a request makes."""
    service = service_of(http)
    return {"input_tokens": await prepared(http, lambda: service.count(_chat(body)))}


def _marked(service: Service, body: MessagesBody) -> tuple[Request, int]:
    """What is asked, and how much of its prompt is marked to be kept."""
    request = ask(service, body)
    return request, marks.n_marked(body, request.prompt, service.prompts.template)


def ask(service: Service, body: MessagesBody) -> Request:
    """Raises BadInput and ApiError for what this server cannot do."""
    request = Request(
        sampling=service.sampling(body),
        max_tokens=service.limit(body.max_tokens is not None, body.max_tokens),
        stops=tuple(body.stop_sequences or ()),
    )
    return service.ask_chat(_chat(body), request)


def _chat(body: CountBody) -> Chat:
    system = [{"role": "system", "content": body.system}] if body.system else []
    thinks = (body.thinking or {}).get("type")
    variables = {} if thinks is None else {"enable_thinking": thinks != "disabled"}
    return Chat(
        [*system, *(one for message in body.messages for one in _as_openai(message))],
        _choice(body),
        schema_of((body.output_config or {}).get("format")),
        variables={**variables, **(body.chat_template_kwargs or {})},
    )


def _choice(body: CountBody) -> Choice:
    tools = _tools(body)
    wish = body.tool_choice or {"type": "auto"}
    kinds = {"auto": "auto", "any": "required", "none": "none", "tool": wish}
    kind = wish.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        raise BadInput("tool_choice has the type 'auto', 'any', 'tool' or 'none'")
    never = wish.get("disable_parallel_tool_use")
    return choice_of(tools, kinds[kind], None if never is None else not never)


def _tools(body: CountBody) -> list[Tool]:
    """Those that their client runs."""
    found = []
    for tool in body.tools or ():
        if tool.type not in (None, "custom"):
            skipped.tool(str(tool.type), tool.name)
            continue
        more = {} if tool.input_schema is None else {"parameters": tool.input_schema}
        found.append(Tool(tool.name, tool.description or "", **more))
    return found


# ---- messages


def _as_openai(message: MessageBody) -> list[dict[str, Any]]:
    """A message as chat templates expect it; results of tools are messages of their own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results, texts, calls, thoughts = [], [], [], []
    for block in message.content:
        match block.get("type"):
            case "text" | "document":
                texts.append({"type": "text", "text": _text(block)})
            case "tool_use":
                calls.append(_call(block))
            case "tool_result":
                results.append(
                    {
                        "role": "tool",
                        "tool_call_id": block.get("tool_use_id"),
                        "content": _result(block.get("content")),
                    }
                )
            case "thinking":
                thoughts.append(str(block.get("thinking", "")))
            case "redacted_thinking":
                pass
            case "server_tool_use" | "web_search_tool_result" | "web_fetch_tool_result" as kind:
                skipped.item(kind)
            case kind:
                raise BadInput(f"a content block of the type {kind!r} cannot be read: give text")
    own: dict[str, Any] = {"role": message.role, "content": texts or ""}
    if calls:
        own["tool_calls"] = calls
    if thoughts:
        own["reasoning_content"] = "\n".join(thoughts)
    return [*results, *([own] if texts or calls or not results else [])]


def _text(block: dict[str, Any]) -> str:
    """The text of a text block, or of a document that is one."""
    source = block.get("source")
    text = source.get("data") if isinstance(source, dict) else block.get("text")
    is_text = not isinstance(source, dict) or source.get("type") == "text"
    if not is_text or not isinstance(text, str):
        raise BadInput("a document is no text: give its text, of the source type 'text'")
    return text


def _call(block: dict[str, Any]) -> dict[str, Any]:
    function = {"name": block.get("name"), "arguments": json.dumps(block.get("input", {}))}
    return {"id": block.get("id"), "type": "function", "function": function}


def _result(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(isinstance(one, dict) for one in content):
        return "\n".join(_text(one) for one in content)
    raise BadInput("the result of a tool is no text: give text, or blocks of the type 'text'")


# ---- answers


def _usage(now: Progress, n_marked: int) -> dict[str, int]:
    """n_marked: tokens that the request wants kept. Those of them that were read are written."""
    n_kept = max(n_marked - now.n_cached, 0)
    return {
        "input_tokens": now.n_prompt - now.n_cached - n_kept,
        "cache_read_input_tokens": now.n_cached,
        "cache_creation_input_tokens": n_kept,
        "output_tokens": now.n_written,
    }


def _stopped(done: Done, has_calls: bool) -> dict[str, Any]:
    """Why an answer ended."""
    reason = STOP_REASONS[finish_of(done.finish, has_calls)]
    is_text = done.stop_text is not None
    return {"stop_reason": "stop_sequence" if is_text else reason, "stop_sequence": done.stop_text}


def _message(model: str, usage: dict[str, int]) -> dict[str, Any]:
    """A message of which nothing is said yet."""
    return {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def _whole(service: Service, n_marked: int, reply: Reply, done: Done) -> dict[str, Any]:
    said, content = reply.message, list[dict[str, Any]]()
    if said.thought:
        content.append({"type": "thinking", "thinking": said.thought, "signature": ""})
    if said.text:
        content.append({"type": "text", "text": said.text})
    content += [
        {**_block(call.id, call.name), "input": as_value(call.arguments)} for call in said.calls
    ]
    message = _message(service.model, _usage(done.progress, n_marked))
    return {**message, "content": content, **_stopped(done, bool(said.calls))}


def _block(id: str, name: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": name, "input": {}}


class _Writer(Writer):
    """Events of a message. Blocks follow each other; at most one is open."""

    def __init__(self, model: str, n_marked: int) -> None:
        super().__init__()
        self._model, self._n_marked = model, n_marked
        self._index = -1
        self._kind: type[Part] | None = None
        """The open block's."""

    def begin(self, progress: Progress) -> str:
        message = _message(self._model, _usage(progress, self._n_marked))
        return sse.event({"type": "message_start", "message": message}, "message_start")

    def part(self, part: Part) -> str:
        match part:
            case Thought():
                start = {"type": "thinking", "thinking": "", "signature": ""}
                return self._delta(part, start, {"type": "thinking_delta", "thinking": part.text})
            case Text():
                if not part.text:
                    return ""
                start = {"type": "text", "text": ""}
                return self._delta(part, start, {"type": "text_delta", "text": part.text})
            case CallBegun():
                return self._open(CallBegun, _block(part.id, part.name))
            case CallArguments():
                delta = {"type": "input_json_delta", "partial_json": part.text}
                return self._event("content_block_delta", delta=delta)

    def _delta(self, part: Part, start: dict[str, Any], delta: dict[str, Any]) -> str:
        frame = self._open(type(part), start) if self._kind is not type(part) else ""
        return frame + self._event("content_block_delta", delta=delta)

    def _open(self, kind: type[Part], start: dict[str, Any]) -> str:
        frame = self._close()
        self._index, self._kind = self._index + 1, kind
        return frame + self._event("content_block_start", content_block=start)

    def _close(self) -> str:
        if self._kind is None:
            return ""
        frame = ""
        if self._kind is Thought:
            delta = {"type": "signature_delta", "signature": ""}
            frame = self._event("content_block_delta", delta=delta)
        self._kind = None
        return frame + self._event("content_block_stop")

    def _event(self, kind: str, **more: Any) -> str:
        return sse.event({"type": kind, "index": self._index, **more}, kind)

    def end(self, done: Done, has_calls: bool) -> str:
        frame = self._close()
        usage, kind = _usage(done.progress, self._n_marked), "message_delta"
        said = {"type": kind, "delta": _stopped(done, has_calls), "usage": usage}
        frame += sse.event(said, kind)
        return frame + sse.event({"type": "message_stop"}, "message_stop")

    def failed(self, error: ApiError) -> str:
        return sse.event(error.body("/v1/messages"), "error")
