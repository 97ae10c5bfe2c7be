"""POST /api/chat and /api/generate."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timezone
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from starlette.responses import Response

from edgekv.chat.reply import CallArguments, CallBegun, Part, Reply, Text, Thought
from edgekv.chat.template import Chat
from edgekv.chat.tools import Call, as_value, choice_of
from edgekv.errors import BadInput
from edgekv.serve import wording
from edgekv.serve.answers import respond
from edgekv.serve.bounds import BoundedRoute
from edgekv.serve.chat import tools_of
from edgekv.serve.encoding import Json, as_json
from edgekv.serve.errors import ApiError
from edgekv.serve.events import Done, Progress, TokenLogprob
from edgekv.serve.ollama.bodies import AskBody, ChatBody, GenerateBody, MessageBody
from edgekv.serve.ollama.models import may_think
from edgekv.serve.preparing import prepared
from edgekv.serve.request import Request
from edgekv.serve.service import Service, service_of
from edgekv.serve.writer import Writer

router = APIRouter(route_class=BoundedRoute)

NO_CALLS: Mapping[int, Call] = {}
NO_IMAGES = "this server reads no images: leave images out"
STAYS = (
    "this server has one model, which stays until the server ends: a server that was started"
    " without -m unloads models"
)


@router.post("/api/chat")
async def chat(body: ChatBody, http: HttpRequest) -> Response:
    """An answer to messages, by the model's chat template."""
    service = service_of(http)
    writer = _Writer(service.model, _in_chat)
    if not body.messages:
        return _loaded(body, writer)
    request = await prepared(http, _chat, service, body)
    return await respond(http, request, writer if body.is_streamed else None, writer.whole)


@router.post("/api/generate")
async def generate(body: GenerateBody, http: HttpRequest) -> Response:
    """An answer to one question; with `raw` the text that follows another one."""
    service = service_of(http)
    writer = _Writer(service.model, _in_text)
    if not body.prompt:
        return _loaded(body, writer)
    request = await prepared(http, _raw if body.raw else _question, service, body)
    if not body.raw:
        writer.context = [*request.prompt.tokens]
        writer.end_token = service.llm.token_eos()
    return await respond(http, request, writer if body.is_streamed else None, writer.whole)


def _loaded(body: AskBody, writer: _Writer) -> Response:
    """The answer to nothing, with which clients have a model loaded. Raises BadInput."""
    if body.keep_s == 0:
        raise BadInput(STAYS)
    return Json({**writer.said(), "done": True, "done_reason": "load"})


# ---- what is asked


def _request(service: Service, body: AskBody) -> Request:
    """A request without its prompt. Raises BadInput for what this server cannot do."""
    body.check(service.n_ctx)
    if body.top_logprobs and not body.logprobs:
        raise BadInput("top_logprobs needs logprobs: true")
    return Request(
        sampling=service.sampling(body.how),
        max_tokens=service.limit(*body.how.limit()),
        stops=body.how.stops(),
        n_probs=(body.top_logprobs or 0) if body.logprobs else None,
    )


def _chat(service: Service, body: ChatBody) -> Request:
    _check_thought(service, body)
    asked = Chat(
        _messages(body.messages),
        choice_of(tools_of(body.tools), None),
        body.schema_of_answer,
        variables=body.variables,
    )
    return service.ask_chat(asked, _request(service, body))


def _question(service: Service, body: GenerateBody) -> Request:
    _check(body)
    _check_thought(service, body)
    texts = [("system", body.system), ("user", body.prompt)]
    messages = [{"role": role, "content": text} for role, text in texts if text]
    asked = Chat(messages, schema=body.schema_of_answer, variables=body.variables)
    request = service.ask_chat(asked, _request(service, body))
    return service.behind(body.context, request) if body.context else request


def _raw(service: Service, body: GenerateBody) -> Request:
    _check(body)
    if body.system or body.context or body.think:
        raise BadInput("raw takes a prompt as it is: leave system, context and think out")
    request = _request(service, body)
    return service.ask_text([body.prompt or ""], request, body.schema_of_answer, "")


def _check(body: GenerateBody) -> None:
    """Raises BadInput for what this server does not do."""
    if body.images:
        raise BadInput(NO_IMAGES)
    if body.suffix:
        raise BadInput("this server does not fill a gap in front of a suffix: leave it out")
    if body.template:
        raise BadInput(
            "a request has no template of its own here: leave it out, give raw: true, or start the"
            " server with --chat-template-file"
        )


def _check_thought(service: Service, body: AskBody) -> None:
    """Raises BadInput for a thought of a model that has none."""
    if body.think and not may_think(service.prompts.template.text):
        raise BadInput(f'"{service.model}" does not support thinking: leave think out')


def _messages(bodies: Iterable[MessageBody]) -> list[dict[str, Any]]:
    """Messages as chat templates expect them. Raises BadInput.

    Calls without an id get one by their place, and results are those of the calls in their order.
    """
    found, open_ids, n_calls = list[dict[str, Any]](), list[str](), 0
    for body in bodies:
        if body.images:
            raise BadInput(NO_IMAGES)
        message: dict[str, Any] = {"role": body.role, "content": body.content or ""}
        if body.thinking:
            message["reasoning_content"] = body.thinking
        if body.tool_calls:
            ids = [
                str(call.get("id") or f"call{n_calls + i:05d}")
                for i, call in enumerate(body.tool_calls)
            ]
            message["tool_calls"] = [
                {**call, "id": id} for call, id in zip(body.tool_calls, ids, strict=True)
            ]
            open_ids, n_calls = ids, n_calls + len(ids)
        if body.role == "tool":
            id = body.tool_call_id or (open_ids[0] if open_ids else None)
            open_ids = [one for one in open_ids if one != id]
            message |= {"tool_call_id": id, "name": body.tool_name}
        found.append(message)
    return found


# ---- answers


def _in_chat(text: str, thought: str, calls: Mapping[int, Call]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thought:
        message["thinking"] = thought
    if calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "function": {"index": i, "name": call.name, "arguments": as_value(call.arguments)},
            }
            for i, call in calls.items()
        ]
    return {"message": message}


def _in_text(text: str, thought: str, calls: Mapping[int, Call]) -> dict[str, Any]:
    return {"response": text, **({"thinking": thought} if thought else {})}


def _probabilities(logprobs: list[TokenLogprob]) -> dict[str, Any]:
    return {"logprobs": [wording.with_rivals(one) for one in logprobs]} if logprobs else {}


class _Writer(Writer):
    """Lines of JSON, or one of a whole answer. A call is written when it is complete.

    form: of an answer's text, thought and calls.
    """

    media_type = "application/x-ndjson"
    context: list[int] | None = None
    """Tokens of a prompt that another one may go on from."""
    end_token = -1
    """What ends a turn."""

    def __init__(
        self, model: str, form: Callable[[str, str, Mapping[int, Call]], dict[str, Any]]
    ) -> None:
        super().__init__()
        self._model, self._form, self._begin = model, form, time.perf_counter_ns()
        self._call: CallBegun | None = None
        self._arguments = ""

    def said(
        self, text: str = "", thought: str = "", calls: Mapping[int, Call] = NO_CALLS
    ) -> dict[str, Any]:
        """A piece of the answer."""
        now = datetime.now(timezone.utc).isoformat(timespec="microseconds").replace("+00:00", "Z")
        head = {"model": self._model, "created_at": now}
        return {**head, **self._form(text, thought, calls), "done": False}

    def whole(self, reply: Reply, done: Done) -> dict[str, Any]:
        said = reply.message
        piece = self.said(said.text, said.thought, dict(enumerate(said.calls)))
        return {**piece, **_probabilities(reply.logprobs), **self._end(done)}

    def _end(self, done: Done) -> dict[str, Any]:
        """What stands at the end of an answer."""
        said = {"done": True, "done_reason": done.finish, **self._costs(done.progress)}
        if self.context is not None:
            ends = done.finish == "stop" and done.stop_text is None and self.end_token >= 0
            end = [self.end_token] if ends else []
            said["context"] = [*self.context, *done.tokens, *end]
        return {**said, "kv": wording.cache(done)}

    def _costs(self, now: Progress) -> dict[str, int]:
        """Times are in nanoseconds; the prompt's tokens are all of them, whatever was known."""
        return {
            "total_duration": time.perf_counter_ns() - self._begin,
            "load_duration": 0,
            "prompt_eval_count": now.n_prompt,
            "prompt_eval_duration": round(1e6 * now.read_ms),
            "eval_count": now.n_written,
            "eval_duration": round(1e6 * now.write_ms),
        }

    def comment(self, text: str) -> str:
        return ""  # lines have none

    def part(self, part: Part) -> str:
        match part:
            case Thought():
                return self._called() + _line(self.said(thought=part.text))
            case Text():
                more = _probabilities(part.logprobs)
                if not part.text and not more:
                    return ""
                return self._called() + _line({**self.said(part.text), **more})
            case CallBegun():
                line, self._call = self._called(), part
                return line
            case CallArguments():
                self._arguments += part.text
                return ""

    def _called(self) -> str:
        """The call that is complete now, if there is one."""
        begun, arguments = self._call, self._arguments
        self._call, self._arguments = None, ""
        if begun is None:
            return ""
        return _line(self.said(calls={begun.index: Call(begun.name, arguments, begun.id)}))

    def end(self, done: Done, has_calls: bool) -> str:
        return self._called() + _line({**self.said(), **self._end(done)})

    def failed(self, error: ApiError) -> str:
        return _line(error.body("/api/chat"))


def _line(said: dict[str, Any]) -> str:
    return as_json(said) + "\n"
