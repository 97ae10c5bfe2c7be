"""POST /completion: llama-server's own protocol, for a text that goes on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from edgekv.errors import BadInput
from edgekv.serve import sse, wording
from edgekv.serve.asked import Asked
from edgekv.serve.bounds import BoundedRoute
from edgekv.serve.completions import ask
from edgekv.serve.errors import ApiError
from edgekv.serve.events import Done, TokenLogprob
from edgekv.serve.preparing import prepared
from edgekv.serve.reply import Part, Text
from edgekv.serve.schemas import NativeBody
from edgekv.serve.service import Service, Whole, Writer, respond, service_of
from edgekv.serve.settings import generation_settings

router = APIRouter(route_class=BoundedRoute)


@router.post("/completion")
@router.post("/completions", include_in_schema=False)
async def completion(body: NativeBody, request: Request) -> Response:
    """The text that follows a prompt."""
    service = service_of(request)
    body.logprobs = body.n_probs or None
    asked = await prepared(request, ask, service.asker, body)
    if len(asked) != 1:
        raise BadInput("give one prompt in a request, or several to /v1/completions")
    writer = _Writer(service, asked[0], body) if body.stream else None
    return await respond(request, asked[0], writer, partial(_whole, service, asked[0], body))


def _whole(service: Service, asked: Asked, body: NativeBody, answer: Whole) -> dict[str, Any]:
    text = answer.message.text
    found = {**_last(service, asked, answer.done, text), "content": text}
    if body.return_tokens:
        found["tokens"] = list(answer.done.tokens)
    return {**found, **_probabilities(answer.logprobs)}


def _probabilities(logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    if not logprobs:
        return {}
    return {"completion_probabilities": [wording.with_rivals(one) for one in logprobs]}


def _last(service: Service, asked: Asked, done: Done, text: str) -> dict[str, Any]:
    """What is said of an answer at its end."""
    kind = "limit" if done.finish == "length" else "eos" if done.stop_text is None else "word"
    return {
        "index": 0,
        "content": "",
        "tokens": [],
        "stop": True,
        "stop_type": kind,
        "stopping_word": done.stop_text or "",
        "model": service.model,
        "generation_settings": generation_settings(asked.wish),
        "has_new_line": "\n" in text,
        "tokens_predicted": done.n_written,
        "tokens_evaluated": done.n_prompt,
        "tokens_cached": done.n_cached,
        "truncated": False,
        "timings": wording.timings(done),
        "kv": wording.cache(done),
    }


class _Writer(Writer):
    """Pieces of the text, each an event."""

    def __init__(self, service: Service, asked: Asked, body: NativeBody) -> None:
        self._service, self._asked, self._text = service, asked, ""
        self.with_progress = bool(body.return_progress)

    def progress_event(self, said: dict[str, Any]) -> str:
        return sse.event({"content": "", "stop": False, **said})

    def part(self, part: Part) -> str:
        assert isinstance(part, Text)  # texts have neither thoughts nor tools
        self._text += part.text
        piece = {"index": 0, "content": part.text, "stop": False}
        return sse.event({**piece, **_probabilities(part.logprobs)})

    def end(self, done: Done, has_calls: bool) -> str:
        return sse.event(_last(self._service, self._asked, done, self._text))

    def failed(self, error: ApiError) -> str:
        return sse.event(error.body("/completion"))
