"""POST /v1/responses: OpenAI's newest protocol, with texts, thoughts and functions. Nothing is
stored, so a request holds its whole conversation.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from starlette.responses import Response

from edgekv.chat.completion import schema_of
from edgekv.chat.reply import CallArguments, CallBegun, Part, Reply, Text, Thought, parts_of
from edgekv.chat.template import Chat
from edgekv.chat.tools import NO_PARAMETERS, Tool, choice_of
from edgekv.errors import BadInput
from edgekv.serve import skipped, sse, wording
from edgekv.serve.answers import respond
from edgekv.serve.bounds import BoundedRoute
from edgekv.serve.errors import ApiError
from edgekv.serve.events import Done, Progress
from edgekv.serve.preparing import prepared
from edgekv.serve.request import Request
from edgekv.serve.schemas import ResponsesBody
from edgekv.serve.service import Service, service_of
from edgekv.serve.writer import Writer

router = APIRouter(route_class=BoundedRoute)

Item = dict[str, Any]
PREFIXES = {Text: "msg", Thought: "rs", CallBegun: "fc"}
"""Of items' ids."""


@router.post("/v1/responses")
@router.post("/responses", include_in_schema=False)
async def responses(body: ResponsesBody, http: HttpRequest) -> Response:
    """An answer to a conversation, as a list of items."""
    service = service_of(http)
    request = await prepared(http, ask, service, body)
    writer = _Writer(service, body)
    return await respond(http, request, writer if body.stream else None, writer.whole)


@router.post("/v1/responses/input_tokens")
@router.post("/responses/input_tokens", include_in_schema=False)
async def count(body: ResponsesBody, http: HttpRequest) -> dict[str, Any]:
    """Tokens of the prompt that a conversation makes."""
    service = service_of(http)
    n = await prepared(http, lambda: service.count(_chat(body)))
    return wording.input_tokens(n)


def ask(service: Service, body: ResponsesBody) -> Request:
    """Raises BadInput and ApiError for what this server cannot do."""
    if body.previous_response_id or body.conversation or body.background:
        raise BadInput("this server stores no responses: send the whole conversation as input")
    request = Request(
        sampling=service.sampling(body),
        max_tokens=service.limit(body.max_output_tokens is not None, body.max_output_tokens),
    )
    return service.ask_chat(_chat(body), request)


def _chat(body: ResponsesBody) -> Chat:
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    return Chat(
        [*system, *_messages(body.input)],
        choice_of(_tools(body.tools or ()), body.tool_choice, body.parallel_tool_calls),
        schema_of((body.text or {}).get("format")),
        variables=body.chat_template_kwargs or {},
    )


def _tools(tools: Iterable[Item]) -> list[Tool]:
    """The functions among a request's tools."""
    found = []
    for tool in tools:
        name, parameters = tool.get("name"), tool.get("parameters") or NO_PARAMETERS
        if tool.get("type") != "function":
            skipped.tool(str(tool.get("type")), str(name))
            continue
        if not isinstance(name, str) or not isinstance(parameters, dict):
            raise BadInput("a tool is no function with a name and a schema of its parameters")
        found.append(Tool(name, str(tool.get("description") or ""), parameters))
    return found


# ---- input


def _messages(given: str | list[Item]) -> list[Item]:
    """A conversation as chat templates expect it; calls that follow each other are one message."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[Item] = []
    for item in given:
        match item.get("type", "message"):
            case "message":
                messages.append({"role": _role(item), "content": _content(item.get("content"))})
            case "function_call":
                _add_call(messages, item, item.get("arguments") or "{}")
            case "custom_tool_call":
                _add_call(messages, item, json.dumps({"input": item.get("input")}))
            case "local_shell_call":
                named = {**item, "name": "local_shell"}
                _add_call(messages, named, json.dumps(item.get("action")))
            case "function_call_output" | "custom_tool_call_output" | "local_shell_call_output":
                content = _content(item.get("output"))
                messages.append(
                    {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
                )
            case "reasoning":
                pass  # thoughts of earlier turns, which templates leave out too
            case kind:
                skipped.item(kind)
    if not messages:
        raise BadInput("the input is empty: give a text or messages")
    return messages


def _add_call(messages: list[Item], item: Item, arguments: str) -> None:
    """Put a call into the last message, if that has calls, else into one of its own."""
    if not messages or "tool_calls" not in messages[-1]:
        messages.append({"role": "assistant", "content": "", "tool_calls": []})
    function = {"name": item.get("name"), "arguments": arguments}
    call = {"id": item.get("call_id"), "type": "function", "function": function}
    messages[-1]["tool_calls"].append(call)


def _role(item: Item) -> str:
    role = item.get("role")
    if not isinstance(role, str):
        raise BadInput("a message has no role: give 'user', 'assistant' or 'system'")
    return role


def _content(content: Any) -> Any:
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("input_text", "output_text", "text"):
            raise BadInput(f"a part of the type {kind!r} cannot be read: give input_text")
        parts.append({"type": "text", "text": part.get("text")})
    return parts


# ---- answers


class _Writer(Writer):
    """Collects items, and writes events. Items follow each other; at most one is open."""

    def __init__(self, service: Service, body: ResponsesBody) -> None:
        super().__init__(body)
        self._n = 0
        self._items: list[Item] = []
        self._text = ""
        """Text of the open item."""
        self._kind: type[Part] | None = None
        """The open item's."""
        self._response = {
            "id": f"resp_{secrets.token_hex(12)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": service.model,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "tools": body.tools or [],
            "tool_choice": body.tool_choice or "auto",
            "parallel_tool_calls": bool(body.parallel_tool_calls),
            "text": body.text or {"format": {"type": "text"}},
            "metadata": {},
            "error": None,
            "incomplete_details": None,
            "previous_response_id": None,
            "store": False,
        }

    def _event(self, kind: str, **more: Any) -> str:
        data = {"type": kind, "sequence_number": self._n, **more}
        self._n += 1
        return sse.event(data, kind)

    def _item(self, kind: str) -> str:
        """An event with the last item as it is."""
        place = {"output_index": len(self._items) - 1, "item": self._items[-1]}
        return self._event(f"response.output_item.{kind}", **place)

    def _at(self, kind: str, **more: Any) -> str:
        """An event about what the last item holds."""
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return self._event(f"response.{kind}", **place, **more)

    def _begun(self, kind: str, **more: Any) -> str:
        """An event with the response, of which nothing is said yet."""
        now = {**self._response, "status": "in_progress", "output": [], "usage": None}
        return self._event(f"response.{kind}", response=now, **more)

    def begin(self, progress: Progress) -> str:
        return self._begun("created") + self._begun("in_progress")

    def progress_event(self, said: dict[str, Any]) -> str:
        return self._begun("in_progress", **said)

    def part(self, part: Part) -> str:
        if isinstance(part, CallBegun):
            return self._open(part)
        if isinstance(part, CallArguments):
            self._text += part.text
            return self._at("function_call_arguments.delta", delta=part.text)
        if not part.text:
            return ""
        frame = self._open(part) if self._kind is not type(part) else ""
        self._text += part.text
        more = {} if isinstance(part, Thought) else {"logprobs": [], **self.timings}
        kind = self._part("")["type"]
        return frame + self._at(f"{kind}.delta", content_index=0, delta=part.text, **more)

    def _open(self, part: Part) -> str:
        """Begin the item of a part."""
        frame, self._kind = self._close(), type(part)
        item: Item = {"type": "message", "role": "assistant", "content": []}
        if isinstance(part, CallBegun):
            item = {"type": "function_call", "call_id": part.id, "name": part.name, "arguments": ""}
        elif isinstance(part, Thought):
            item = {"type": "reasoning", "summary": [], "content": []}
        id = f"{PREFIXES[type(part)]}_{secrets.token_hex(12)}"
        self._items.append({"id": id, **item, "status": "in_progress"})
        frame += self._item("added")
        if isinstance(part, CallBegun):
            return frame
        return frame + self._at("content_part.added", content_index=0, part=self._part(""))

    def _part(self, text: str) -> Item:
        if self._kind is Thought:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _close(self) -> str:
        """End the open item."""
        if self._kind is None:
            return ""
        item, text = self._items[-1], self._text
        item["status"] = "completed"
        if self._kind is CallBegun:
            item["arguments"] = text
            frame = self._at("function_call_arguments.done", arguments=text, name=item["name"])
        else:
            part = self._part(text)
            item["content"] = [part]
            more: Item = {} if self._kind is Thought else {"logprobs": []}
            frame = self._at(f"{part['type']}.done", content_index=0, text=text, **more)
            frame += self._at("content_part.done", content_index=0, part=part)
        self._kind, self._text = None, ""
        return frame + self._item("done")

    def finished(self, done: Done) -> dict[str, Any]:
        """The whole response."""
        self._close()
        is_cut, now = done.finish == "length", done.progress
        usage = {
            "input_tokens": now.n_prompt,
            "input_tokens_details": {"cached_tokens": now.n_cached, "cache_write_tokens": 0},
            "output_tokens": now.n_written,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": now.n_prompt + now.n_written,
        }
        return {
            **self._response,
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._items,
            "usage": usage,
        }

    def whole(self, reply: Reply, done: Done) -> dict[str, Any]:
        """The response of an answer that nothing was written of."""
        for part in parts_of(reply.message):
            self.part(part)
        return self.finished(done)

    def end(self, done: Done, has_calls: bool) -> str:
        frame = self._close()
        response = self.finished(done)
        timings = wording.timings(done.progress)
        return frame + self._event(
            f"response.{response['status']}", response=response, timings=timings
        )

    def failed(self, error: ApiError) -> str:
        return self._event("error", code=error.kind, message=error.message, param=None)
