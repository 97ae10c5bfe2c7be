"""POST /v1/chat/completions."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from starlette.responses import Response

from edgekv.chat.completion import as_delta, as_message, finish_of, schema_of
from edgekv.chat.reply import Part, Reply, Text
from edgekv.chat.template import Chat
from edgekv.chat.tools import Tool, choice_of
from edgekv.errors import BadInput
from edgekv.serve import several, skipped, sse, wording
from edgekv.serve.bounds import BoundedRoute
from edgekv.serve.encoding import Json
from edgekv.serve.events import Done, Progress
from edgekv.serve.preparing import prepared
from edgekv.serve.request import Request
from edgekv.serve.schemas import ChatBody, ToolBody
from edgekv.serve.service import Service, service_of
from edgekv.serve.writer import Writer

router = APIRouter(route_class=BoundedRoute)


@router.post("/v1/chat/completions")
@router.post("/chat/completions", include_in_schema=False)
async def chat(body: ChatBody, http: HttpRequest) -> Response:
    """An answer to messages, by the model's chat template."""
    service = service_of(http)
    requests = await prepared(http, _requests, service, body)
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    head = wording.head("chatcmpl", kind, service.model)
    if body.stream:
        writers = [_Writer(head, i, body) for i in range(len(requests))]
        return await several.streams(http, requests, writers, partial(several.end, head, body))
    answers = await several.wholes(http, requests)
    said = {**head, "choices": [_choice(i, *one) for i, one in enumerate(answers)]}
    dones = [done for _, done in answers]
    said |= several.costs(dones, len(dones))
    if len(dones) == 1:
        said["kv"] = wording.cache(dones[0])
    return Json(said)


@router.post("/v1/chat/completions/input_tokens")
@router.post("/chat/completions/input_tokens", include_in_schema=False)
async def count(body: ChatBody, http: HttpRequest) -> dict[str, Any]:
    """Tokens of the prompt that messages make."""
    service = service_of(http)
    n = await prepared(http, lambda: service.count(_chat(body)))
    return wording.input_tokens(n)


def _requests(service: Service, body: ChatBody) -> list[Request]:
    several.check(1, body.n_answers)
    return several.repeated([ask(service, body)], body.n_answers)


def ask(service: Service, body: ChatBody) -> Request:
    """Raises BadInput and ApiError for what this server cannot do."""
    n_probs = (body.top_logprobs or 0) if body.logprobs else None
    if body.top_logprobs is not None and not body.logprobs:
        raise BadInput("top_logprobs needs logprobs: true")
    return service.ask_chat(_chat(body), service.request(body, n_probs, "max_completion_tokens"))


def _chat(body: ChatBody) -> Chat:
    """Raises BadInput."""
    goes_on = _goes_on(body)
    return Chat(
        [message.model_dump(exclude_unset=True) for message in body.messages],
        choice_of(tools_of(body.tools), body.tool_choice, body.parallel_tool_calls),
        schema_of(body.response_format) or body.json_schema,
        body.grammar or "",
        body.chat_template_kwargs or {},
        body.reasoning_format or "",
        bool(body.parse_special),
        goes_on or body.add_generation_prompt is not False,
    )


def _goes_on(body: ChatBody) -> bool:
    """Whether the last message is the beginning of the answer. Raises BadInput."""
    *before, last = [message.role == "assistant" for message in body.messages]
    if last and before and before[-1]:
        raise BadInput("the last two messages are the assistant's: put them together")
    if body.continue_final_message and body.add_generation_prompt:
        raise BadInput("give add_generation_prompt or continue_final_message, not both")
    if body.continue_final_message and not last:
        raise BadInput("the last message is not the assistant's: there is nothing to continue")
    return last


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


def _choice(index: int, reply: Reply, done: Done) -> dict[str, Any]:
    return {
        "index": index,
        "message": as_message(reply.message),
        "logprobs": wording.chat_logprobs(reply.logprobs),
        "finish_reason": finish_of(done.finish, bool(reply.message.calls)),
    }


class _Writer(Writer):
    """Chunks of one answer in a chat."""

    def __init__(self, head: dict[str, Any], index: int, body: ChatBody) -> None:
        super().__init__(body)
        self._head, self._index = head, index

    def _chunk(self, delta: dict[str, Any], finish: str | None = None, **more: Any) -> str:
        choice = {"index": self._index, "delta": delta, "finish_reason": finish}
        choice["logprobs"] = more.pop("logprobs", None)
        return sse.event({**self._head, "choices": [choice], **more})

    def begin(self, progress: Progress) -> str:
        return self._chunk({"role": "assistant", "content": None})

    def progress_event(self, said: dict[str, Any]) -> str:
        return self._chunk({}, **said)

    def part(self, part: Part) -> str:
        logprobs = part.logprobs if isinstance(part, Text) else []
        said = wording.chat_logprobs(logprobs)
        return self._chunk(as_delta(part), logprobs=said, **self.timings)

    def end(self, done: Done, has_calls: bool) -> str:
        costs = {"timings": wording.timings(done.progress), "kv": wording.cache(done)}
        return self._chunk({}, finish_of(done.finish, has_calls), **costs)
