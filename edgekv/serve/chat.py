"""POST /v1/chat/completions."""

from __future__ import annotations

import secrets
import time
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from edgekv.chat.completion import as_delta, as_message, finish_of, schema_of
from edgekv.chat.template import Chat
from edgekv.chat.tools import Tool, choice_of
from edgekv.errors import BadInput
from edgekv.serve import skipped, sse, wording
from edgekv.serve.asked import Asked, Asker, Limits
from edgekv.serve.bounds import BoundedRoute
from edgekv.serve.errors import ApiError
from edgekv.serve.events import Done, Progress
from edgekv.serve.preparing import prepared
from edgekv.serve.reply import Part, Text
from edgekv.serve.schemas import ChatBody, ToolBody
from edgekv.serve.service import Service, Whole, Writer, respond, service_of

router = APIRouter(route_class=BoundedRoute)


@router.post("/v1/chat/completions")
@router.post("/chat/completions", include_in_schema=False)
async def chat(body: ChatBody, request: Request) -> Response:
    """An answer to messages, by the model's chat template."""
    service = service_of(request)
    asked = await prepared(request, ask, service.asker, body)
    writer = _Writer(service.model, body) if body.stream else None
    return await respond(request, asked, writer, partial(_whole, service))


def ask(asker: Asker, body: ChatBody) -> Asked:
    """Raises BadInput and ApiError for what this server cannot do."""
    one_answer(body.n)
    has_limit, limit = body.limit("max_completion_tokens")
    n_probs = (body.top_logprobs or 0) if body.logprobs else None
    if body.top_logprobs is not None and not body.logprobs:
        raise BadInput("top_logprobs needs logprobs: true")
    limits = Limits(
        asker.sampling(body),
        has_limit,
        limit,
        body.stops(),
        n_probs,
        bool(body.ignore_eos),
        body.is_fresh(asker.options.parallel),
    )
    tools = tools_of(body.tools)
    return asker.chat(
        Chat(
            [message.model_dump(exclude_unset=True) for message in body.messages],
            choice_of(tools, body.tool_choice, body.parallel_tool_calls),
            schema_of(body.response_format) or body.json_schema,
            body.grammar or "",
            body.chat_template_kwargs or {},
            body.reasoning_format or "",
            bool(body.parse_special),
        ),
        limits,
    )


def one_answer(n: int | None) -> None:
    """Raises BadInput for another number of answers."""
    if n not in (None, 1):
        raise BadInput("this server writes one answer to a request: leave n out")


def tools_of(bodies: list[ToolBody] | None) -> list[Tool]:
    """The functions among a request's tools."""
    found = []
    for body in bodies or ():
        function = body.function
        if function is None or body.type not in (None, "function"):
            skipped.tool(str(body.type), function.name if function else "")
            continue
        more = {} if function.parameters is None else {"parameters": function.parameters}
        found.append(Tool(function.name, function.description or "", **more))
    return found


def _whole(service: Service, answer: Whole) -> dict[str, Any]:
    choice = {
        "index": 0,
        "message": as_message(answer.message),
        "logprobs": wording.chat_logprobs(answer.logprobs),
        "finish_reason": answer.finish,
    }
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": service.model,
        "choices": [choice],
        "usage": wording.usage(answer.done),
        "timings": wording.timings(answer.done),
        "kv": wording.cache(answer.done),
    }


class _Writer(Writer):
    """Chunks of a chat."""

    def __init__(self, model: str, body: ChatBody) -> None:
        self.with_progress = bool(body.return_progress)
        self._head = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
        }
        self._with_usage = body.stream_options is not None and body.stream_options.include_usage

    def _chunk(self, delta: dict[str, Any], finish: str | None = None, **more: Any) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        choice["logprobs"] = more.pop("logprobs", None)
        return sse.event({**self._head, "choices": [choice], **more})

    def begin(self, progress: Progress) -> str:
        return self._chunk({"role": "assistant", "content": None})

    def progress_event(self, said: dict[str, Any]) -> str:
        return self._chunk({}, **said)

    def part(self, part: Part) -> str:
        logprobs = part.logprobs if isinstance(part, Text) else []
        return self._chunk(as_delta(part), logprobs=wording.chat_logprobs(logprobs))

    def end(self, done: Done, has_calls: bool) -> str:
        costs = {"timings": wording.timings(done), "kv": wording.cache(done)}
        last = self._chunk({}, finish_of(done.finish, has_calls), **costs)
        if self._with_usage:
            last += sse.event({**self._head, "choices": [], "usage": wording.usage(done)})
        return last + sse.DONE

    def failed(self, error: ApiError) -> str:
        return sse.event(error.body("/v1/chat/completions"))
