"""POST /completion: llama-server's own protocol, for a text that goes on."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from edgekv.errors import BadInput
from edgekv.serve import sse, wording
from edgekv.serve.bounds import BoundedRoute
from edgekv.serve.completions import ask
from edgekv.serve.errors import ApiError
from edgekv.serve.events import Done
from edgekv.serve.preparing import prepared
from edgekv.serve.reply import Part, Text
from edgekv.serve.schemas import NativeBody
from edgekv.serve.service import Whole, Writer, respond, service_of

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
    writer = _Writer(service.model, bool(body.return_progress)) if body.stream else None
    return await respond(request, asked[0], writer, partial(_whole, service.model))


def _whole(model: str, answer: Whole) -> dict[str, Any]:
    found = {**_last(model, answer.done), "content": answer.message.text}
    probabilities = wording.chat_logprobs(answer.logprobs)
    if probabilities is not None:
        found["completion_probabilities"] = probabilities["content"]
    return found


def _last(model: str, done: Done) -> dict[str, Any]:
    """What is said of an answer at its end."""
    kind = "limit" if done.finish == "length" else "eos" if done.stop_text is None else "word"
    return {
        "content": "",
        "stop": True,
        "stop_type": kind,
        "stopping_word": done.stop_text or "",
        "model": model,
        "tokens_predicted": done.n_written,
        "tokens_evaluated": done.n_prompt,
        "tokens_cached": done.n_cached,
        "truncated": False,
        "timings": wording.timings(done),
        "kv": wording.cache(done),
    }


class _Writer(Writer):
    """Pieces of the text, each an event."""

    def __init__(self, model: str, with_progress: bool) -> None:
        self._model, self.with_progress = model, with_progress

    def progress_event(self, said: dict[str, Any]) -> str:
        return sse.event({"content": "", "stop": False, **said})

    def part(self, part: Part) -> str:
        assert isinstance(part, Text)  # texts have neither thoughts nor tools
        piece: dict[str, Any] = {"content": part.text, "stop": False}
        probabilities = wording.chat_logprobs(part.logprobs)
        if probabilities is not None:
            piece["completion_probabilities"] = probabilities["content"]
        return sse.event(piece)

    def end(self, done: Done, has_calls: bool) -> str:
        return sse.event(_last(self._model, done))

    def failed(self, error: ApiError) -> str:
        return sse.event(error.body("/completion"))
